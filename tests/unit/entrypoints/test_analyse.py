from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from entrypoints import analyse
from tests.unit.entrypoints import builders


@pytest.mark.parametrize(("ratio", "noise", "verdict", "practical"), [
    (1.10, 0.005, "win", True), (0.90, 0.005, "loss", True), (1.0, 0.004, "equivalent", False),
    (1.008, 0.002, "equivalent", False), (1.02, 0.004, "win", False), (1.01, 0.03, "inconclusive", False)])
def test_the_verdict_follows_the_interval(ratio: float, noise: float, verdict: str, practical: bool) -> None:
    found = analyse.analyse(*builders.run(ratio, 6, noise=noise))
    assert found["verdict"]["class"] == verdict
    assert found["comparison"][0]["practical"] is practical
    assert found["comparison"][0]["ratio"] == pytest.approx(ratio, abs=3 * noise)


def test_the_same_records_give_the_same_bytes() -> None:
    data = builders.run(1.03, 4)
    assert json.dumps(analyse.analyse(*data)) == json.dumps(analyse.analyse(*data))


def test_one_pair_has_no_interval_and_no_verdict() -> None:
    found = analyse.analyse(*builders.run(1.5, 1))
    assert found["verdict"]["class"] == "inconclusive"
    assert found["comparison"][0]["ci"] == [None, None]
    assert found["comparison"][0]["p_t"] is None
    json.dumps(found, allow_nan=False)


def test_no_data_at_all_is_inconclusive_and_no_crash() -> None:
    found = analyse.analyse(builders.plan(), [], [])
    assert found["verdict"]["class"] == "inconclusive"
    assert found["comparison"][0]["ratio"] is None
    json.dumps(found, allow_nan=False)


def test_identical_starts_give_an_interval_of_no_width_and_valid_json() -> None:
    found = analyse.analyse(*builders.run(1.1, 3, noise=0.0))
    low, high = found["comparison"][0]["ci"]
    assert low == pytest.approx(high)
    assert found["verdict"]["class"] == "win"
    json.dumps(found, allow_nan=False)


def test_decode_rate_leaves_out_the_first_chunk_whatever_its_size() -> None:
    row = builders.request(0, 0, "baseline", "chat-1", 100.0, tokens=300)
    assert analyse.rate(row) == pytest.approx(100.0)
    row.update(n_first_chunk=3, t_first=row["t_first"] + 2 / 100.0)
    assert analyse.rate(row) == pytest.approx(100.0)


def test_accept_length_counts_accepted_and_rounds_and_not_the_prefill_token() -> None:
    rows = [builders.request(0, 0, "eagle3", f"chat-{place}", 100.0, tokens=301, tau=2.0) for place in range(3)]
    spec = analyse.speculation(rows)
    assert spec["accept_length"] == 2.0
    assert spec["histogram"] == [0, 450]
    assert spec["cycle_ms"] == pytest.approx(20.0)
    assert spec["accept_rate"] == pytest.approx(0.2)


def test_absent_counts_are_unavailable_and_never_one() -> None:
    spec = analyse.speculation([builders.request(0, 0, "eagle3", "chat-1", 100.0)])
    assert (spec["source"], spec["accept_length"]) == ("unavailable", None)


@pytest.mark.parametrize(("tau", "verdict", "text"), [
    (1.0, "invalid", "the draft contributes nothing"), (1.05, "win", "is this the right draft"),
    (2.0, "win", "")])
def test_a_dead_draft_is_invalid_and_a_weak_one_a_warning(tau: float, verdict: str, text: str) -> None:
    """K4-2: 1.00 is invalid, up to 1.10 a warning with the threshold."""
    found = analyse.analyse(*builders.run(1.2, tau=tau))
    assert found["verdict"]["class"] == verdict
    assert text in " ".join(found["verdict"]["invalid_causes"] + found["verdict"]["reasons"])


def test_other_lengths_are_other_work() -> None:
    plan, blocks, rows = builders.run(1.2)
    for row in rows:
        if row["arm"] == "eagle3":
            row["n_tokens_server"] = 260
    found = analyse.analyse(plan, blocks, rows)
    assert found["verdict"]["class"] == "invalid"
    assert "-13%" in found["verdict"]["invalid_causes"][0]


def test_a_failed_request_makes_the_run_invalid_and_is_quoted() -> None:
    plan, blocks, rows = builders.run(1.2)
    rows[0]["error"] = "HTTP 500: boom"
    causes = analyse.analyse(plan, blocks, rows)["verdict"]["invalid_causes"]
    assert any("HTTP 500: boom" in cause for cause in causes)


