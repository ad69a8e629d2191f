"""Runs of different images against each other: what may be compared, how, and what is said about it."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrypoints import comparable, compare, plan, records
from entrypoints.cli import main
from entrypoints.errors import BadConfig, InputMissing, Invalid, Usage
from tests.unit.entrypoints import builders

MACHINE = {"cpu": "x", "cores_usable": 8, "ram_gb": 64.0, "kernel": "6.1", "driver": "580.1", "numa_nodes": 1,
           "gpus": [{"name": "RTX PRO 6000", "uuid": "GPU-1"}], "p2p": [], "topology": []}
IMAGES = {"old": "a" * 64, "new": "b" * 64, "newer": "c" * 64}


class Shelf:
    """Run folders with a known truth."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0

    def run(self, image: str = "old", *, ratio: float = 1.2, base: float = 100.0, noise: float = 0.003,
            pairs: int = 4, at: int | None = None, change: Callable[[dict[str, Any]], None] = lambda _: None,
            machine: dict[str, Any] = MACHINE, models: dict[str, Any] | None = None, status: str = "complete",
            rows: Callable[[dict[str, Any]], None] = lambda _: None, hours: int = 1) -> str:
        """A run of an image that starts at an hour and takes one; `change` edits its plan, `rows` its requests."""
        self.count += 1
        hour = self.count if at is None else at
        document, blocks, requests = builders.run(ratio, pairs, noise=noise, seed=self.count, base=base)
        document = copy.deepcopy(document)
        document.update(
            run_id=f"r{self.count}", alpha_total=0.05, ignore_eos=False, temperature=0.0, rate=None,
            prompts={"pack": "p", "sha256": "0", "count": 8, "strata": {}, "ids": builders.prompts(8), "warmup": 8},
            image={"image": "sglang", "version": "0.5.23", "stack": image, "key": IMAGES[image],
                   "packages": {"torch": f"2.{len(image)}", "numpy": "2"}, "trees": {}})
        for arm in document["arms"]:
            arm["argv"] = ["python", "--model-path", "/m", "--tp", "8"]
        change(document)
        document["sha256"] = plan.digest(document)
        for row in requests:
            row.update(chunks=row["chunks"][:4], output_ids=row["output_ids"][:40])  # smaller files
            rows(row)
        folder = self.root / f"run-{self.count}"
        folder.mkdir()
        records.write(folder / records.PLAN, records.dump(document))
        known = {"baseline": {}, "eagle3": {"speculative_algorithm": "EAGLE3"}}
        models = {"model": {"sha256": "1"}, "draft": {"sha256": "2"}} if models is None else models
        records.write(folder / records.CONTEXT, records.dump(
            {"status": status, "abort_reason": None, "started_at": f"2026-12-01T{hour:02}:00:00Z",
             "ended_at": f"2026-12-01T{hour + hours:02}:00:00Z", "resolved_server_args": known, "machine": machine,
             "rendered_ids_sha256": "3", "software": {"models": models},
             "arms_diff": {"allowed": {}, "forbidden": {}}}))
        for one in blocks:
            records.append(folder / records.BLOCKS, one)
        for row in requests:
            records.append(folder / records.REQUESTS, row)
        return str(folder)

    def alternating(self, pattern: str = "old new new old old new new old", **new: Any) -> list[str]:
        """Runs in the order of a pattern; `new` are the new image's properties."""
        return [self.run(name, **(new if name == "new" else {})) for name in pattern.split()]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def compared(folders: list[str], **options: Any) -> dict[str, Any]:
    return compare.compare(comparable.read(folders), **options)


