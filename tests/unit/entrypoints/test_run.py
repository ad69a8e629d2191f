"""The whole benchmark against simulated servers whose truth is known; only the server is not real."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from entrypoints import calibrate, image, plan, prompts, records, run, task
from entrypoints import result as result_of
from entrypoints.errors import BadConfig, Invalid
from entrypoints.settings import Settings
from tests.unit.entrypoints import schema

SIM = Path(__file__).parents[2] / "fakes" / "sim_server.py"
# The machine that runs these tests may be busy: what is asserted here does not hang on exact times. That the statistics
# find the truth is shown in test_analyse.py and test_analyse_simulation.py.
BASE: dict[str, Any] = {"rate": 600.0}
SPEC: dict[str, Any] = {"rate": 1800.0, "tau": 2.0}
#: where no speed is asserted
FAST: dict[str, Any] = {"rate": 4000.0}
#: the client against the null server is measured in the first test and in test_calibrate.py
CALIBRATION = [{"streams": 1, "chunks": 40, "failed": 0, "added_ms": {"p50": 0.1, "p99": 0.2}, "loop_lag_p99_ms": 0.1,
                "cpu_us_per_chunk": 100.0, "pace_error_pct": 0.0}]
VALID = {"win", "loss", "equivalent", "inconclusive"}


class Bench:
    """A simulated image; `go` runs a benchmark on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.err = io.StringIO()
        self.out = io.StringIO()
        self.answers: dict[str, int] = {}

    def image(self, baseline: dict[str, Any], eagle3: dict[str, Any], **profile: Any) -> image.Image:
        python = self.folder / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {SIM} \"$@\"\n")
        python.chmod(0o755)
        config = self.folder / "sim.json"
        config.write_text(json.dumps({"state": str(self.folder / "starts"), "seed": 1, "answers": self.answers,
                                      "arms": {"baseline": baseline, "eagle3": eagle3}}))
        return image.parse({
            "schema": 1, "image": "sglang", "version": "0.5.23", "stack": "sim", "key": "0" * 64,
            "lock_sha256": "0" * 64, "targets": ["cpu"], "cuda": None, "python": str(python),
            "packages": {"sglang": "0.5.23"}, "patches": [], "trees": {},
            "profile": {"sglang": "0.5.23", "environment": {"SIM_SERVER": str(config)},
                        "server": {"mem-fraction-static": 0.5},
                        "arms": {"baseline": {}, "eagle3": {"speculative-algorithm": "EAGLE3",
                                                            "speculative-num-steps": 3}}, **profile}}, "sim")

    def settings(self, **more: Any) -> Settings:
        values: dict[str, Any] = {
            "model": "m", "draft": "d", "results": str(self.folder / "results"), "cache": str(self.folder / "cache"),
            "pairs": 2, "passes": 1, "prompts_per_stratum": 1, "max_tokens": 64, "stall_seconds": 3.0,
            "grace_seconds": 3.0, "task_check": 0, **more}
        return Settings(**values)

    def go(self, baseline: dict[str, Any], eagle3: dict[str, Any], **more: Any) -> tuple[int, dict[str, Any]]:
        profile = more.pop("profile", {})
        code = run.benchmark(self.settings(**more), self.image(baseline, eagle3, **profile), environ={},
                             out=self.out, err=self.err)
        return code, self.result()

    def result(self) -> dict[str, Any]:
        return records.document(self.run_folder() / records.RESULT)

    def run_folder(self) -> Path:
        return max((self.folder / "results").iterdir())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(calibrate, "measure", lambda streams: CALIBRATION)
    return Bench(tmp_path)