def test_a_block_that_was_spoilt_and_repeated_is_left_out_with_its_cause() -> None:
    plan, blocks, rows = builders.run(1.2)
    blocks.append(builders.block(8, 0, "baseline", ("throttled",), slot=0))
    rows += [builders.request(8, 0, "baseline", name, 10.0) for name in builders.prompts()]
    found = analyse.analyse(plan, blocks, rows)
    assert found["verdict"]["class"] == "win"
    assert found["verdict"]["excluded_blocks"] == [{"block": 8, "arm": "baseline", "causes": ["throttled"]}]
    blocks[0]["validity"] = {"ok": False, "causes": ["throttled"]}
    assert analyse.analyse(plan, blocks, rows)["verdict"]["class"] == "invalid"


def test_far_requests_are_kept_and_decide_nothing_alone() -> None:
    plan, blocks, rows = builders.run(1.022, 6, noise=0.002)
    dice = np.random.default_rng(5)
    for row in rows:
        row["t_last"] = row["t_first"] + (row["t_last"] - row["t_first"]) * math.exp(dice.normal(0, 0.001))
    quiet = analyse.analyse(plan, blocks, rows)
    for row in rows:
        if row["block"] == 0 and row["prompt_id"] == "chat-00":
            row["t_last"] = row["t_first"] + 60.0
    loud = analyse.analyse(plan, blocks, rows)
    assert loud["outliers"]["requests"] == 1
    assert loud["comparison"][0]["ratio"] > quiet["comparison"][0]["ratio"], "nothing is deleted"
    assert loud["verdict"]["class"] == "inconclusive"
    assert "1 of 96 requests" in " ".join(loud["verdict"]["reasons"])


def test_odd_requests_in_every_prompt_do_not_take_a_clear_verdict_back() -> None:
    """Left out, they would leave no prompt that every pair has, and so no verdict."""
    plan, blocks, rows = builders.run(3.0, 4, noise=0.01, count=4)
    dice = np.random.default_rng(5)
    for place, row in enumerate(rows):
        slow = 3.0 if place in {1, 10, 19, 28} else math.exp(dice.normal(0, 0.01))
        row["t_last"] = row["t_first"] + (row["t_last"] - row["t_first"]) * slow
    found = analyse.analyse(plan, blocks, rows)
    odd = {rows[index]["prompt_id"] for index in analyse.outliers(rows)}
    assert len(odd) == 4
    assert found["outliers"]["verdict"] == found["verdict"]["class"] == "win"
    assert found["outliers"]["ratio"] == pytest.approx(3.0, rel=0.05)


def test_a_control_arm_that_differs_spoils_the_run() -> None:
    plan, blocks, rows = builders.run(1.2, 4, noise=0.002)
    plan["arms"].append({"name": "again", "flags": {}, "argv": [], "speculative": False, "control": True})
    for pair in range(4):
        blocks.append(builders.block(8 + pair, pair, "again"))
        rows += [builders.request(8 + pair, pair, "again", name, 100.0 * (1 + place / 50) * 1.05)
                 for place, name in enumerate(builders.prompts())]
    found = analyse.analyse(plan, blocks, rows)
    assert found["noise_floor"]["significant"]
    assert found["verdict"]["class"] == "invalid"
    assert found["comparison"][0]["candidate"] == "eagle3"


@pytest.mark.parametrize(("cv", "pairs", "percent"), [
    (0.005, 3, 2.3), (0.01, 4, 3.1), (0.02, 6, 4.1), (0.02, 12, 2.5), (0.03, 8, 5.0), (0.05, 5, 13), (0.09, 4, 31)])
def test_smallest_visible_effect_matches_the_table_of_the_design(cv: float, pairs: int, percent: float) -> None:
    found = analyse.detectable(math.sqrt(2) * cv, pairs)
    assert found is not None
    assert 100 * math.expm1(found) == pytest.approx(percent, rel=0.06)


def test_power_is_the_level_without_an_effect_and_grows_with_it() -> None:
    assert analyse.power(0.0, 1.0, 6) == pytest.approx(0.05, abs=1e-6)
    grid = [analyse.power(effect, 1.0, 6) for effect in np.linspace(0, 40, 200)]
    assert all(math.isfinite(value) for value in grid)
    assert all(later >= sooner - 1e-9 for sooner, later in itertools.pairwise(grid))
    assert all(math.isfinite(analyse.power(effect, 1.0, 2)) for effect in np.linspace(0, 40, 200))


def test_pairs_needed_would_give_the_power_that_it_promises() -> None:
    need = analyse.pairs_needed(math.log(1.038), 0.028, 0.02)
    assert need is not None
    assert analyse.power(math.log(1.038), 0.028, need) >= 0.8 > analyse.power(math.log(1.038), 0.028, need - 1)
    assert analyse.pairs_needed(0.0, 0.5, 0.0001) is None
    assert analyse.pairs_needed(0.0, 0.01, 0.02) is not None, "an effect of nothing can be settled as equivalent"


