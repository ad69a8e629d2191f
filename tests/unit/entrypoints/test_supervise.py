"""Start, watch, stop: on real processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoints import processes, signals
from entrypoints.errors import BadConfig, Busy, ServerDied, Terminated
from entrypoints.readiness import Expect, wait_ready
from entrypoints.supervise import Server, StopReport, free_port
from tests.unit.entrypoints.serving import MODEL, launch, server


@pytest.fixture
def children() -> Iterator[None]:
    """Nothing of a test may be left running."""
    yield
    deadline = time.monotonic() + 5
    while left := [one for one in processes.everyone().values() if one.parent == os.getpid() and one.alive]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


pytestmark = pytest.mark.usefixtures("children")


def ready(one: Server) -> None:
    wait_ready(one, Expect(MODEL), stall=10)


def died(one: Server, within: float = 5.0) -> ServerDied:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            one.wait(0.05)
        except ServerDied as error:
            return error
    raise AssertionError("nothing noticed")


def test_a_whole_life_leaves_nothing(tmp_path: Path) -> None:
    one = server(tmp_path, grandchildren=5)
    with one:
        ready(one)
        living = one.look()
        assert {"sglang::schedul", "sglang::detoken"} <= {member.name for member in living}
        assert one.base_url == f"http://127.0.0.1:{one.launch.port}"
        one.check()
    report = one.stop()
    assert report.clean
    assert report.signals == ("TERM",)
    assert report.exit_code == -signal.SIGTERM
    report.require_clean()
    assert not [member for member in living if processes.is_same(member)]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("server-")]  # its temporary folder
    assert one.stop() is report


def test_the_port_must_be_free_and_its_holder_is_left_alone(tmp_path: Path) -> None:
    """K6-4."""
    start = launch(tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", start.port))
        holder.listen()
        with pytest.raises(Busy, match=f"port {start.port} is taken") as caught:
            Server(start).start()
    assert f"pid {os.getpid()}" in str(caught.value)


def test_a_command_that_cannot_run(tmp_path: Path) -> None:
    start = dataclasses.replace(launch(tmp_path), argv=("/no/such/python", "-m", "sglang"))
    one = Server(start)
    with pytest.raises(BadConfig, match="cannot be run"):
        one.start()
    assert one.stop() == StopReport(0.0, (), None)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("server-")]


@pytest.mark.parametrize("call", ["check", "pid"])
def test_questions_before_the_start(tmp_path: Path, call: str) -> None:
    one = server(tmp_path)
    with pytest.raises(RuntimeError, match="not started"):
        one.check() if call == "check" else one.pid


def test_a_child_that_ignores_term_is_killed_after_the_grace(tmp_path: Path) -> None:
    """K6-1."""
    one = server(tmp_path, grace=0.5, ignore_term=True, orphan=True)
    with one:
        ready(one)
        orphan = next(member for member in one.look() if member.session not in {one.pid, os.getsid(0)})
    report = one.stop()
    assert report.clean
    assert report.signals == ("TERM", "KILL")
    assert 0.5 <= report.seconds < 4
    assert not processes.is_same(orphan)


def test_an_orphan_of_another_session_is_found_after_its_parent_died(tmp_path: Path) -> None:
    one = server(tmp_path, grace=0.5, orphan=True, then=[["requests", 2], ["signal", "SIGKILL"]])
    with one:
        ready(one)
        orphan = next(member for member in one.look() if member.session not in {one.pid, os.getsid(0)})
        os.kill(one.pid, signal.SIGKILL)
        died(one)
    assert one.stop().clean
    assert not processes.is_same(orphan)


@pytest.mark.parametrize("neighbour", [False, True])
def test_orphans_that_end_do_not_stay_defunct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              neighbour: bool) -> None:
    """K6-1: as their new parent we read their status, even behind an ended child that somebody else will ask for, and
    of those that left the session as well."""
    def defunct() -> list[processes.Process]:
        return [member for member in processes.everyone().values()
                if member.parent == os.getpid() and not member.alive and (other is None or member.pid != other.pid)]

    other = subprocess.Popen(["true"]) if neighbour else None
    with server(tmp_path, adrift=5) as one:
        ready(one)
        end = time.monotonic() + 2
        seen = 0
        while time.monotonic() < end and (seen < 5 or defunct()):
            seen = max(seen, len(defunct()))
            one.wait(0.02)
        assert not defunct()
        if not neighbour:  # nobody left to look past: the table of all processes is not read
            monkeypatch.setattr(processes, "everyone", lambda: pytest.fail("read all of /proc"))
            processes.reap_orphans(one.pid)
            monkeypatch.undo()
    if other is not None:
        assert other.wait(10) == 0, "its status was left to its owner"


def test_only_own_processes_are_stopped(tmp_path: Path) -> None:
    """K6-4."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with server(tmp_path) as one:
            ready(one)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(("status", "cause"), [
    (0, "it ended with status 0, as SGLang also does after a crash"),
    (3, "ended with status 3"),
    (137, "killed (SIGKILL); the container's out-of-memory counter did not rise"),
    (139, "ended by signal SIGSEGV"),
])
def test_an_exit_is_a_death_whatever_its_status(tmp_path: Path, status: int, cause: str) -> None:
    """K6-2: 137 and 139 are named."""
    with server(tmp_path, then=[["exit", status]], open=None) as one:
        error = died(one)
    assert error.diagnosis.cause == cause
    assert error.diagnosis.exit_code == status
    assert error.exit_code == 69
    with pytest.raises(ServerDied):  # it stays dead
        one.check()