def test_a_faster_arm_wins_by_the_true_ratio_and_analyze_says_the_same(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    code, result = bench.go(BASE | {"rate": 250.0}, SPEC | {"rate": 1000.0}, pairs=3)
    assert code == 0
    assert result["verdict"]["class"] == "win"
    assert result["comparison"][0]["ratio"] == pytest.approx(4.0, rel=0.35)
    assert result["arms"]["eagle3"]["load_points"]["1"]["spec"]["accept_length"] == pytest.approx(2.0, rel=0.02)
    assert result["equivalence"]["state"] == "equivalent"
    assert {one["claim"]: one["state"] for one in result["evidence"]}["speculation"] == "active"
    assert [row["streams"] for row in result["client_calibration"]] == [1]
    folder = bench.run_folder()
    report = (folder / records.REPORT).read_text()
    assert report.startswith("# WIN: eagle3 decodes faster than baseline: +")
    assert report in bench.out.getvalue()
    document = json.loads(Path(run.__file__).with_name("result.schema.json").read_text())
    assert list(schema.complaints(result, document, document)) == []
    before = (folder / records.RESULT).read_bytes()
    (folder / records.RESULT).unlink()
    assert run.analyze(folder, bench.settings(), out=io.StringIO()) == code
    assert (folder / records.RESULT).read_bytes() == before


@pytest.mark.parametrize(("arm", "why"), [
    ({"tau": 1.0}, "accept length 1.00, the draft contributes nothing"),
    ({"no_spec_counts": True}, "accept length unavailable"),
    ({"garbage": True}, "answers are garbage"),
    ({"length": 0.7}, "not the same work"),
    ({"split": 0.05}, "output differs"),
    ({"error_after": 5}, "requests failed"),
    ({"flush": 404}, "hit the prefix cache"),
    ({"flush_works": False}, "hit the prefix cache"),
    ({"die_after": 5}, "simulated"),
    ({"hang_after": 5}, "the server hangs: no byte for 3 s"),
], ids=lambda value: str(value)[:24])
def test_a_run_that_cannot_count_is_invalid_and_says_why(bench: Bench, arm: dict[str, Any], why: str) -> None:
    """K4-2 (a dead draft), K4-4 (a warm cache) and what else no speed makes good."""
    code, result = bench.go(BASE | FAST, SPEC | FAST | arm, pairs=1, passes=2)
    assert code == 13
    assert result["verdict"]["class"] == "invalid"
    assert why in " ".join(result["verdict"]["invalid_causes"]), result["verdict"]
    assert result["requests_file"]["count"] > 0


@pytest.mark.parametrize("info", [
    {"internal": {"effective_max_running_requests_per_dp": 4096}}, {"mem_fraction_static_resolved": 0.7}])
def test_arms_with_other_resolved_arguments_are_refused_by_name(bench: Bench, info: dict[str, Any]) -> None:
    """K4-3."""
    """K4-3: running requests limited on one side only, or memory resolved to something else."""
    with pytest.raises(Invalid) as caught:
        bench.go(BASE | FAST | {"info": info}, SPEC | FAST, pairs=1)
    key = next(iter(info.get("internal", info)))
    assert key in str(caught.value)
    assert "in both arms" in str(caught.value)
    result = bench.result()
    assert result["status"] == "invalid"
    assert key in result["arms_diff"]["forbidden"]
    assert result["requests_file"]["count"] <= 4, "the refusal comes before the second arm is measured"


def test_each_load_point_is_measured_and_compared_on_its_own(bench: Bench) -> None:
    """K4-1: a gain alone and a loss under load are two numbers with two accept lengths, and no average."""
    spec = SPEC | {"at": {"1": 2000.0, "2": 300.0, "3": 250.0, "4": 200.0}}
    _, result = bench.go(BASE, spec, concurrency=(1, 4), pairs=1)
    ratios = {one["concurrency"]: one["ratio"] for one in result["comparison"]}
    assert ratios[1] > 1 > ratios[4]
    lengths = {name: one["spec"]["accept_length"] for name, one in result["arms"]["eagle3"]["load_points"].items()}
    assert lengths == {"1": pytest.approx(2.0, rel=0.02), "4": pytest.approx(2.0, rel=0.02)}
    assert [one["load_point"] for one in result["blocks"][0]["passes"]] == [1, 4]


def test_the_order_of_the_arms_does_not_matter_when_prompts_get_faster_with_use(bench: Bench) -> None:
    """K4-4: neither arm profits from what the other, or an earlier pass, has asked before."""
    seen = {"warm_factor": 10.0}
    ratios = {}
    for seed in (2, 3):
        _, result = bench.go(BASE | seen, SPEC | seen, pairs=1, passes=2, seed=seed)
        assert result["verdict"]["invalid_causes"] == []
        assert all(flush["ok"] for block in result["blocks"] for flush in block["flush"])
        ratios[result["plan"]["order"][0][2]] = result["comparison"][0]["ratio"]
    assert set(ratios) == {"baseline", "eagle3"}
    assert all(1.5 < ratio < 6 for ratio in ratios.values()), ratios


def test_a_run_stopped_by_the_deadline_resumes_and_keeps_what_it_had(bench: Bench) -> None:
    from entrypoints.errors import Deadline
    built = bench.image(BASE, SPEC)
    with pytest.raises(Deadline):
        run.benchmark(bench.settings(pairs=2, deadline_seconds=3.0), built, environ={}, out=bench.out, err=bench.err)
    partial = bench.result()
    assert partial["status"] == "aborted"
    assert partial["verdict"]["class"] == "invalid"
    kept = [block["index"] for block in partial["blocks"]]
    refs = bench.folder / "cache" / "huggingface" / "hub" / "models--m" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("another")
    context = records.document(bench.run_folder() / records.CONTEXT)
    context["software"]["models"]["model"]["revision"] = "the first"
    records.write(bench.run_folder() / records.CONTEXT, records.dump(context))
    with pytest.raises(BadConfig, match="cannot be resumed: model changed"):
        run.benchmark(bench.settings(resume=str(bench.run_folder())), built, environ={}, out=bench.out, err=bench.err)
    (refs / "main").write_text("the first")
    run.benchmark(bench.settings(resume=str(bench.run_folder())), built, environ={}, out=bench.out, err=bench.err)
    result = bench.result()
    assert result["status"] == "complete"
    assert [block["index"] for block in result["blocks"]][:len(kept)] == kept
    assert result["comparison"][0]["pairs"] == 2
    clock = [moment for block in result["blocks"] for moment in (block["t_start"], block["t_end"])]
    assert clock == sorted(clock), "what was measured after the pause comes after it"


@pytest.mark.parametrize("arm", [{"mute": True}, {"hang_after": 1}], ids=["starting", "measuring"])
def test_the_deadline_holds_in_every_phase(bench: Bench, arm: dict[str, Any]) -> None:
    """A start or a pass that never ends: nothing else than the deadline would end it before the stall limit."""
    from entrypoints.errors import Deadline
    with pytest.raises(Deadline, match="the deadline of 3 s was reached"):
        bench.go(BASE | FAST | arm, SPEC | FAST | arm, deadline_seconds=3.0, stall_seconds=600.0)
    assert bench.result()["status"] == "aborted"
    assert servers(bench) == []


def test_a_deadline_after_the_passes_keeps_the_block(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from entrypoints.errors import Deadline, Problem
    hung = bench.folder / "starts" / "hung"

    def late(_self: run.Runner) -> None:
        if hung.exists():
            raise Deadline(Problem("late"))

    monkeypatch.setattr(run.Runner, "_in_time", late)
    with pytest.raises(Deadline, match="late"):
        bench.go(BASE | FAST | {"hang_at_ties": True}, SPEC | FAST | {"split": 0.1}, pairs=2, stall_seconds=600.0)
    last = bench.result()["blocks"][-1]
    assert (last["arm"], last["validity"]["ok"], last["ties"]) == ("baseline", True, [])
    assert last["evidence"]
    assert servers(bench) == []


def test_the_first_question_about_a_split_that_stalls_is_the_last(bench: Bench) -> None:
    """Each of up to 32 would wait as long; a stop after the passes costs no block."""
    bench.go(BASE | FAST | {"hang_at_ties": True}, SPEC | FAST | {"split": 0.1}, pairs=2, stall_seconds=1.5)
    assert bench.err.getvalue().count("not looked at") == 1
    assert [block["validity"]["ok"] for block in bench.result()["blocks"]] == [True] * 4


def test_a_settled_run_stops_at_the_look_that_settled_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LOOKS", {"standard": (1, 3)})
    monkeypatch.setattr(run, "SETTLED", frozenset(VALID))
    _, result = bench.go(BASE, SPEC, pairs=0)
    assert [look["pairs"] for look in result["looks_taken"]] == [1]
    assert result["comparison"][0]["pairs"] == 1
    assert result["comparison"][0]["alpha_used"] == pytest.approx(0.0294)
    assert result["plan"]["max_pairs"] == 3
    folder = bench.run_folder()
    run.benchmark(bench.settings(resume=str(folder)), bench.image(BASE, SPEC), environ={}, out=bench.out, err=bench.err)
    again = bench.result()
    assert again["verdict"]["class"] == result["verdict"]["class"], "a run that is over is not measured on"
    assert (again["looks_taken"], len(again["blocks"])) == (result["looks_taken"], len(result["blocks"]))


def test_a_run_that_can_bring_no_verdict_any_more_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LOOKS", {"standard": (1, 3)})
    _, result = bench.go(BASE | FAST, SPEC | FAST | {"tau": 1.0}, pairs=0)
    assert {block["pair"] for block in result["blocks"]} == {0}
    assert "no verdict can come of this run any more: eagle3: accept length 1.00" in bench.err.getvalue()
    _, result = bench.go(BASE | FAST | {"error_after": 5}, SPEC | FAST | {"error_after": 5}, pairs=3, passes=2)
    assert [block["validity"]["ok"] for block in result["blocks"]] == [True], "a failed request is never made good"


@pytest.mark.parametrize(("first", "other", "causes", "settled"), [
    ("win", "win", [], True), ("win", "inconclusive", [], False), ("inconclusive", "inconclusive", [], False),
    ("inconclusive", "inconclusive", ["a defect"], True)])
def test_a_look_settles_only_what_the_verdict_will_say(bench: Bench, monkeypatch: pytest.MonkeyPatch, first: str,
                                                       other: str, causes: list[str], settled: bool) -> None:
    """A few odd requests may decide at a look; then the run goes on. `other`: the verdict without them."""
    runner = run.Runner(bench.image(BASE, SPEC), bench.settings(pairs=2), {}, bench.err)
    found = {"comparison": [{"pairs": 2, "ratio": 1.0, "verdict": first}], "outliers": {"verdict": other},
             "verdict": {"invalid_causes": ["the run did not end", *causes]}}
    monkeypatch.setattr(result_of, "assemble", lambda folder: found)
    assert runner._settled(3, {0, 1, 2, 3}) is settled
    monkeypatch.delattr(result_of, "assemble")
    assert runner._settled(3, {0, 1, 2, 3}) is settled, "a look that was taken stands"
    assert len(runner.context["looks_taken"]) == 1


@pytest.mark.parametrize(("valid", "slot", "looked"), [
    ({0, 1, 2}, 0, False), ({0, 1, 2}, 1, False), ({0, 1, 2, 3}, 1, False), ({0, 1, 2, 3}, 3, True), ({0}, 0, False)])
def test_a_resumed_run_counts_whole_pairs_only_and_looks_after_the_latest(
        bench: Bench, monkeypatch: pytest.MonkeyPatch, valid: set[int], slot: int, looked: bool) -> None:
    """Killed within the second pair it once took its look at two pairs with the data of one."""
    runner = run.Runner(bench.image(BASE, SPEC), bench.settings(pairs=2), {}, bench.err)
    found = {"comparison": [{"pairs": 2, "ratio": 1.0, "verdict": "inconclusive"}],
             "outliers": {"verdict": "inconclusive"}, "verdict": {"invalid_causes": ["the run did not end"]}}
    monkeypatch.setattr(result_of, "assemble", lambda folder: found)
    assert runner._settled(slot, valid) is False
    assert [look["pairs"] for look in runner.context["looks_taken"]] == ([2] if looked else [])


RUNNER = """
import json, os, sys
from pathlib import Path
from entrypoints import image, run, signals
from entrypoints.errors import Terminated
from entrypoints.settings import Settings
values = json.loads(sys.argv[2])
try:
    with signals.as_exceptions():
        sys.exit(run.benchmark(Settings(**values), image.load(Path(sys.argv[1])), environ={}))
except Terminated as stop:
    sys.exit(stop.exit_code)
"""


def start(bench: Bench, settings: Settings, built: image.Image) -> subprocess.Popen[str]:
    document = {"schema": 1, "image": built.image, "version": built.version, "stack": built.stack, "key": built.key,
                "lock_sha256": built.lock_sha256, "targets": list(built.targets), "cuda": None,
                "python": str(built.python), "packages": dict(built.packages), "patches": [], "trees": {},
                "profile": {"sglang": "0.5.23", "environment": dict(built.profile.environment),
                            "server": dict(built.profile.server),
                            "arms": {name: dict(flags) for name, flags in built.profile.arms.items()}}}
    file = bench.folder / "image.json"
    file.write_text(json.dumps(document))
    values = {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings) if one.name != "sources"}
    return subprocess.Popen([sys.executable, "-c", RUNNER, str(file), json.dumps(values)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[3],
                            env={**os.environ, "TMPDIR": str(bench.folder)})  # a killed run cleans nothing up


def servers(bench: Bench) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(bench.folder / "python") in " ".join(process.cmdline()) or (
                    str(SIM) in " ".join(process.cmdline()) and
                    process.environ().get("SIM_SERVER", "").startswith(str(bench.folder))):
                found.append(process.pid)
    return found


def _end(runner: subprocess.Popen[str]) -> None:
    """kill -9 of the runner; its server goes with it, as with the container. Stopped first, so that none is missed."""
    runner.send_signal(signal.SIGSTOP)
    children = psutil.Process(runner.pid).children(recursive=True)
    runner.kill()
    runner.communicate(timeout=20)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_sigterm_leaves_no_server_and_a_readable_partial_result(bench: Bench) -> None:
    """K6-1."""
    runner = start(bench, bench.settings(pairs=4, passes=4), bench.image(BASE, SPEC))
    assert runner.stderr is not None
    for line in runner.stderr:
        if "block 2 of" in line:
            break
    for line in runner.stderr:
        if "pass 2" in line:
            break
    runner.send_signal(signal.SIGTERM)
    runner.communicate(timeout=20)
    assert runner.returncode == 143
    assert servers(bench) == []
    result = bench.result()
    assert result["status"] == "aborted"
    assert "SIGTERM" in " ".join(result["verdict"]["invalid_causes"])
    assert result["requests_file"]["count"] > 0


@pytest.mark.parametrize("number", range(int(os.environ.get("BUILDCTL_KILLS", "3"))))
def test_a_runner_killed_at_any_moment_leaves_a_readable_folder_and_resumes_to_the_same_verdict(
        bench: Bench, number: int) -> None:
    """kill -9 after a random line of progress and up to 0.3 s later. BUILDCTL_KILLS=30 kills thirty."""
    dice = random.Random(number)
    built = bench.image(BASE | {"rate": 400.0}, SPEC | {"rate": 1600.0})
    wanted = bench.settings(pairs=3, stall_seconds=30.0)
    runner = start(bench, wanted, built)
    assert runner.stderr is not None
    seen = list(itertools.islice(runner.stderr, dice.randrange(1, 64)))
    with contextlib.suppress(subprocess.TimeoutExpired):
        runner.wait(dice.uniform(0.0, 0.3))
    _end(runner)
    folder = bench.run_folder()
    run.analyze(folder, bench.settings(), out=io.StringIO())
    partial = bench.result()
    assert partial["verdict"]["class"] == ("win" if partial["status"] == "complete" else "invalid")
    again = bench.settings(resume=str(folder), stall_seconds=30.0)
    code = run.benchmark(again, built, environ={}, out=bench.out, err=bench.err)
    result = bench.result()
    assert result["verdict"]["class"] == "win", (result["verdict"], bench.err.getvalue())
    assert (code, result["status"]) == (0, "complete"), seen[-1:]
    assert result["comparison"][0]["pairs"] == 3, bench.err.getvalue()
    assert len({block["index"] for block in result["blocks"]}) == len(result["blocks"])
    kept = [block["index"] for block in partial["blocks"]]
    assert [block["index"] for block in result["blocks"]][:len(kept)] == kept
    print(f"killed after line {len(seen)}: {seen[-1].strip() if seen else ''}; {len(kept)} blocks kept")


def test_a_kept_noise_floor_serves_the_next_quick_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide margin: whether this machine is quiet must not decide here."""
    monkeypatch.setattr(plan, "LOOKS", {"standard": (2,), "quick": (2,)})
    wanted = {"pairs": 0, "margin": 0.9, "noise_floor": "measure"}
    _, first = bench.go(BASE, SPEC, effort="quick", **{**wanted, "noise_floor": "auto"})
    assert first["verdict"]["class"] == "inconclusive"
    assert "no noise floor of an earlier run here" in first["verdict"]["headline"]
    _, second = bench.go(BASE, SPEC, effort="standard", **wanted)
    assert second["noise_floor"]["source"] == "control arm"
    assert second["noise_floor"]["pairs"] == 2
    assert [block["arm"] for block in second["blocks"]].count("control") == 2
    assert second["plan"]["primary_endpoint"]["candidate"] == "eagle3"
    _, third = bench.go(BASE, SPEC, effort="quick", **{**wanted, "noise_floor": "auto"})
    assert len(third["blocks"]) == 4
    assert third["noise_floor"]["source"] == "kept from an earlier run"
    assert third["noise_floor"]["run_id"] == second["run_id"]
    assert third["comparison"][0]["interval_from"] == "noise floor"
    assert "against the noise floor of" in third["verdict"]["headline"]


@pytest.mark.parametrize(("base", "spec", "state", "text"), [
    (0.1, 0.1, "same", "baseline answers {:.1f} % of 40 word problems rightly, eagle3 {:.1f} %"),
    (0.1, 0.6, "drop", "baseline answers {:.1f} % of 40 word problems rightly, eagle3 {:.1f} %"),
    (1.1, 1.1, "unavailable", "this model is too weak for the task")])
def test_both_arms_are_asked_the_word_problems(bench: Bench, base: float, spec: float, state: str, text: str) -> None:
    wanted = bench.settings().seed
    bench.answers = {one.messages[0]["content"]: one.answer for one in task.problems(wanted, 40)}
    _, result = bench.go(BASE | FAST | {"wrong": base}, SPEC | FAST | {"wrong": spec}, pairs=1, task_check=40)
    found = result["equivalence"]["task"]
    assert found["state"] == state
    assert found["n"] == (16 if state == "unavailable" else 40)
    said = text.format(100 * found["acc_base"], 100 * found["acc_spec"])
    assert said in (bench.run_folder() / records.REPORT).read_text()
    assert (result["verdict"]["class"] == "invalid") is (state == "drop")
    assert ("Task check" in " ".join(result["verdict"]["invalid_causes"])) is (state == "drop")


def test_ranks_that_hang_after_nccl_said_complete_end_the_run_with_the_line_and_the_way_out(bench: Bench) -> None:
    """K4-5: it neither logs nor opens its port; the arm that works does not save the run."""
    line = "ncclCommInitRank comm 0x5581 rank 1 nranks 2 cudaDev 1 - Init COMPLETE"
    code, result = bench.go(BASE | FAST, SPEC | FAST | {"log": [line], "mute": True}, pairs=1, stall_seconds=2.0)
    assert code == 13
    assert line in " ".join(result["verdict"]["invalid_causes"])
    (hung,) = [block for block in result["blocks"] if block["arm"] == "eagle3"]
    assert hung["diagnosis"]["fault"] == "stalled"
    assert "NCCL_P2P_DISABLE=1" in hung["diagnosis"]["remedy"]
    assert line in (bench.run_folder() / f"server-{hung['index']:02}-eagle3.log").read_text()
    assert servers(bench) == []


def test_nccl_settings_reach_both_servers_and_the_report(bench: Bench) -> None:
    """K4-5: both arms run with them, and the reader sees them."""
    built = bench.image(BASE | FAST, SPEC | FAST)
    run.benchmark(bench.settings(pairs=1), built, environ={"NCCL_P2P_DISABLE": "1"}, out=bench.out, err=bench.err)
    assert bench.result()["plan"]["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" in (bench.run_folder() / records.REPORT).read_text()
    seen = [json.loads(file.read_text()) for file in (bench.folder / "starts").glob("environment-*")]
    assert [one["NCCL_P2P_DISABLE"] for one in seen] == ["1", "1"]


def test_symmetric_memory_that_was_asked_for_and_fell_back_to_nccl_marks_the_run(bench: Bench) -> None:
    """K4-6: only a warning in the log; the measured run is not the one asked for."""
    line = "TorchSymmMemCommunicator: Device capability 12.0 not supported, communicator is not available."
    arms = [one | FAST | {"log": [line], "info": {"enable_torch_symm_mem": True, "tp_size": 2}} for one in (BASE, SPEC)]
    _, result = bench.go(*arms, pairs=1)
    (said,) = {(one["declared"], one["observed"], one["state"]) for one in result["evidence"]
               if one["claim"] == "torch-symmetric-memory"}
    assert said == ("on", "in effect: NCCL", "unsupported")
    assert result["verdict"]["class"] in VALID
    assert "| torch-symmetric-memory |" in (bench.run_folder() / records.REPORT).read_text()
    code, result = bench.go(*arms, pairs=1, require=("torch-symmetric-memory",))
    assert code == 13
    assert "required evidence: torch-symmetric-memory is unsupported" in result["verdict"]["invalid_causes"][0]


def test_an_ablation_says_what_its_optimisation_is_worth(bench: Bench) -> None:
    _, result = bench.go(BASE | FAST, SPEC | FAST, arm=("baseline", "eager=--disable-custom-all-reduce"))
    worth = {(one["claim"], one["arm"]): one["effective"] for one in result["evidence"]}
    ratio = result_of.percent(result["comparison"][0]["ratio"])
    for arm in ("baseline", "eager"):
        assert worth["custom-all-reduce", arm].startswith(f"{ratio} in eager against baseline (")
    assert worth["cuda-graphs", "eager"] == ""


@pytest.mark.parametrize("kernels", [["flashinfer::BatchDecodeWithPagedKVCacheKernel"], ["gemm"]])
def test_what_a_trace_shows_of_one_start_is_required_of_the_run(bench: Bench, kernels: list[str]) -> None:
    arm = FAST | {"info": {"attention_backend": "flashinfer"}, "kernels": kernels}
    _, result = bench.go(BASE | arm, SPEC | arm, trace=True, require=("attention-backend",))
    assert {one["claim"]: one["state"] for one in result["evidence"]}["attention-backend"] == (
        "inactive" if kernels == ["gemm"] else "active")
    assert (result["verdict"]["class"] in VALID) is (kernels != ["gemm"]), result["verdict"]
    first = sorted(path.name.split("-", 2)[2] for path in bench.run_folder().glob("trace-*"))
    assert first == ["baseline", "eagle3"], "one start of each arm is traced"


@pytest.mark.parametrize(("gap", "state"), [
    (0.1, "equivalent-up-to-ties"), (0.8, "different"), (1.5, "different"), (None, "different")])
def test_splits_are_looked_at_on_the_baseline(bench: Bench, gap: float | None, state: str) -> None:
    base = BASE | FAST | ({} if gap is None else {"tie_gap": gap})
    _, result = bench.go(base, SPEC | FAST | {"split": 0.02}, pairs=2)
    same = result["equivalence"]
    assert same["ab"]["splits"] > 0
    assert same["ties"]["checked"] > 0
    assert same["state"] == state
    assert (result["verdict"]["class"] == "invalid") is (state == "different")


def test_a_cache_that_cannot_be_flushed_and_was_cold_is_said_and_spoils_nothing(bench: Bench) -> None:
    """K4-4: a flush call that answers 404."""
    _, result = bench.go(BASE | FAST | {"flush": 404}, SPEC | FAST | {"flush": 404}, pairs=1)
    assert result["verdict"]["class"] in VALID
    assert "not flushed (HTTP 404)" in " ".join(result["verdict"]["reasons"])


def test_random_arrivals_and_long_prompts_are_in_the_plan_and_measured(bench: Bench) -> None:
    _, result = bench.go(BASE | FAST, SPEC | FAST, pairs=1, concurrency=(4,), rate=40.0, long_context=300)
    assert result["plan"]["rate"] == 40.0
    assert "greedy, 40 random arrivals a second with at most 4 in flight" in bench.out.getvalue()
    assert result["plan"]["prompts"]["strata"]["long"] == 1
    assert result["plan"]["prompts"]["warmup"] == 1 + len(prompts.load().warmup), "a long one is warmed up with"
    assert result["arms"]["baseline"]["load_points"]["4"]["requests"] == 5
    assert result["verdict"]["invalid_causes"] == []


def test_a_server_that_renders_no_chats_is_served_by_its_tokenizer_once(bench: Bench) -> None:
    """SGLang 0.5.9: `/v1/tokenize` takes plain text only."""
    old = {"tokenize": 422}
    _, result = bench.go(BASE | FAST | old, SPEC | FAST | old, pairs=1)
    assert result["verdict"]["invalid_causes"] == []
    assert result["requests_file"]["count"] == 8
    assert (bench.folder / "starts" / "templates").read_text() == "once"


def test_an_argument_that_the_server_changed_is_told(bench: Bench) -> None:
    info = {"info": {"mem_fraction_static": 0.4}}
    _, result = bench.go(BASE | FAST | info, SPEC | FAST | info, pairs=1)
    assert "eagle3: the server changed an argument: mem_fraction_static: asked 0.5, server says 0.4" in \
        result["verdict"]["reasons"]


def test_a_flag_that_the_server_does_not_know_is_refused_before_anything_starts(bench: Bench) -> None:
    with pytest.raises(BadConfig, match="unrecognized arguments: --nonsense"):
        bench.go(BASE, SPEC, extra=("--nonsense", "1"))
    assert not (bench.folder / "results").exists()


def test_a_secret_among_the_server_flags_reaches_no_file_and_is_asked_for_again(bench: Bench) -> None:
    """The server answers 401 to who has no key: the client asks with the server's own."""
    from entrypoints.errors import Deadline
    said = {"info": {"admin_api_key": "another"}}
    built = bench.image(BASE | FAST | said, SPEC | FAST | said)
    words = ("--admin-api-key", "hunter2", "--api-key", "hunter2")
    short = bench.settings(deadline_seconds=0.1, extra=words)
    with pytest.raises(Deadline):
        run.benchmark(short, built, environ={}, out=bench.out, err=bench.err)
    folder = bench.run_folder()
    assert not [file.name for file in folder.iterdir() if b"hunter2" in file.read_bytes()]
    with pytest.raises(BadConfig, match="a secret among its server flags"):
        run.benchmark(bench.settings(resume=str(folder)), built, environ={}, out=bench.out, err=bench.err)
    run.benchmark(bench.settings(resume=str(folder), extra=words), built, environ={}, out=bench.out, err=bench.err)
    assert bench.result()["status"] == "complete"
    assert not [file.name for file in folder.iterdir() if b"hunter2" in file.read_bytes()], "nor the server's own log"
    blocks = records.lines(folder / records.BLOCKS)
    assert not [line for block in blocks for line in block["changed_arguments"] if "admin_api_key" in line]


def test_a_secret_of_one_arm_reaches_no_file_and_is_asked_for_again(bench: Bench) -> None:
    from entrypoints.errors import Deadline
    built = bench.image(BASE | FAST, SPEC | FAST)
    arms = ("baseline", "locked=--admin-api hunter2")
    with pytest.raises(Deadline):
        run.benchmark(bench.settings(deadline_seconds=0.1, pairs=1, arm=arms), built, environ={}, out=bench.out,
                      err=bench.err)
    folder = bench.run_folder()
    assert not [file.name for file in folder.iterdir() if b"hunter2" in file.read_bytes()]
    again = bench.settings(resume=str(folder))
    with pytest.raises(BadConfig, match="locked=--admin-api \\*\\*\\*"):
        run.benchmark(again, built, environ={}, out=bench.out, err=bench.err)
    run.benchmark(dataclasses.replace(again, arm=arms), built, environ={}, out=bench.out, err=bench.err)
    assert bench.result()["status"] == "complete"
    assert not [file.name for file in folder.iterdir() if b"hunter2" in file.read_bytes()]
