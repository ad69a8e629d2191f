from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoints import plan, records, report, result
from entrypoints.errors import BadConfig, InputMissing
from tests.unit.entrypoints import builders, schema


def folder(tmp_path: Path, ratio: float, pairs: int = 6, *, noise: float = 0.004, **context: Any) -> Path:
    tmp_path.mkdir(exist_ok=True)
    document, blocks, rows = builders.run(ratio, pairs, noise=noise)
    document.update(prompts={"pack": "p", "sha256": "0", "count": 8, "strata": {}, "ids": [], "warmup": 8},
                    ignore_eos=False, temperature=0.0,
                    image={"image": "sglang", "version": "1", "stack": "s", "key": "0", "packages": {"torch": "2"}})
    document["sha256"] = plan.digest(document)
    records.write(tmp_path / records.PLAN, records.dump(document))
    known = {"baseline": {}, "eagle3": {"speculative_algorithm": "EAGLE3"}}
    records.write(tmp_path / records.CONTEXT, records.dump(
        {"status": "complete", "started_at": "a", "ended_at": "b", "resolved_server_args": known,
         "machine": {"cpu": "x"}, "arms_diff": {"allowed": {"speculative_algorithm": [None, "EAGLE3"]},
                                                "forbidden": {}}, **context}))
    for block in blocks:
        records.append(tmp_path / records.BLOCKS, block)
    for row in rows:
        records.append(tmp_path / records.REQUESTS, row)
    return tmp_path


@pytest.mark.parametrize(("ratio", "noise", "code", "start"), [
    (1.1, 0.004, 0, "WIN: eagle3 decodes faster than baseline: +"),
    (0.9, 0.004, 10, "LOSS: eagle3 decodes slower than baseline: -"),
    (1.0, 0.004, 11, "EQUIVALENT: eagle3 and baseline are within 2 % of each other: "),
    (1.01, 0.03, 12, "INCONCLUSIVE: eagle3 against baseline: ")])
def test_headline_and_exit_code_say_the_verdict_with_its_interval(
        tmp_path: Path, ratio: float, noise: float, code: int, start: str) -> None:
    found = result.assemble(folder(tmp_path, ratio, noise=noise))
    assert found["exit_code"] == code
    assert found["verdict"]["headline"].startswith(start)
    assert "95 % interval" in found["verdict"]["headline"]
    assert "speed-up" not in report.markdown(found)


def test_inconclusive_says_how_many_more_pairs() -> None:
    one = {"ratio": 1.01, "ci": [0.99, 1.03], "alpha_used": 0.05, "pairs": 6, "pairs_needed_estimate": 10}
    document = builders.plan()
    assert "About 4 more pairs would settle it" in result.headline("inconclusive", one, document)
    assert "No reasonable number" in result.headline("inconclusive", {**one, "pairs_needed_estimate": None}, document)
    assert "too few server starts" in result.headline("inconclusive", {"ratio": 1.0, "ci": [None, None]}, document)
    assert "hangs on a few odd requests" in result.headline("inconclusive", {**one, "verdict": "win"}, document)
    assert result.headline("invalid", {}, document).startswith("INVALID")


def test_a_run_that_did_not_end_is_invalid_but_readable(tmp_path: Path) -> None:
    found = result.assemble(folder(tmp_path, 1.1, status="aborted", abort_reason="stopped by SIGTERM"))
    assert found["status"] == "aborted"
    assert found["verdict"]["class"] == "invalid"
    assert "stopped by SIGTERM" in found["verdict"]["invalid_causes"]
    assert found["comparison"][0]["pairs"] == 6, "what was measured is kept"
    assert result.assemble(folder(tmp_path, 1.1, status="running"))["verdict"]["invalid_causes"][-1] == \
        "the run did not end"


def test_a_plan_that_was_changed_afterwards_is_refused(tmp_path: Path) -> None:
    run = folder(tmp_path, 1.1)
    document = records.document(run / records.PLAN)
    document["margin"] = 0.2
    records.write(run / records.PLAN, records.dump(document))
    with pytest.raises(BadConfig, match="the plan was changed"):
        result.assemble(run)
    with pytest.raises(InputMissing):
        result.assemble(tmp_path / "nothing")