def test_a_signal_death_is_named(tmp_path: Path) -> None:
    with server(tmp_path, open=None, then=[["signal", "SIGBUS"]]) as one:
        error = died(one)
    assert error.diagnosis.signal == "SIGBUS"
    assert "shared memory is probably full" in error.diagnosis.remedy


def test_the_memory_killer_comes_before_what_the_log_says_of_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K6-2: the container's own counter."""
    kills = iter([4, 6])
    monkeypatch.setattr(processes, "oom_kills", lambda: next(kills, 6))
    line = "Subprocess scheduler_0 (pid=17) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
    with server(tmp_path, open=None, log=[line], then=[["signal", "SIGKILL"]]) as one:
        error = died(one)
    assert error.diagnosis.fault == "container-out-of-memory"
    assert error.diagnosis.oom_kills == 2


def test_the_memory_killer_comes_before_a_known_text_in_the_log(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --log-requests a prompt may hold any text; the kernel's counter is the kernel's word."""
    kills = iter([4, 5])
    monkeypatch.setattr(processes, "oom_kills", lambda: next(kills, 5))
    line = "Receive: obj=GenerateReqInput(text='Why does torch say CUDA out of memory?')"
    with server(tmp_path, open=None, log=[line], then=[["signal", "SIGKILL"]]) as one:
        error = died(one)
    assert error.diagnosis.fault == "container-out-of-memory"
    assert error.diagnosis.evidence == ""
    assert "ended by signal SIGKILL; out-of-memory kills in this container: 1" in str(error)


def test_a_fatal_line_that_was_no_death_is_no_cause_of_a_later_one(tmp_path: Path) -> None:
    forged = "|Scheduler hit an exception: nonsense of a prompt"
    heard = tmp_path / "heard"
    with server(tmp_path, open=None, log=[forged], then=[["exists", str(heard)], ["exit", 3]]) as one:

        def doubt(_line: str) -> bool:
            heard.touch()
            return True

        one.doubt = doubt
        error = died(one)
    assert error.diagnosis.fault == "exit-status"
    assert "exit status 3" in str(error)


def test_a_killed_worker_is_noticed_at_once(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        ready(one)
        victim = next(member for member in one.look() if member.name == "sglang::schedul")
        begin = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        error = died(one)
        assert time.monotonic() - begin < 1.5
    assert error.diagnosis.missing == (f"sglang::schedul (pid {victim.pid})",)
    assert "a process that the server needs is gone" in error.diagnosis.cause
    assert one.stop().clean


def test_a_fatal_line_is_a_death_even_while_the_process_lingers(tmp_path: Path) -> None:
    steps = [["after", 0.2], ["log", "Scheduler hit an exception: Traceback (most recent call last):"],
             ["log", '|  File "scheduler.py", line 1, in run'], ["log", "|ValueError: the page table is torn"],
             ["hang"]]
    with server(tmp_path, then=steps) as one:
        error = died(one)
    assert error.diagnosis.cause == "ValueError: the page table is torn"
    report = one.stop()
    assert report.clean
    assert report.seconds < 3  # no grace for what is dying anyway


def test_stop_while_interrupted_is_quick_and_complete(tmp_path: Path) -> None:
    one = server(tmp_path, grace=60, ignore_term=True)
    begin = time.monotonic()
    with pytest.raises(Terminated), one:  # noqa: PT012 - the context manager is what is tested
        ready(one)
        raise Terminated(signal.SIGTERM)
    assert time.monotonic() - begin < 9
    assert one.stop().clean


def test_an_interruption_in_the_middle_of_a_stop_kills_at_once(tmp_path: Path) -> None:
    one = server(tmp_path, grace=60, ignore_term=True)
    one.start()
    ready(one)
    later = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    with pytest.raises(Terminated), signals.as_exceptions():  # noqa: PT012 - a signal, once somebody waits for it
        later.start()
        one.stop()
    assert one.stop().clean


def test_an_interruption_during_the_start_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    real = subprocess.Popen

    def interrupted(*args: object, **more: object) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = real(*args, **more)  # type: ignore[call-overload]
        started.append(process)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    one = server(tmp_path)
    with pytest.raises(Terminated), signals.as_exceptions():
        one.start()
    assert started[0].poll() is not None
    assert one.stop().clean


def test_shared_memory_of_a_killed_server_is_removed(tmp_path: Path) -> None:
    script = ("import mmap, os, time; f = os.open('/dev/shm/entrypoint-test-%d' % os.getpid(), os.O_CREAT | os.O_RDWR);"
              "os.ftruncate(f, 4096); m = mmap.mmap(f, 4096); print('mapped', flush=True); time.sleep(60)")
    start = dataclasses.replace(launch(tmp_path), argv=(sys.executable, "-c", script))
    one = Server(start, grace=5)
    one.start()
    while not one.log.lines:
        one.wait(0.02)
    segment = Path(f"/dev/shm/entrypoint-test-{one.pid}")
    assert segment.exists()
    one.look()
    os.kill(one.pid, signal.SIGKILL)
    assert one.stop().clean
    assert not segment.exists()


def test_gpu_memory_is_waited_for_and_its_absence_is_said(tmp_path: Path) -> None:
    """K6-4."""
    used = iter([(2**30, 0), (90 * 2**30, 0), (2**30, 0)])
    one = Server(launch(tmp_path, open=None), grace=2, memory=lambda: next(used))
    with one:
        pass
    assert one.stop().gpu_released

    full = iter([(2**30, 0)])
    two = Server(launch(tmp_path, open=None), grace=2, memory=lambda: next(full, (91 * 2**30, 0)), patience=0)
    with two:
        pass
    report = two.stop()
    assert not report.clean
    with pytest.raises(Busy, match="GPU memory not released"):
        report.require_clean()


def test_gpu_memory_may_come_back_slowly_as_long_as_it_comes_back(tmp_path: Path) -> None:
    """Bounded by progress: eight cards of 96 GiB may take longer than the patience for nothing at all."""
    used = iter([0, *(left * 2**30 for left in range(9, 0, -1)), *[0] * 9])
    one = Server(launch(tmp_path, open=None), grace=2, memory=lambda: (next(used),), patience=0.02)
    with one:
        pass
    assert one.stop().clean


def test_a_card_that_was_lost_meanwhile_is_unknown_and_not_waited_for(tmp_path: Path) -> None:
    """A finished block must not be lost in a teardown that asks a lost card."""
    afterwards: tuple[tuple[int | None, ...], ...] = ((2**30, None), ())
    for answers in afterwards:
        looks = [answers, (2**30, 2**30)]
        one = Server(launch(tmp_path, open=None), grace=2, memory=lambda looks=looks: looks[-1])  # type: ignore[misc]
        with one:
            looks.pop()
        report = one.stop()
        assert report.gpu_held_bytes == ((0, None) if answers else (None, None))
        assert report.gpu_released is None
        assert report.as_dict()["gpu_memory_released"] is None
        assert not report.pending
        with pytest.raises(Busy, match="GPU 1: whether GPU memory was released is not known"):
            report.require_clean()
    assert StopReport(0.0, (), 0, gpu_held_bytes=(None, 2**30)).gpu_released is False


def test_a_second_look_may_find_it_released(tmp_path: Path) -> None:
    memory = [0]
    one = Server(launch(tmp_path, open=None), grace=2, memory=lambda: tuple(memory), patience=0.0,
                 holders=lambda: ("python (pid 7)",))
    one.start()
    memory[0] = 90 * 2**30
    assert one.stop().problems()[0].found == "90.0 GiB more than before the start, held by python (pid 7)"
    assert one.remains().gpu_held_bytes == (90 * 2**30,)
    memory[0] = 0
    assert one.remains().clean
    assert one.remains() is one.stop()


def test_a_daemon_that_left_session_and_parent_is_found_and_ended(tmp_path: Path) -> None:
    """It was born after the last look and ignores TERM; only its adoption by us tells whose it is."""
    def daemons() -> list[processes.Process]:
        return [member for member in processes.everyone().values() if member.alive and member.parent == os.getpid()
                and member.session not in {os.getsid(0), one.pid}]

    with server(tmp_path, grace=0.3, then=[["requests", 1], ["escape"]]) as one:
        ready(one)
        end = time.monotonic() + 5
        while not daemons() and time.monotonic() < end:
            one.wait(0.02)
        (daemon,) = daemons()
        assert processes.listening_ports([daemon.pid])
    report = one.stop()
    assert report.clean, report
    assert report.signals == ("TERM", "KILL")
    assert not processes.is_same(daemon)


def test_a_server_that_had_ended_before_the_stop_is_told_apart(tmp_path: Path) -> None:
    with server(tmp_path, open=None, then=[["exit", 0]]) as one:
        died(one)
    assert one.stop().before_stop
    assert one.stop().as_dict()["exit_code"] == 0
    with server(tmp_path) as two:
        ready(two)
    assert not two.stop().before_stop


def test_shared_memory_that_was_there_before_is_left_alone(tmp_path: Path) -> None:
    """With --ipc=host others keep theirs there: what the server only uses is not its own."""
    segment = Path(f"/dev/shm/entrypoint-test-foreign-{os.getpid()}")
    segment.write_bytes(bytes(4096))
    script = (f"import mmap, time; f = open({str(segment)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 4096); "
              "print('mapped', flush=True); time.sleep(60)")
    start = dataclasses.replace(launch(tmp_path), argv=(sys.executable, "-c", script))
    try:
        with Server(start, grace=5) as one:
            while not one.log.lines:
                one.wait(0.02)
        assert one.stop().clean
        assert segment.exists()
    finally:
        segment.unlink()


def test_what_is_left_is_named() -> None:
    report = StopReport(1.0, ("TERM", "KILL"), None, survivors=((7, "sglang::schedul"),), busy_ports=(1,),
                        segments=("psm_1",), gpu_held_bytes=(0, 2**30))
    with pytest.raises(Busy) as caught:
        report.require_clean()
    assert "sglang::schedul (pid 7)" in str(caught.value)
    assert "port 1 " in str(caught.value)
    assert "found:    psm_1" in str(caught.value)
    assert "GPU 1: GPU memory not released" in str(caught.value)
    assert "a process that NVML does not name here" in str(caught.value)
    assert [one["what"] for one in report.as_dict()["left"]] == [  # type: ignore[attr-defined]
        problem.what for problem in caught.value.problems]


def test_check_is_cheap_once_the_server_is_ready(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        ready(one)
        begin = time.perf_counter()
        for _ in range(200):
            one.check()
        assert (time.perf_counter() - begin) / 200 < 0.001


def test_a_port_that_was_given_for_the_rendezvous_must_be_free_as_well(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        start = dataclasses.replace(launch(tmp_path, open=None), init_port=port)
        with Server(start, grace=2, patience=0) as one:
            pass
        assert one.stop().busy_ports == (port,)
    assert one.remains().clean


def test_free_ports_differ_and_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [free_port(), free_port()]
    with monkeypatch.context() as patched:
        patched.setattr("random.sample", lambda *_: two)
        assert [free_port(), free_port(but=two[0])] == two
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))
