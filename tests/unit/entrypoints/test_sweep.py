from __future__ import annotations

from typing import Any

import pytest

from entrypoints import prompts, records, run, sweep
from entrypoints import result as result_of
from entrypoints.errors import BadConfig, Deadline, Usage
from tests.unit.entrypoints.test_run import BASE, FAST, SPEC, Bench, bench

__all__ = ["bench"]


def test_the_halves_have_no_prompt_in_common_and_all_strata() -> None:
    pack = prompts.load()
    one, other = prompts.half(pack, 0), prompts.half(pack, 1)
    ids = [{prompt.id for prompt in part.measured} for part in (one, other)]
    assert not ids[0] & ids[1]
    assert len(ids[0] | ids[1]) == 48
    assert one.strata() == other.strata() == {"chat": 6, "code": 6, "math": 6, "rewrite": 6}
    with pytest.raises(BadConfig, match="too few prompts"):
        prompts.half(prompts.load(per_stratum=1), 1)


@pytest.mark.parametrize(("texts", "why"), [
    (("3,1,4",), "at least two"), (("3,1", "3,1,4"), "bad setting 3,1"), (("0,1,1", "3,1,4"), "bad setting 0,1,1"),
    (("a,b,c", "3,1,4"), "bad setting a,b,c"), (("3,1,6", "3,1,4"), "a token for each step")])
def test_bad_settings_are_named(bench: Bench, texts: tuple[str, ...], why: str) -> None:
    with pytest.raises(Usage, match=why):
        sweep.parse(bench.settings(sweep=texts), bench.image(BASE, SPEC))


def test_the_best_setting_is_chosen_on_one_half_and_confirmed_on_the_other(bench: Bench) -> None:
    spec: dict[str, Any] = SPEC | {"by_steps": {"2": 300.0, "3": 2000.0, "5": 350.0}}
    chosen = bench.settings(prompts_per_stratum=2, sweep=("2,1,3", "3,1,4", "5,1,6"))
    run.benchmark(chosen, bench.image(BASE, spec), environ={}, out=bench.out, err=bench.err)
    first, second = sorted((bench.folder / "results").iterdir())
    result = records.document(second / records.RESULT)
    assert result["status"] == "complete"
    assert result["plan"]["primary_endpoint"]["candidate"] == "steps3-topk1-draft4"
    selection = result["plan"]["selection"]
    assert selection["folder"] == first.name
    assert selection["table"][0]["arm"] == "steps3-topk1-draft4"
    assert len(selection["table"]) == 3
    assert "chosen among 3 settings on other prompts" in bench.out.getvalue()
    used = [set(records.document(folder / records.PLAN)["prompts"]["ids"]) for folder in (first, second)]
    assert not used[0] & used[1]
    assert records.document(first / records.RESULT)["raw_sha256"] == result_of.assemble(first)["raw_sha256"]
    assert result["comparison"][0]["pairs"] == 2


def test_a_setting_that_does_not_start_is_only_not_chosen(bench: Bench) -> None:
    spec: dict[str, Any] = SPEC | FAST | {"stillborn_steps": [2, 5]}
    wanted = bench.settings(prompts_per_stratum=2, pairs=1, sweep=("2,1,3", "3,1,4", "5,1,6", "7,1,8"))
    run.benchmark(wanted, bench.image(BASE | FAST, spec), environ={}, out=bench.out, err=bench.err)
    result = records.document(max((bench.folder / "results").iterdir()) / records.RESULT)
    table = {row["arm"]: row for row in result["plan"]["selection"]["table"]}
    assert {name for name, row in table.items() if row["tok_s"] is None} == {
        "steps2-topk1-draft3", "steps5-topk1-draft6"}
    assert "simulated" in table["steps2-topk1-draft3"]["why"]
    assert result["plan"]["primary_endpoint"]["candidate"] in {"steps3-topk1-draft4", "steps7-topk1-draft8"}
    assert "steps2-topk1-draft3 server died" in bench.out.getvalue()
    assert "sweep: steps5-topk1-draft6 cannot be chosen: server died" in bench.err.getvalue()


def test_a_selection_that_was_stopped_resumes_into_its_confirmation(bench: Bench) -> None:
    built = bench.image(BASE | FAST, SPEC | FAST)
    wanted = {"prompts_per_stratum": 2, "pairs": 1}
    with pytest.raises(Deadline):
        run.benchmark(bench.settings(**wanted, sweep=("3,1,4", "5,1,6"), deadline_seconds=0.01), built, environ={},
                      out=bench.out, err=bench.err)
    first, = (bench.folder / "results").iterdir()
    again = bench.settings(resume=str(first))
    run.benchmark(again, built, environ={}, out=bench.out, err=bench.err)
    one, second = sorted((bench.folder / "results").iterdir())
    assert one == first
    result = records.document(second / records.RESULT)
    assert result["status"] == "complete"
    assert result["plan"]["selection"]["folder"] == first.name
    assert next(iter(result["arms"])) == "baseline"
    with pytest.raises(Usage, match="confirmed in a run of its own") as caught:
        run.benchmark(again, built, environ={}, out=bench.out, err=bench.err)
    assert second.name in str(caught.value)
