from __future__ import annotations

from typing import Any

import pytest

from entrypoints import prompts, records, run, sweep
from entrypoints.errors import BadConfig, Usage
from tests.unit.entrypoints.test_run import BASE, SPEC, Bench, bench

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
    assert result["comparison"][0]["pairs"] == 2
