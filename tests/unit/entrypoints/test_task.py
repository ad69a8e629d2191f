from __future__ import annotations

import re

import pytest

from entrypoints import task


def test_problems_are_the_same_for_a_seed_and_each_is_another() -> None:
    made = task.problems(7, 200)
    assert made == task.problems(7, 200)
    assert made[:50] == task.problems(7, 50)
    assert len({one.text for one in made}) == len({one.id for one in made}) == 200
    assert not {one.text for one in made} & {one.text for one in task.problems(8, 200)}


def test_every_answer_is_a_whole_number_that_makes_sense_and_is_not_in_the_question() -> None:
    made = task.problems(3, 400)
    assert all(0 < one.answer < 5000 for one in made)
    given = sum(str(one.answer) in re.findall(r"\d+", one.text) for one in made)
    assert given < 20, "an answer that merely repeats a number of the question must not do"


@pytest.mark.parametrize(("text", "answer"), [
    ("Ada bakes 10 trays of 12 rolls. In the morning 40 rolls are sold, and 5 go to a neighbour. How many rolls are "
     "left?", 75)])
def test_an_answer_worked_out_by_hand(text: str, answer: int) -> None:
    rolls = iter((10, 12, 5, 40))
    assert task._bakery(lambda low, high: next(rolls), "Ada") == (text, answer)


@pytest.mark.parametrize(("kind", "rolls", "answer"), [
    (task._train, (200, 50, 30, 20), 160), (task._wages, (20, 15, 4, 5), 380), (task._shelves, (5, 10, 3), 16),
    (task._fence, (30, 20, 7), 700), (task._ages, (10, 3, 4), 48), (task._water, (20, 30, 5), 450),
    (task._market, (6, 5, 3, 4), 12)])
def test_each_kind_of_problem_has_the_answer_that_a_person_finds(kind: object, rolls: tuple[int, ...],
                                                                  answer: int) -> None:
    dice = iter(rolls)
    assert callable(kind)
    assert kind(lambda low, high: next(dice), "Ada")[1] == answer


@pytest.mark.parametrize(("text", "answer"), [
    ("3 + 4 = 7\nAnswer: 7", 7), ("Answer: 1,234", 1234), ("**Answer:** $12", 12), ("Answer: \\boxed{48}", 48),
    ("The answer is 5. Then I checked: 9 apples", 5), ("answer: 3\nNo: Answer: 4", 4), ("so 12 remain", 12),
    ("12.0", 12), ("Answer: 12.5", None), ("Answer: -3", -3), ("no idea", None), ("", None), ("Answer: 7.", 7)])
def test_the_answer_is_found_in_what_models_write(text: str, answer: int | None) -> None:
    assert task.extract(text) == answer


def answers(right: int, total: int, shift: int = 0) -> dict[str, bool]:
    return {f"task-{(place + shift) % total:03}": place < right for place in range(total)}


def test_the_same_accuracy_is_no_drop_even_with_other_mistakes() -> None:
    found = task.compare(answers(150, 200), answers(150, 200, shift=5))
    assert found is not None
    assert (found["state"], found["acc_base"], found["acc_spec"]) == ("same", 0.75, 0.75)
    assert found["discordant"] == [5, 5]
    assert found["p_value"] == 1.0
    assert found["diff_ci"][0] < 0 < found["diff_ci"][1]


def test_eight_problems_lost_and_none_won_are_a_drop_and_seven_are_none() -> None:
    """McNemar: 2 / 2**8 = 0.0078, 2 / 2**7 = 0.0156."""
    eight, seven = (task.compare(answers(150, 200), answers(150 - lost, 200)) for lost in (8, 7))
    assert eight is not None
    assert seven is not None
    assert (eight["state"], eight["p_value"]) == ("drop", 0.007812)
    assert (seven["state"], seven["p_value"]) == ("same", 0.015625)
    better = task.compare(answers(100, 200), answers(150, 200))
    assert better is not None
    assert better["state"] == "same", "an arm that is better is no defect"


def test_a_model_that_cannot_do_it_says_nothing() -> None:
    weak = task.compare(answers(0, 16), answers(0, 16))
    assert weak is not None
    assert weak["state"] == "unavailable"
    assert weak["reason"] == "the baseline answers 0 of 16 rightly: this model is too weak for the task"
    one = task.compare(answers(9, 16), None)
    assert one is not None
    assert one["reason"] == "only one arm was asked"
    assert task.compare(None, None) is None


def test_an_arm_that_gets_nothing_right_while_the_baseline_can_is_a_drop() -> None:
    found = task.compare(answers(150, 200), answers(0, 16))
    assert found is not None
    assert (found["n"], found["state"]) == (16, "drop")
    assert task.hopeless([False] * 16)
    assert not task.hopeless([False] * 15)
    assert not task.hopeless([False] * 16 + [True])


def test_a_problem_is_a_conversation_and_its_outcome_a_sentence() -> None:
    (turn,) = task.problems(1, 1)[0].messages
    assert turn["role"] == "user"
    assert turn["content"].endswith("'Answer: NUMBER'.")
    found = task.compare(answers(150, 200), answers(140, 200))
    assert found is not None
    assert task.line(found, "baseline", "eagle3") == (
        "Task check: baseline answers 75.0 % of 200 word problems rightly, eagle3 70.0 % (95 % interval of the "
        "difference -8.0 to -2.0 points, exact McNemar p 0.002).")
    weak = task.compare(answers(0, 16), answers(0, 16))
    assert weak is not None
    assert task.line(weak, "b", "e").startswith("Task check (word problems): unavailable, the baseline answers 0 of 16")