def primary(found: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = found["comparison"][0]
    return first


# ---------------------------------------------------------------------------------------------------- what is measured

def test_runs_taken_alternately_give_a_verdict_without_any_allowance(shelf: Shelf) -> None:
    found = compared(shelf.alternating(base=103.0))
    assert (found["basis"], found["allowance"], found["verdict"], found["exit_code"]) == ("interleaved", 0.0, "win", 0)
    first = primary(found)
    assert (first["arm"], first["kind"], first["runs"]) == ("eagle3", "rate", [4, 4])
    assert first["ratio"] == pytest.approx(1.03, abs=0.004)
    assert first["ci"][0] > 1.02
    assert first["levels"] == [pytest.approx(128.4, rel=0.01), pytest.approx(132.2, rel=0.01)]
    gain = next(one for one in found["comparison"] if one["kind"] == "gain")
    assert gain["ratio"] == pytest.approx(1.0, abs=0.004)
    assert gain["verdict"] == "equivalent"
    new = "sglang 0.5.23 (new, bbbbbbbbbbbb)"
    assert found["headline"].startswith(f"WIN: {new} decodes faster than sglang 0.5.23 (old,")
    assert found["under_test"][new]["key"] == ["a" * 64, "b" * 64]


def test_runs_that_are_not_interleaved_need_an_effect_above_the_allowance(shelf: Shelf) -> None:
    small = compared([shelf.run("old"), shelf.run("new", base=103.0)])
    assert (small["basis"], small["allowance"], small["verdict"]) == ("blocks", 0.05, "inconclusive")
    assert primary(small)["bears"] == pytest.approx(0.025, abs=0.01)
    text = compare.render(small)
    assert "not interleaved, 5 % of drift allowed for" in text.splitlines()[0]
    assert "the image is faster as long as the machine shifted by less than 2." in text
    big = compared([shelf.run("old"), shelf.run("new", base=120.0)])
    assert big["verdict"] == "win"
    assert big["headline"].startswith("WIN (not interleaved, 5 % of drift allowed for): ")
    assert compared([shelf.run("old"), shelf.run("new", base=103.0)], drift=0.0)["verdict"] == "win"


def test_a_gain_within_runs_needs_no_allowance(shelf: Shelf) -> None:
    """The machine was 20 % slower in the second run; the new image's candidate gains 8 % more over its baseline."""
    found = compared([shelf.run("old"), shelf.run("new", base=80.0, ratio=1.2 * 1.08)])
    gain = next(one for one in found["comparison"] if one["kind"] == "gain")
    assert (gain["ratio"], gain["verdict"]) == (pytest.approx(1.08, abs=0.01), "win")
    assert gain["levels"] == [pytest.approx(1.2, abs=0.01), pytest.approx(1.296, abs=0.01)]


def test_several_runs_that_do_not_alternate_are_the_units(shelf: Shelf) -> None:
    found = compared([shelf.run("old"), shelf.run("old"), shelf.run("old", base=101), shelf.run("new", base=70),
                      shelf.run("new", base=70.5), shelf.run("new", base=69.5)])
    assert (found["basis"], found["verdict"], found["exit_code"]) == ("runs", "loss", 10)
    assert primary(found)["blocks"] == [12, 12]
    assert "whole runs are compared" in compare.render(found)


def test_the_same_image_in_other_surroundings_is_compared_by_names(shelf: Shelf) -> None:
    folders = [f"before={shelf.run()}", f"after={shelf.run(machine={**MACHINE, 'driver': '590.2'}, base=130.0)}"]
    with pytest.raises(Invalid, match=r"machine\.driver differs"):
        compared(folders)
    found = compared(folders, allow=["machine.driver"])
    assert (found["reference"], found["verdict"]) == ("before", "win")
    assert found["accepted"] == {"machine.driver": ["580.1", "590.2"]}
    text = compare.render(found)
    assert "accepted difference: machine.driver: 580.1 | 590.2" in text
    assert "The same image." in text


def test_three_images_one_verdict(shelf: Shelf) -> None:
    order = ["old", "new", "newer", "newer", "new", "old"] * 2
    bases = {"old": 100.0, "new": 104.0, "newer": 96.0}
    found = compared([shelf.run(name, base=bases[name]) for name in order])
    assert found["basis"] == "interleaved"
    assert [one["verdict"] for one in found["comparison"][:2]] == ["win", "loss"]
    assert found["verdict"] == "loss"
    levels = sorted(one["alpha_used"] for one in found["comparison"][:2])
    assert levels == [0.025, 0.05], "two primary comparisons share the level (Holm)"


@pytest.mark.parametrize(("verdicts", "together"), [
    (["win", "win"], "win"), (["win", "equivalent"], "equivalent"), (["win", "inconclusive"], "inconclusive"),
    (["inconclusive", "loss"], "loss"), ([], "inconclusive")])
def test_overall(verdicts: list[str], together: str) -> None:
    assert compare.overall(verdicts) == together


@pytest.mark.parametrize(("order", "alternate"), [
    ("ab", False), ("abba", True), ("abbaab", True), ("abab", False), ("aabb", False), ("abbaa", False),
    ("abccba", True), ("abcabc", False), ("aab", False), ("baab", True)])
def test_runs_alternate_when_each_goes_first_equally_often(order: str, alternate: bool) -> None:
    assert compare.rounds(list(order)) is alternate


def test_only_prompts_that_every_start_has_are_compared() -> None:
    one = {(0, "p"): 1.0, (0, "q"): 5.0, (1, "p"): 2.0, (1, "q"): 5.0}
    other = {(0, "p"): 4.0, (0, "r"): 9.0}
    assert [part.tolist() for part in compare.matched([one, other])] == [[1.0, 2.0], [4.0]]
    assert [part.size for part in compare.matched([one, {(0, "r"): 1.0}])] == [0, 0]
    assert compare.matched([]) == []


def test_too_little_data_has_no_interval(shelf: Shelf) -> None:
    found = compared([shelf.run("old", pairs=1), shelf.run("new", pairs=1, base=150.0)])
    assert (found["verdict"], found["exit_code"]) == ("inconclusive", 12)
    assert primary(found)["ci"] == [None, None]
    assert "too little data" in found["headline"]
    assert "unbounded" in compare.render(found)


def test_runs_of_the_baseline_against_itself_compare_its_rate(shelf: Shelf) -> None:
    def again(document: dict[str, Any]) -> None:
        document["arms"][1].update(control=True, speculative=False)
        document["required_evidence"] = []

    found = compared([shelf.run("old", change=again, ratio=1.0), shelf.run("new", change=again, ratio=1.0, base=130.0)])
    assert (primary(found)["kind"], primary(found)["arm"]) == ("rate", "baseline")
    assert found["verdict"] == "win"
    assert "baseline, concurrency 1" in found["headline"]


def test_no_common_prompt_has_no_ratio(shelf: Shelf) -> None:
    def renamed(row: dict[str, Any]) -> None:
        row["prompt_id"] += "-x"

    found = compared([shelf.run("old"), shelf.run("new", rows=renamed)])
    assert primary(found)["ratio"] is None
    assert found["verdict"] == "inconclusive"


def test_equal_numbers_everywhere_are_equivalent() -> None:
    same = np.array([1.0, 1.0])
    assert compare.welch(same, same).interval(0.05).ratio() == [1.0, 1.0]
    assert compare.paired(same - same).p() == 1.0
    assert compare.paired(same).p() == 0.0
    assert compare.paired(same).p(allowance=1.0) == 1.0
    assert compare.welch(same, same[:1]).p() == 1.0
    assert compare.paired(same[:1]).interval(0.05).ratio() == [None, None]


def test_a_close_call_says_how_many_rounds_more(shelf: Shelf) -> None:
    found = compared(shelf.alternating("old new new old", base=103.0, noise=0.02))
    assert found["verdict"] == "inconclusive"
    assert "more rounds would settle" in compare.render(found)


def test_shorter_answers_are_other_work(shelf: Shelf) -> None:
    def shorter(row: dict[str, Any]) -> None:
        row["n_tokens_server"] -= 60

    found = compared([shelf.run("old"), shelf.run("new", rows=shorter)])
    assert (found["verdict"], found["exit_code"]) == ("invalid", 13)
    assert "not the same work" in compare.render(found)


def test_other_answers_are_told(shelf: Shelf) -> None:
    def other(row: dict[str, Any]) -> None:
        row["output_ids"] = [one + 1 for one in row["output_ids"]]

    found = compared([shelf.run("old"), shelf.run("new", rows=other)])
    assert "equal those of the reference in 0 % of the prompts, 100 % between two starts" in compare.render(found)


# ------------------------------------------------------------------------------------------------------ what is refused

def edit(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document[name] = value

    return change


def argv(*words: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["arms"][1]["argv"] += words

    return change


def prompts(document: dict[str, Any]) -> None:
    document["prompts"]["sha256"] = "1"


@pytest.mark.parametrize(("other", "name"), [
    ({"change": edit("max_tokens", 512)}, "max_tokens"), ({"change": edit("temperature", 0.7)}, "temperature"),
    ({"change": edit("load_points", [1, 4])}, "load_points"), ({"change": edit("passes", 3)}, "passes"),
    ({"change": edit("margin", 0.05)}, "margin"), ({"change": edit("rate", 2.0)}, "rate"),
    ({"change": edit("order_seed", 2)}, "order_seed"), ({"change": prompts}, "prompts.sha256"),
    ({"change": argv("--attention-backend", "triton")}, "arms.eagle3.attention-backend"),
    ({"models": {"model": {"sha256": "other"}, "draft": {"sha256": "2"}}}, "model.model"),
    ({"models": {"model": {"sha256": "1"}}}, "model.draft"),
    ({"machine": {**MACHINE, "gpus": [{"name": "RTX PRO 6000", "uuid": "GPU-2"}]}}, "machine.gpus"),
    ({"machine": {**MACHINE, "gpus": [], "id": "i"}}, "machine.id"),
    ({"machine": {**MACHINE, "kernel": "6.2"}}, "machine.kernel"), ({"at": 1}, "machine.overlap")])
def test_what_must_be_the_same_is_refused_by_name(shelf: Shelf, other: dict[str, Any], name: str) -> None:
    folders = [shelf.run("old", at=1), shelf.run("new", **{"at": 4, **other})]
    with pytest.raises(Invalid) as caught:
        compared(folders)
    problem = next(one for one in caught.value.problems if f": {name} differs" in one.what)
    assert problem.found
    assert problem.expected
    assert problem.todo
    assert folders[0] in problem.where
    if name.startswith(comparable.ACCEPTABLE) and name != "machine.gpus":
        kinds = sorted({one.what.split(": ")[1].removesuffix(" differs") for one in caught.value.problems})
        assert list(compared(folders, allow=kinds)["accepted"]) == kinds


def test_a_flag_without_a_value_is_told(shelf: Shelf) -> None:
    with pytest.raises(Invalid, match=r"absent \| given"):
        compared([shelf.run("old"), shelf.run("new", change=argv("--enable-metrics"))])


def test_a_group_is_one_image_in_one_environment(shelf: Shelf) -> None:
    quiet, loud = (edit("environment", {"NCCL_P2P_DISABLE": value}) for value in ("0", "1"))
    one, other = shelf.run("old", change=quiet), shelf.run("old", change=loud)
    third = shelf.run("new", change=quiet)
    with pytest.raises(Invalid, match=r"the runs of a group differ: environment\.NCCL_P2P_DISABLE"):
        compared([one, other, third])
    found = compared([f"off={one}", f"on={other}"])
    assert found["under_test"] == {"on": {"environment.NCCL_P2P_DISABLE": ["0", "1"]}}
    with pytest.raises(Invalid) as caught:
        compared([f"a={one}", f"a={third}", f"b={other}"])
    assert [problem.what for problem in caught.value.problems] == ["the runs of a group differ: key"]


def test_all_differences_come_at_once(shelf: Shelf) -> None:
    machine = {**MACHINE, "driver": "590"}
    with pytest.raises(Invalid) as caught:
        compared([shelf.run("old"), shelf.run("new", change=prompts, machine=machine),
                  shelf.run("new", status="aborted")])
    whats = [one.what for one in caught.value.problems]
    assert len(whats) == 3
    assert any("the run is invalid" in what for what in whats)
    assert any("prompts.sha256" in what for what in whats)
    assert any("machine.driver" in what for what in whats)


@pytest.mark.parametrize("free", [
    edit("max_pairs", 12), edit("effort", "quick"), edit("looks", [4, 6])])
def test_the_number_of_pairs_and_the_place_of_files_may_differ(shelf: Shelf, free: Callable[..., None]) -> None:
    def places(document: dict[str, Any]) -> None:
        free(document)
        for arm in document["arms"]:
            arm["argv"][2] = "/elsewhere"

    assert compared([shelf.run("old"), shelf.run("new", change=places, pairs=6)])["verdict"] == "inconclusive"


def test_a_control_arm_in_one_run_only_is_no_difference(shelf: Shelf) -> None:
    def control(document: dict[str, Any]) -> None:
        document["arms"].append({**document["arms"][0], "name": "control", "control": True})

    assert compared([shelf.run("old", change=control), shelf.run("new")])["verdict"] == "inconclusive"


def test_words_that_make_no_comparison(shelf: Shelf, tmp_path: Path) -> None:
    one = shelf.run("old")
    with pytest.raises(Usage) as caught:
        compared([one, one])
    assert [problem.what for problem in caught.value.problems] == ["the same run twice", "nothing to compare"]
    with pytest.raises(Usage, match="name the groups: old=DIR new=DIR"):
        compared([one, shelf.run("old")])
    with pytest.raises(InputMissing) as missing:
        compared([one, str(tmp_path / "none"), str(tmp_path / "nor")])
    assert len(missing.value.problems) == 2
    with pytest.raises(Usage, match="two run folders"):
        compare.main([one])
    with pytest.raises(Usage, match="difference cannot be accepted"):
        compared([one, shelf.run("new")], allow=["max_tokens"])
    with pytest.raises(Usage, match="a share"):
        compare.main([one, one, "--drift", "5"])
    with pytest.raises(Usage, match="unrecognized"):
        compare.main([one, one, "--dritf", "5"])


def test_a_plan_that_was_changed_afterwards_is_refused(shelf: Shelf) -> None:
    folder = shelf.run("new")
    path = Path(folder) / records.PLAN
    path.write_text(path.read_text().replace('"margin": 0.02', '"margin": 0.2'))
    with pytest.raises(BadConfig, match="the plan was changed"):
        compared([shelf.run("old"), folder])


# ------------------------------------------------------------------------------------------------------- how it is used

def test_the_mode_prints_and_its_exit_code_says_the_verdict(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [shelf.run("old"), shelf.run("new", base=70.0)]
    assert main(["compare", *folders], {}) == 10
    assert capsys.readouterr().out.startswith("# LOSS (not interleaved")
    assert main(["compare", *folders, "--exit-zero-on-valid", "--json"], {}) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "loss"
    assert document["groups"][document["reference"]][0]["raw_sha256"]
    assert main(["compare", folders[0], folders[0], "--json"], {}) == 64
    assert json.loads(capsys.readouterr().out)["kind"] == "usage"


def test_a_comparison_is_the_same_each_time(shelf: Shelf) -> None:
    folders = shelf.alternating(base=101.0)
    texts = set()
    for _ in range(2):
        out = io.StringIO()
        compare.main([*folders, "--json"], out)
        texts.add(out.getvalue())
    assert len(texts) == 1