def test_the_sign_flip_test_is_exact_and_cannot_be_significant_with_five_pairs() -> None:
    assert analyse.p_signflip(np.array([0.1, 0.11, 0.12, 0.13, 0.14]), 1) == pytest.approx(0.0625)
    assert analyse.p_signflip(np.array([0.1, 0.11, 0.12, 0.13, 0.14, 0.15]), 1) == pytest.approx(0.03125)
    many = np.array([0.1] * 20)
    assert analyse.p_signflip(many, 1) == analyse.p_signflip(many, 1)
    assert analyse.p_mannwhitney(np.array([1.0, 2, 3, 4]), np.array([5.0, 6, 7, 8])) == pytest.approx(0.0286, abs=1e-4)
    assert analyse.p_mannwhitney(np.array([]), np.array([1.0])) is None


def test_the_general_interval_is_wider_when_prompts_differ() -> None:
    dice = np.random.default_rng(3)
    table = dice.normal(0, 0.01, (6, 1)) + dice.normal(0, 0.08, (1, 12)) + 0.1
    main, general = analyse.t_interval(table.mean(axis=1)), analyse.general_interval(table)
    assert general.high - general.low > main.high - main.low
    assert general.mean == pytest.approx(main.mean)
    assert analyse.general_interval(table[:1]).high == math.inf
    assert analyse.general_interval(np.zeros((3, 3))).high == 0.0


def test_holm_judges_the_smallest_p_hardest_and_stops_at_the_first_that_fails() -> None:
    rows = [{"p_t": 0.04}, {"p_t": 0.001}, {"p_t": 0.03}]
    assert analyse.holm(rows, 0.05) == [0.025, pytest.approx(0.05 / 3), 0.025]
    assert analyse.holm([{"p_t": 0.01}, {"p_t": 0.02}], 0.05) == [0.025, 0.05]
    assert analyse.holm([{"p_t": None}, {"p_t": 0.0}, {"p_t": 0.02}], 0.06) == [0.06, 0.02, 0.03]


def test_values_that_do_not_vary_have_a_p_value() -> None:
    assert analyse.p_t(np.array([0.1, 0.1])) == 0.0
    assert analyse.p_t(np.zeros(3)) == 1.0
    assert analyse.p_t(np.array([0.1])) is None


def test_total_rate_counts_only_while_all_streams_run() -> None:
    rows = [builders.request(0, 0, "baseline", f"chat-{place}", 100.0, send=send, concurrency=2)
            for place, send in enumerate((0.0, 0.0, 3.05, 3.05, 6.1))]
    assert analyse.steady_rate(rows) == pytest.approx(200.0, rel=0.05)
    alone = [builders.request(0, 0, "baseline", "chat-1", 100.0)]
    assert analyse.steady_rate(alone) == pytest.approx(100.0, rel=0.01)
    assert analyse.steady_rate([]) is None


def test_break_even_says_what_would_win() -> None:
    found = analyse.analyse(*builders.run(0.8, noise=0.0, tau=2.0))["break_even"]
    assert found["tau"] == 2.0
    assert found["tau_break_even"] == pytest.approx(2.5, rel=0.01)
    assert found["tau_for_plus_10pct"] == pytest.approx(2.75, rel=0.01)


def test_evidence_that_is_required_and_not_active_spoils_the_run() -> None:
    claim = {"claim": "cuda graphs", "required": True, "state": "fallback", "reason": "batch 9 above the largest graph"}
    found = analyse.analyse(*builders.run(1.2), evidence=[claim])
    assert found["verdict"]["class"] == "invalid"
    assert "batch 9" in found["verdict"]["invalid_causes"][0]
    assert analyse.analyse(*builders.run(1.2), evidence=[{**claim, "required": False}])["verdict"]["class"] == "win"


def test_arms_that_differ_spoil_the_run_by_name() -> None:
    found = analyse.analyse(*builders.run(1.2), arms_diff={"forbidden": {"max_running_requests": [48, 4096]}})
    assert found["verdict"]["invalid_causes"][0] == "the arms differ in max_running_requests: 48 and 4096"


def test_garbage_in_one_answer_is_noted_and_in_many_is_invalid() -> None:
    plan, blocks, rows = builders.run(1.2)
    rows[8]["output_ids"] = [7] * 300
    for row in rows:
        if row["arm"] == "baseline" and row["prompt_id"] == rows[8]["prompt_id"]:
            row["output_ids"] = [7] * 300
    rows[8]["arm"], many = rows[8]["arm"], analyse.analyse(plan, blocks, rows)
    assert many["verdict"]["class"] == "invalid"
    assert "garbage" in " ".join(many["verdict"]["invalid_causes"])


