"""What a server does to the run that measures it: it dies, or does not go away. Nothing measured is ever lost."""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from entrypoints import page, processes, records, run, signals, supervise
from entrypoints.errors import BadConfig, Busy, Terminated
from tests.unit.entrypoints.test_host import library
from tests.unit.entrypoints.test_run import BASE, SPEC, VALID, Bench, servers, start

SIGQUIT = "Received sigquit from a child process. It usually means the child failed."
GIB = 2**30


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def held(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """NVML of a card on which 90 GiB stay in use from server start number `from` on."""
    state: dict[str, Any] = {"from": 0}

    def memory(_: object) -> types.SimpleNamespace:
        stays = (bench.folder / "starts" / f"start-{state['from']}").exists()
        return types.SimpleNamespace(total=96 * GIB, used=91 * GIB if stays else GIB)

    monkeypatch.setitem(sys.modules, "pynvml", library(
        nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [types.SimpleNamespace(pid=os.getpid())]))
    monkeypatch.setattr(supervise, "PATIENCE", 0.2)
    return state


def starts(bench: Bench) -> int:
    return len(list((bench.folder / "starts").glob("start-*")))


def test_gpu_memory_that_stays_ends_the_run_before_the_next_start_and_loses_nothing(
        bench: Bench, held: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """K6-4: between the runs the GPU still shows 90 GB: wait, then «GPU memory not released»."""
    built = bench.image(BASE, SPEC)
    with pytest.raises(Busy) as caught:
        run.benchmark(bench.settings(pairs=1), built, environ={}, out=bench.out, err=bench.err)
    assert caught.value.exit_code == 75
    said = str(caught.value)
    assert "GPU 0: GPU memory not released" in said
    assert "90.0 GiB more than before the start, held by " in said
    assert f"(pid {os.getpid()})" in said
    assert "then start again (a benchmark with --resume)" in said
    assert starts(bench) == 1
    partial = bench.result()
    assert (partial["status"], partial["verdict"]["class"]) == ("aborted", "invalid")
    assert "GPU memory not released" in partial["verdict"]["invalid_causes"][0]
    (block,) = partial["blocks"]
    assert block["validity"]["ok"]
    assert block["stop"]["gpu_held_bytes"] == [90 * GIB]
    for name in (records.REPORT, records.PAGE):
        assert "GPU memory not released" in (bench.run_folder() / name).read_text()

    held["from"] = 99
    run.benchmark(bench.settings(resume=str(bench.run_folder())), built, environ={}, out=bench.out, err=bench.err)
    result = bench.result()
    assert (result["status"], result["blocks"][0]) == ("complete", block)
    assert result["verdict"]["class"] in VALID
    assert starts(bench) == 2


def test_what_the_last_server_leaves_behind_is_a_note(bench: Bench, held: dict[str, Any]) -> None:
    """Nothing is started any more: the result is whole."""
    held["from"] = 1
    code, result = bench.go(BASE, SPEC, pairs=1)
    assert code in {0, 10, 11, 12}
    assert result["status"] == "complete"
    assert "GPU memory not released: 90.0 GiB more" in " ".join(result["verdict"]["reasons"])


def test_shared_memory_that_cannot_be_removed_ends_the_run_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "PATIENCE", 0.0)
    monkeypatch.setattr(processes, "remove_segments", lambda _: ["psm_1"])
    with pytest.raises(Busy, match="shared memory of the stopped server is left"):
        bench.go(BASE, SPEC, pairs=1)
    assert bench.result()["blocks"][0]["validity"]["ok"]


def test_a_server_that_ends_with_0_before_it_is_ready(bench: Bench) -> None:
    """K6-2 (a)."""
    code, result = bench.go(BASE, SPEC | {"stillborn": 99, "last_words": [SIGQUIT], "status": 0}, pairs=1)
    assert code == 13
    assert "server died: a child process failed" in " ".join(result["verdict"]["invalid_causes"])
    assert [block["arm"] for block in result["blocks"] if block["validity"]["ok"]] in ([], ["baseline"])


def test_a_port_that_was_taken_is_no_reason_to_give_up(bench: Bench) -> None:
    """SGLang takes further ports by chance; the next start takes others."""
    unlucky = {"stillborn": 1, "status": 1, "last_words": [
        "[Errno 98] error while attempting to bind on address ('127.0.0.1', 31007): address already in use"]}
    code, result = bench.go(BASE | unlucky, SPEC | unlucky, pairs=1)
    assert code != 13, result["verdict"]
    assert [block["validity"]["ok"] for block in result["blocks"]] == [False, True, True]
    assert result["blocks"][0]["diagnosis"]["fault"] == "port-taken"


def test_a_server_that_ends_with_0_in_mid_benchmark(bench: Bench) -> None:
    """K6-2 (b): the numbers so far are kept, and count for nothing."""
    code, result = bench.go(BASE, SPEC | {"die_after": 3, "last_words": [SIGQUIT], "status": 0}, pairs=1)
    assert code == 13
    assert "server died: a child process failed" in " ".join(result["verdict"]["invalid_causes"])
    (dead,) = [block for block in result["blocks"] if block["arm"] == "eagle3"]
    assert dead["diagnosis"]["exit_code"] == 0
    assert dead["stop"]["before_stop"] is True
    rows = [row for row in records.lines(bench.run_folder() / records.REQUESTS) if row["block"] == dead["index"]]
    assert [row["error"] is None for row in rows[:3]] == [True] * 3
    assert "server died" in bench.out.getvalue()


def test_a_server_that_ends_after_its_last_answer_has_been_measured(bench: Bench) -> None:
    """K6-2 (c): nothing is missing from its numbers; it is told."""
    code, result = bench.go(BASE, SPEC | {"end_after": 4, "last_words": [SIGQUIT], "status": 0}, pairs=1)
    assert code in {0, 10, 11, 12}
    assert all(block["validity"]["ok"] for block in result["blocks"])
    assert "the server ended by itself after its last answer" in " ".join(result["verdict"]["reasons"])


def test_a_death_between_the_passes_is_not_waited_out(bench: Bench) -> None:
    """Emptying the cache is tried again and again, but not of a dead server."""
    code, result = bench.go(BASE | {"die_at_flush": True}, SPEC | {"die_at_flush": True}, pairs=1)
    assert code == 13
    (block,) = result["blocks"]
    assert block["flush"] == []
    assert block["validity"]["causes"] == ["server died: RuntimeError: simulated"]


def test_settings_of_nccl_reach_both_servers_the_report_and_a_resumed_run(bench: Bench) -> None:
    """K4-5."""
    built = bench.image(BASE, SPEC)
    environ = {"NCCL_P2P_DISABLE": "1"}
    run.benchmark(bench.settings(pairs=1), built, environ=environ, out=bench.out, err=bench.err)
    assert bench.result()["plan"]["environment"] == environ
    assert "| NCCL_P2P_DISABLE " in (bench.run_folder() / records.REPORT).read_text()
    assert {path.read_text() for path in (bench.folder / "starts").glob("start-*")} == {"NCCL_P2P_DISABLE=1"}
    with pytest.raises(BadConfig, match="environment changed"):
        run.benchmark(bench.settings(resume=str(bench.run_folder())), built, environ={}, out=bench.out, err=bench.err)
    assert "NCCL_P2P_DISABLE=1" in run.render_plan(run.describe(bench.settings(), built, environ))


def test_a_server_that_calls_itself_sick_while_tokens_flow_is_measured(bench: Bench) -> None:
    """K6-3 (d): a long prefill answers 503; nobody asks while it is measured, and answers are what counts."""
    sick = {"health": [200, 503]}
    code, result = bench.go(BASE | sick, SPEC | sick, pairs=1)
    assert code != 13, result["verdict"]
    assert all(block["resident_bytes"] > 2**20 for block in result["blocks"])
    assert all(block["validity"]["ok"] for block in result["blocks"])


def test_a_stop_between_the_arms_keeps_the_block_just_measured(bench: Bench) -> None:
    """K6-1. The signal comes while its server is being stopped, which takes up to the grace time."""
    built = bench.image(BASE | {"ignore_term": True}, SPEC | {"ignore_term": True})
    runner = start(bench, bench.settings(pairs=1, grace_seconds=30.0), built)
    assert runner.stderr is not None
    next(line for line in runner.stderr if ": stopping" in line)
    runner.send_signal(signal.SIGTERM)
    runner.communicate(timeout=20)
    assert runner.returncode == 143
    assert servers(bench) == []
    partial = bench.result()
    assert partial["status"] == "aborted"
    (block,) = partial["blocks"]
    assert block["validity"]["ok"]
    assert block["stop"]["signals"] == ["TERM", "KILL"]
    assert block["stop"]["before_stop"] is False


def test_a_stop_while_the_result_is_written_waits_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = page.page

    def slow(found: dict[str, Any]) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(found)

    monkeypatch.setattr(page, "page", slow)
    with pytest.raises(Terminated) as caught, signals.as_exceptions():
        bench.go(BASE, SPEC, pairs=1)
    assert caught.value.exit_code == 143
    assert bench.result()["status"] == "complete"
    assert {records.RESULT, records.REPORT, records.PAGE, records.METRICS} <= {
        path.name for path in bench.run_folder().iterdir()}
    assert not list(bench.run_folder().glob(".*"))
