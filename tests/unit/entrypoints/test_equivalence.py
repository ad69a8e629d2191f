from __future__ import annotations

import numpy as np
import pytest

from entrypoints import equivalence

TEXT = [int(one) for one in np.random.default_rng(1).integers(0, 2000, 200)]


@pytest.mark.parametrize(("ids", "why"), [
    ([], "empty"), ([5] * 40, "one token repeated"), ([1, 2, 3] * 30, "only 3% of its bigrams differ"), (TEXT, ""),
    ([5, 5, 5], "")])
def test_garbage_is_recognised_and_short_answers_are_not_judged(ids: list[int], why: str) -> None:
    assert equivalence.garbage(ids) == why


def test_where_two_answers_split() -> None:
    assert equivalence.split([1, 2, 3], [1, 2, 3]) is None
    assert equivalence.split([1, 2, 3], [1, 9, 3]) == 1
    assert equivalence.split([1, 2, 3], [1, 2]) == 2


def changed(at: int) -> list[int]:
    return [*TEXT[:at], 5000, *TEXT[at + 1:]]


def test_the_hazard_counts_tokens_until_the_split() -> None:
    found = equivalence.compare([(TEXT, TEXT), (TEXT, changed(99))])
    assert found is not None
    assert found["hazard_per_token"] == pytest.approx(1 / 300)
    assert found["exact_share"] == 0.5
    assert found["first_split_index"] == {"p10": 99, "p50": 99, "p90": 99}
    assert equivalence.compare([]) is None


def answers(**arms: list[list[list[int]]]) -> dict[tuple[str, int, str], list[int]]:
    return {(arm, block * 10 + len(arm), f"p{place}"): ids for arm, blocks in arms.items()
            for block, texts in enumerate(blocks) for place, ids in enumerate(texts)}


@pytest.mark.parametrize(("spec", "state"), [
    ([[TEXT, TEXT]], "equivalent"),
    ([[TEXT, changed(199)]], "equivalent-within-noise"),
    ([[changed(20), changed(30)]], "different"),
    ([[changed(3), TEXT]], "different")])
def test_the_state_follows_the_splits(spec: list[list[list[int]]], state: str) -> None:
    found = equivalence.assess(answers(base=[[TEXT, TEXT], [TEXT, TEXT]], spec=spec), "base", "spec")
    assert found["state"] == state
    assert bool(found["alarms"]) is (state == "different")


def test_a_baseline_that_differs_from_itself_as_much_raises_the_limit() -> None:
    base = [[changed(40), TEXT], [TEXT, changed(50)]]
    found = equivalence.assess(answers(base=base, spec=[[changed(60), TEXT]]), "base", "spec")
    assert found["state"] == "equivalent-within-noise"


def test_lossy_switches_and_missing_answers_have_states_of_their_own() -> None:
    same = answers(base=[[TEXT]], spec=[[TEXT]])
    assert equivalence.assess(same, "base", "spec", {"threshold": 0.9})["state"] == "lossy-by-config"
    assert equivalence.assess(answers(base=[[TEXT]]), "base", "spec")["state"] == "not-checked"