def test_a_secondary_load_point_gets_its_own_holm_level() -> None:
    plan, blocks, rows = builders.run(1.2, 4)
    plan["load_points"] = [1, 4, 16]
    more = [{**row, "concurrency": point} for row in rows for point in (4, 16)]
    found = analyse.analyse(plan, blocks, rows + more)
    assert [one["concurrency"] for one in found["comparison"]] == [1, 4, 16]
    assert sorted(one["alpha_used"] for one in found["comparison"]) == [0.025, 0.05, 0.05]


def test_a_start_that_was_not_steady_is_named() -> None:
    plan, blocks, rows = builders.run(1.2)
    blocks[3]["warmup"]["stable"] = False
    notes = analyse.analyse(plan, blocks, rows)["verdict"]["reasons"]
    assert any("when block 3 was measured" in note for note in notes)


def test_a_gain_alone_and_a_loss_under_load_are_three_verdicts_and_no_average() -> None:
    """K4-1: 1.24 at concurrency 1, 0.97 at 4, 0.6 at 16."""
    ratios = {1: 1.24, 4: 0.97, 16: 0.6}
    plan, blocks, rows = builders.run(1.24, 6, noise=0.003)
    plan["load_points"] = list(ratios)
    for point in (4, 16):
        rows += [{**row, "concurrency": point} for row in builders.run(ratios[point], 6, noise=0.003)[2]]
    found = analyse.analyse(plan, blocks, rows)
    assert {one["concurrency"]: one["verdict"] for one in found["comparison"]} == {1: "win", 4: "loss", 16: "loss"}
    assert [round(one["ratio"], 2) for one in found["comparison"]] == pytest.approx(list(ratios.values()), abs=0.01)
    assert found["verdict"]["class"] == "win", "the headline is the point that the plan named"


def test_too_few_prompts_for_a_load_point_are_told() -> None:
    plan, blocks, rows = builders.run(1.2)
    plan["load_points"] = [1, 32]
    notes = analyse.analyse(plan, blocks, rows)["verdict"]["reasons"]
    assert any(note.startswith("concurrency 32 with 48 prompts") for note in notes)


def test_a_wait_in_the_client_is_told_in_an_open_loop_run_only() -> None:
    plan, blocks, rows = builders.run(1.2)
    blocks[0]["passes"] = [{"duration_s": 1.0, "client": {"queue_ms_p99": 80.0}}]
    assert not any("in the client" in note for note in analyse.analyse(plan, blocks, rows)["verdict"]["reasons"])
    plan["rate"] = 2.0
    notes = analyse.analyse(plan, blocks, rows)["verdict"]["reasons"]
    assert any(note.startswith("requests waited up to 80 ms (p99) in the client") for note in notes)


def test_short_answers_are_one_note_for_all_arms() -> None:
    plan, blocks, rows = builders.run(1.2)
    for row in rows:
        row["n_tokens_server"] = 128
    notes = [note for note in analyse.analyse(plan, blocks, rows)["verdict"]["reasons"] if "short answers" in note]
    assert notes == ["short answers (baseline 128, eagle3 128 tokens; 256 are wanted): the last verify round is cut, "
                     "which makes the rate a little wrong"]


def test_what_is_no_win_at_its_own_level_is_no_practical_one_either() -> None:
    """Holm widens the interval of a secondary load point: verdict and size must speak of the same interval."""
    plan, blocks, rows = builders.run(1.2, 4, noise=0.002)
    plan["load_points"] = [1, 4, 16]
    rows += [{**row, "concurrency": point} for point, seed in ((4, 5), (16, 6))
             for row in builders.run(1.2, 4, noise=0.09, seed=seed)[2]]
    for one in analyse.analyse(plan, blocks, rows)["comparison"]:
        assert not (one["practical"] and one["verdict"] not in {"win", "loss"}), one
        if one["practical"]:
            assert one["ci"][0] > 1.02


@pytest.mark.parametrize(("wrong", "verdict", "where"), [
    (0, "win", None), (12, "invalid", "invalid_causes"), (20, "win", "reasons")])
def test_the_task_check_decides_whether_a_run_counts(wrong: int, verdict: str, where: str | None) -> None:
    plan, blocks, rows = builders.run(1.2)
    base = wrong if wrong == 20 else 0
    for block in blocks[:2]:
        missed = wrong if block["arm"] == "eagle3" else base
        block["task"] = {"answers": [[f"task-{place}", 5, 5, place >= missed] for place in range(20)]}
    found = analyse.analyse(plan, blocks, rows)
    assert found["verdict"]["class"] == verdict
    assert found["equivalence"]["task"]["state"] == {0: "same", 12: "drop", 20: "unavailable"}[wrong]
    assert (where is None) or any(line.startswith("Task check") for line in found["verdict"][where])