@pytest.mark.parametrize(("change", "state"), [
    ({}, "active"), ({"declared": None}, "inactive"), ({"spec_verify_ct": 0}, "fallback"),
    ({"none": True}, "unverified"), ({"tau": 1.0}, "inactive")])
def test_speculation_is_active_only_with_evidence_in_every_request(
        tmp_path: Path, change: dict[str, Any], state: str) -> None:
    document, blocks, rows = builders.run(1.1, 2, tau=change.get("tau", 2.0))
    spec = [row for row in rows if row["arm"] == "eagle3"]
    for row in spec[:1] if "spec_verify_ct" in change else spec if "none" in change else []:
        row.update(spec_verify_ct=None, spec_accepted=None)
    known = {"eagle3": {"speculative_algorithm": change.get("declared", "EAGLE3")}}
    claim = result._speculation(document, blocks, rows, known)[0]
    assert claim["state"] == state
    assert (claim["reason"] == "") is (state == "active")


def test_lossy_thresholds_are_reported_before_and_after(tmp_path: Path) -> None:
    document, blocks, _ = builders.run(1.1, 2)
    blocks[1]["server_info_after"] = {"speculative_accept_threshold_acc": 0.9}
    known = {"eagle3": {"speculative_accept_threshold_single": 0.8, "speculative_accept_threshold_acc": 1.0}}
    assert result._lossy(document, known, blocks) == {"speculative_accept_threshold_single": 0.8,
                                                      "speculative_accept_threshold_acc": 0.9}


def test_the_report_has_every_part_and_needs_the_result_only(tmp_path: Path) -> None:
    found = json.loads(records.dump(result.assemble(folder(tmp_path, 1.1))))
    text = report.markdown(found)
    for part in ("# WIN", "## Arms", "## Comparison", "## Pairs", "## Evidence", "## Output", "## Break-even",
                 "## Server starts", "## Environment"):
        assert part in text
    assert "| eagle3   | 1           |" in text
    assert "accept length" in text
    assert report.summary(found).startswith("WIN")


def test_a_report_of_nothing_does_not_fail(tmp_path: Path) -> None:
    run = folder(tmp_path, 1.1)
    for name in (records.BLOCKS, records.REQUESTS):
        (run / name).unlink()
    found = result.assemble(run)
    assert "No pair was completed." in report.markdown(found)
    assert found["verdict"]["class"] == "inconclusive"
    assert found["evidence"][0]["state"] == "unverified"


def test_numbers_and_intervals_that_are_not_known_are_a_dash() -> None:
    assert report.number(None) == "-"
    assert report.interval([None, None]) == report.interval(None) == "unbounded"
    assert report.interval([0.9, 1.2]) == "-10.0 % to +20.0 %"
    assert result.percent(0.731) == "-26.9 %"
    assert result.percent(734886850.7) == "over +9900 %"


def test_what_was_written_fits_the_published_schema(tmp_path: Path) -> None:
    document = json.loads(Path(result.__file__).with_name("result.schema.json").read_text())
    found = json.loads(records.dump(result.assemble(folder(tmp_path, 1.1))))
    found["plan"].update({key: found["plan"].get(key, value) for key, value in {
        "schema": 1, "created_at": "now", "warmup": {}, "client": {}, "max_pairs": 6, "alpha_total": 0.05,
        "order": []}.items()})
    assert list(schema.complaints(found, document, document)) == []
    found["verdict"]["class"] = "great"
    del found["comparison"]
    assert [line.partition(":")[0] for line in schema.complaints(found, document, document)] == [
        "$.comparison", "$.verdict.class"]


def test_a_load_point_above_the_running_limit_is_marked(tmp_path: Path) -> None:
    """K4-3."""
    limits = {"baseline": {"effective_max_running_requests_per_dp": 48}, "eagle3": {"speculative_algorithm": "EAGLE3"}}
    run = folder(tmp_path, 1.1, resolved_server_args=limits)
    document = records.document(run / records.PLAN)
    document["load_points"] = [1, 64]
    document["sha256"] = plan.digest(document)
    records.write(run / records.PLAN, records.dump(document))
    assert "concurrency 64 is above the 48 requests that baseline runs at once" in \
        result.assemble(run)["verdict"]["reasons"]
