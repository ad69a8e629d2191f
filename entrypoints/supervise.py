"""A server process tree: start it, watch it, say why it died, stop all of it, prove that it is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from entrypoints import faults, gpu, processes, signals
from entrypoints.command import secrets
from entrypoints.errors import BadConfig, Busy, Diagnosis, Problem, ServerDied
from entrypoints.logfile import LogFile, tail
from entrypoints.processes import Process

#: SGLang names its processes; those it cannot live without begin so (Linux keeps 15 characters)
REQUIRED_PREFIX = "sglang::"
#: seconds without progress after which what a stopped server left behind counts as left
PATIENCE = 60.0
#: how long the log may go on talking after a death before we judge
_LAST_WORDS = 1.0
#: grace when we are being stopped ourselves, and the waits after KILL then: docker gives 10 s in all
_HURRIED_GRACE = 4.0
_HURRIED_KILL = _HURRIED_PATIENCE = 2.0
_ORPHAN_GRACE = 2.0
_AFTER_KILL = 15.0
#: GPU memory that came back in one look and counts as progress
_RELEASED = 64 * 2**20
#: sessions of the servers that this process has started: what else becomes our child was orphaned by one of them
_sessions: set[int] = set()
_PORTS = range(20000, 32000)  # below Linux's ephemeral range, so no client of ours takes one by chance


_AGAIN = "then start again (a benchmark with --resume)"


@dataclass(frozen=True)
class Launch:
    """One server start: full command line (its --port included), full environment, where it runs, where it logs.

    `init_port` is where its processes meet, when that was given to it: both ports must be free after it.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    port: int
    init_port: int | None = None


@dataclass(frozen=True)
class StopReport:
    """How a server went. `clean` when nothing is left: `survivors` are (pid, name), `busy_ports` still listen,
    `segments` are its files in /dev/shm.

    `gpu_held_bytes` is memory above what was in use before the start, per GPU; None where NVML no longer answers, empty
    without NVML. `gpu_holders` says who uses each GPU, as far as NVML tells. `before_stop`: it had ended by itself,
    with this exit code.
    """

    seconds: float
    signals: tuple[str, ...]
    exit_code: int | None
    survivors: tuple[tuple[int, str], ...] = ()
    busy_ports: tuple[int, ...] = ()
    segments: tuple[str, ...] = ()
    gpu_held_bytes: tuple[int | None, ...] = ()
    gpu_holders: tuple[str, ...] = ()
    before_stop: bool = False

    @classmethod
    def nothing(cls) -> StopReport:
        """Of a server that never ran."""
        return cls(0.0, (), None)

    @property
    def gpu_released(self) -> bool | None:
        """Whether GPU memory is back to what it was before the start, within `gpu.TOLERANCE`; None: not known."""
        if any(held is not None and held > gpu.TOLERANCE for held in self.gpu_held_bytes):
            return False
        return None if None in self.gpu_held_bytes else True

    @property
    def clean(self) -> bool:
        """Whether no process, listener, shared memory or GPU memory is left, as far as can be known."""
        return not self.problems()

    @property
    def pending(self) -> bool:
        """Whether something is left that may still go; a card that does not answer is not waited for."""
        return bool(self.survivors or self.busy_ports or self.segments or self.gpu_released is False)

    def problems(self) -> list[Problem]:
        """All that is left, each with who holds it and what to do."""
        found = [Problem(what="a process of the stopped server is left", found=f"{name} (pid {pid})",
                         expected="gone after KILL", todo="it waits in the kernel (GPU driver, file system): restart "
                         f"the container, {_AGAIN}")
                 for pid, name in self.survivors]
        found += [Problem(what=f"port {port} of the stopped server is still held",
                          found=processes.holder(port) or "nobody any more", expected="nobody",
                          todo=f"end that process, {_AGAIN}") for port in self.busy_ports]
        if self.segments:
            found.append(Problem(what="shared memory of the stopped server is left", where=str(processes.SHM),
                                 found=", ".join(self.segments), expected="removed with its processes",
                                 todo=f"remove these files, {_AGAIN}"))
        found += [Problem(what="GPU memory not released", where=f"GPU {index}",
                          found=f"{held / 2**30:.1f} GiB more than before the start, held by "
                                f"{self.gpu_holders[index] if index < len(self.gpu_holders) else gpu.UNKNOWN}",
                          expected="what was in use before the start",
                          todo="nvidia-smi on the host names every process; end the holder or reset the GPU, "
                               f"{_AGAIN}")
                  for index, held in enumerate(self.gpu_held_bytes) if held is not None and held > gpu.TOLERANCE]
        found += [Problem(what="whether GPU memory was released is not known", where=f"GPU {index}",
                          found="NVML does not answer for this card any more", expected="bytes in use",
                          todo=f"`entrypoint check` and dmesg on the host say why: reset the GPU, {_AGAIN}")
                  for index, held in enumerate(self.gpu_held_bytes) if held is None]
        return found

    def require_clean(self) -> None:
        """Raise `Busy` naming all that is left."""
        if found := self.problems():
            raise Busy(found)

    def as_dict(self) -> dict[str, object]:
        """For the block's record."""
        return {"seconds": round(self.seconds, 3), "signals": list(self.signals), "exit_code": self.exit_code,
                "before_stop": self.before_stop, "clean": self.clean, "ports_free": not self.busy_ports,
                "survivors": [list(one) for one in self.survivors], "segments": list(self.segments),
                "gpu_memory_released": self.gpu_released, "gpu_held_bytes": list(self.gpu_held_bytes),
                "left": [one.as_dict() for one in self.problems()]}


class Server:
    """A supervised server. Use as a context manager: leaving stops the whole tree.

    `version` is SGLang's, for the table of known failures; `memory` reads used bytes per GPU, `holders` who uses them;
    `patience` is how many seconds nothing may change after a stop while something is left.
    """

    def __init__(self, launch: Launch, *, grace: float = 30.0, version: str = "", log: LogFile | None = None,
                 memory: Callable[[], Sequence[int | None]] = gpu.used_memory,
                 holders: Callable[[], Sequence[str]] = gpu.holders, patience: float | None = None) -> None:
        self.launch = launch
        self.grace = grace
        self.version = version
        self.log = log or LogFile(launch.log, secrets(launch.argv))
        self.base_url = f"http://127.0.0.1:{launch.port}"
        self.started = 0.0
        #: whether a fatal log line may be disbelieved; it is asked only while all processes live
        self.doubt: Callable[[str], bool] = lambda _line: False
        self._memory = memory
        self._holders = holders
        self._patience = PATIENCE if patience is None else patience
        self._gpu_before: Sequence[int | None] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._root: Process | None = None
        self._family: dict[int, Process] = {}
        self._ever: dict[tuple[int, int], Process] = {}
        self._required: dict[int, Process] = {}
        self._segments: set[int] = set()
        self._ports: set[int] = set()
        self._foreign_segments: frozenset[int] = frozenset()
        self._fds: dict[int, int] = {}
        self._poll = select.poll()
        self._settled = False
        self._next_look = 0.0
        self._oom_before = 0
        self._sent: list[str] = []
        self._temporary: Path | None = None
        self._doubted: set[str] = set()
        self._death: ServerDied | None = None
        self._report: StopReport | None = None

    @property
    def pid(self) -> int:
        """Process id of the server's first process, which leads its session."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit status of the first process, negative for a signal; None while it lives."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start in a session of its own. Raises `Busy` when the port is taken, `BadConfig` when argv cannot run."""
        if who := processes.holder(self.launch.port):
            raise Busy(Problem(what=f"port {self.launch.port} is taken", found=who, expected="a free port",
                               todo="nothing of a foreign process is ever stopped: end it, or name another port"))
        processes.adopt_orphans()
        self._oom_before = processes.oom_kills()
        self._gpu_before = tuple(self._memory())
        self._foreign_segments = frozenset(processes.segments())
        try:
            with signals.held():  # a server that runs must be known, whatever interrupts us
                self._launch()
        except BaseException:
            self.stop(0)
            self._forget_temporary()
            raise

    def _launch(self) -> None:
        environment = dict(self.launch.env)
        # SGLang leaves socket files behind in the temporary folder: give each start its own
        self._temporary = Path(tempfile.mkdtemp(prefix="server-", dir=environment.get("TMPDIR") or None))
        environment["TMPDIR"] = str(self._temporary)
        try:
            with self.log.writer() as log:
                self._process = subprocess.Popen(
                    self.launch.argv, env=environment, cwd=self.launch.cwd, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise BadConfig(Problem(what="the server's command cannot be run", where=self.launch.argv[0],
                                    found=error.strerror or str(error), expected="an executable",
                                    todo="image.json's `python` names the interpreter")) from error
        self.started = time.monotonic()
        self._root = processes.read(self._process.pid)
        _sessions.add(self._process.pid)
        self._watch(self._process.pid)

    def check(self) -> None:
        """Raise `ServerDied` with a diagnosis when any process that the server needs is gone; cheap.

        A fatal log line counts as death: SGLang may linger for a minute after it, answering nothing. Where strangers'
        words may be in the log, `doubt` decides.
        """
        if self._death:
            raise self._death
        if self._process is None:
            raise RuntimeError("the server was not started")
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + 0.5
            processes.reap_orphans(self.pid, _sessions - {self.pid})
            if not self._settled:
                self.look()
        gone = tuple(f"{self._required[pid].name} (pid {pid})" if pid in self._required else f"server (pid {pid})"
                     for pid in (self._fds[fd] for fd, _ in self._poll.poll(0)))
        fatal = [line for line in self.log.new_lines() if faults.is_end(line, faults.load(), self.version)]
        if gone or (fatal and not self.doubt(fatal[0])):
            self._death = ServerDied(self._last_words(gone))
            raise self._death
        self._doubted |= set(fatal)

    def wait(self, seconds: float) -> None:
        """Sleep, but wake as soon as a required process ends, and `check`."""
        self._poll.poll(seconds * 1000)
        self.check()

    def settle(self) -> None:
        """The server is ready: its processes are known from here on, and `check` no longer looks for new ones."""
        self.look()
        self._settled = True

    def look(self) -> Sequence[Process]:
        """Read the process table anew: the living members of the tree."""
        if self._root is None:
            return ()
        self._family = processes.family(self._root, self._ever.values(), processes.everyone(), _sessions)
        for one in self._family.values():
            self._ever.setdefault((one.pid, one.start), one)
            if self._needs(one) and one.pid not in self._required:
                self._required[one.pid] = one
                self._watch(one.pid)
        living = [one for one in self._family.values() if one.alive]
        self._segments |= processes.shared_memory(one.pid for one in living) - self._foreign_segments
        return living

    @property
    def members(self) -> Sequence[Process]:
        """Living members at the last look."""
        return [one for one in self._family.values() if one.alive]

    @property
    def pids(self) -> Sequence[int]:
        """All that it ever had."""
        self.look()
        return sorted({pid for pid, _ in self._ever})

    @property
    def processes_seen(self) -> int:
        """How many different processes the tree had so far: compilers come and go."""
        return len(self._ever)

    def diagnose(self, cause: str = "", remedy: str = "", fault: str = "") -> Diagnosis:
        """What is known now. The kernel's memory killer comes first, then a known failure in the log, then `cause`
        as given, then the log's first exception, then the exit status.

        The kernel before the log: a row may match a line that ended nothing, or a prompt among logged requests.
        """
        lines = self.log.everything()
        log = faults.explain([line for line in lines if line not in self._doubted], faults.load(), self.version)
        kills = max(0, processes.oom_kills() - self._oom_before)
        code = self.exit_code
        evidence = log.evidence
        if kills:
            verdict = _OUT_OF_MEMORY
            evidence = "" if log.known else evidence  # it names something else
        elif log.known:
            verdict = (log.cause, log.remedy, log.fault)
        elif cause:
            verdict = (cause, remedy, fault)
        elif log.cause:
            verdict = (log.cause, log.remedy, log.fault)
        else:
            verdict = _by_status(code)
        return Diagnosis(cause=verdict[0], remedy=verdict[1] or _READ_LOG, fault=verdict[2], evidence=evidence,
                         exit_code=code, oom_kills=kills, tail=tail(lines), log=str(self.log.path))

    def stop(self, grace: float | None = None) -> StopReport:
        """TERM to the first process, grace, KILL of own descendants only; then wait until nothing is left.

        Idempotent; never raises for a dead server or for what is left: that is in the report. When interrupted, it
        kills at once and passes the interruption on. Without `grace`, a stop on the way out of an interruption is
        quick: docker waits 10 s in all by default.
        """
        hurried = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if grace is None:
            grace = min(self.grace, _HURRIED_GRACE) if hurried else self.grace
        if self._report or self._process is None:
            return self._report or StopReport.nothing()
        begin = time.monotonic()
        # one that was ready and no longer listens is on its way out, of itself
        gone = self.exit_code is not None or (self._settled and self.launch.port not in processes.listeners())
        before_stop = gone and not self._sent
        given = {self.launch.port, self.launch.init_port or self.launch.port}
        self._ports = processes.listening_ports([one.pid for one in self.look()]) | given
        try:
            self._end_tree(grace, _HURRIED_KILL if hurried else _AFTER_KILL)
        except BaseException:
            self._kill_tree(_HURRIED_KILL)
            raise
        finally:
            for descriptor in self._fds:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self._fds, self._poll = {}, select.poll()
            self.log.close()
            self._forget_temporary()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        report = StopReport(0.0, tuple(self._sent), self.exit_code, before_stop=before_stop)
        report = self._remains(report, min(_HURRIED_PATIENCE, self._patience) if hurried else self._patience)
        self._report = dataclasses.replace(report, seconds=time.monotonic() - begin)
        return self._report

    def remains(self) -> StopReport:
        """The report of a server that was stopped, after another wait for what it left behind."""
        report = self.stop()
        if not report.clean:
            self._report = report = self._remains(report, self._patience)
        return report

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def _watch(self, pid: int) -> None:
        """A pidfd turns readable when its process ends, zombie or not, and never means another process."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            descriptor = os.open(os.devnull, os.O_RDONLY)  # gone already: always readable
        self._fds[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)

    def _needs(self, one: Process) -> bool:
        """Whether the server cannot live without it. What a scheduler forks has its name for a while, orphan or not."""
        parent = self._family.get(one.parent)
        return (one.name.startswith(REQUIRED_PREFIX) and one.pid != self.pid
                and parent is not None and parent.name != one.name)

    def _last_words(self, gone: tuple[str, ...]) -> Diagnosis:
        """Let the log finish (a traceback follows the line that told us), then judge."""
        end = time.monotonic() + _LAST_WORDS
        quiet = time.monotonic() + 0.25
        while time.monotonic() < min(end, quiet):
            if self.log.new_lines():
                quiet = time.monotonic() + 0.25
            time.sleep(0.02)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its status, when it is going anyway
                self._process.wait(0.1)
        diagnosis = self.diagnose()
        if gone and self.exit_code is None and not diagnosis.evidence and not diagnosis.oom_kills:
            diagnosis = self.diagnose(f"a process that the server needs is gone: {', '.join(gone)}",
                                      "somebody killed it: look at dmesg and at the container's memory limit",
                                      "process-gone")
        return dataclasses.replace(diagnosis, missing=gone)

    def _end_tree(self, grace: float, after_kill: float) -> None:
        """TERM, then KILL what is left after the grace time.

        Only the first process gets TERM: it ends its children in order. When it is dead already, they get it.
        """
        first = self.exit_code is None
        if not first:
            grace = min(grace, _ORPHAN_GRACE)
        for pid in [self.pid] if first else [one.pid for one in self._living()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                self._sent[:] = ["TERM"]
        end = time.monotonic() + grace
        while time.monotonic() < end:
            if not self._living():
                return
            if self._death and self.exit_code is None:
                break  # it is dying of itself and would take a minute over it
            time.sleep(0.05)
        self._kill_tree(after_kill)

    def _kill_tree(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (living := self._living()) and time.monotonic() < end:
            for one in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(one.pid, signal.SIGKILL)
            if "KILL" not in self._sent:
                self._sent.append("KILL")
            time.sleep(0.05)

    def _living(self) -> Sequence[Process]:
        """Members that live; those that ended are reaped when they have become our children."""
        living = self.look()
        if self._process is not None:
            self._process.poll()
            mine = os.getpid()
            processes.reap(pid for pid, one in self._family.items()
                           if not one.alive and one.parent == mine and pid != self._process.pid)
        return living

    def _remains(self, report: StopReport, patience: float) -> StopReport:
        """What is left, after waiting for it as long as it gets less: drivers take seconds to give memory back.

        Bounded: each further wait needs a process, a port or 64 MiB less than before.
        """
        least, end = self._left(report), time.monotonic() + patience
        while least.pending and time.monotonic() < end:
            time.sleep(min(0.5, patience))
            now = self._left(report)
            if _less(now, least):
                least, end = now, time.monotonic() + patience
            elif not now.pending:
                return now
        if least.gpu_released is not False:
            return least
        return dataclasses.replace(least, gpu_holders=tuple(self._holders()))

    def _left(self, report: StopReport) -> StopReport:
        """The report with what one look finds."""
        survivors = tuple((one.pid, one.name) for one in self._living())
        return dataclasses.replace(
            report, exit_code=self.exit_code, survivors=survivors,
            busy_ports=tuple(sorted(self._ports & set(processes.listeners()))),
            segments=() if survivors else tuple(processes.remove_segments(self._segments)),
            gpu_held_bytes=self._held())

    def _held(self) -> tuple[int | None, ...]:
        """Bytes in use on each GPU above those before the start; None where one of the two is not known."""
        now = [*self._memory(), *([None] * len(self._gpu_before))] if self._gpu_before else []
        return tuple(None if before is None or used is None else max(0, used - before)
                     for used, before in zip(now, self._gpu_before, strict=False))

    def _forget_temporary(self) -> None:
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _less(now: StopReport, before: StopReport) -> bool:
    """Whether less is left than before, by enough to count."""
    return (len(now.survivors) < len(before.survivors) or len(now.busy_ports) < len(before.busy_ports)
            or _sum(now.gpu_held_bytes) <= _sum(before.gpu_held_bytes) - _RELEASED)


def _sum(held: Sequence[int | None]) -> int:
    return sum(one or 0 for one in held)


_READ_LOG = "read the log; if it names no cause, start the same command by hand: `entrypoint plan` prints it"
_OUT_OF_MEMORY = ("the kernel killed it: the container's memory limit was reached",
                  "give the container more memory (`docker run --memory`), or load with fewer processes",
                  "container-out-of-memory")


def _by_status(code: int | None) -> tuple[str, str, str]:
    """(cause, remedy, name) from an exit status alone."""
    if code is None:
        return "no cause found", "", ""
    if code == 0:
        return ("it ended with status 0, as SGLang also does after a crash", "read the log from the first error on",
                "exit-0")
    number = -code if code < 0 else code - 128
    if number in {int(one) for one in signal.Signals}:
        name = signal.Signals(number).name
        if name == "SIGKILL":
            return ("killed (SIGKILL); the container's out-of-memory counter did not rise",
                    "SGLang kills itself after a scheduler died: read the log; or somebody outside killed it",
                    "killed")
        if name == "SIGBUS":
            return "ended by signal SIGBUS", "shared memory is probably full: --ipc=host or --shm-size=32g", "sigbus"
        return f"ended by signal {name}", "", name.lower()
    return f"ended with status {code}", "", "exit-status"


def free_port(host: str = "127.0.0.1", *, but: int | None = None) -> int:
    """A port that nobody listens on and that can be bound now, another one than `but`."""
    taken = {*processes.listeners(), but}
    for port in random.sample(_PORTS, 200):  # chance, so that two runners rarely pick the same
        if port in taken:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one, contextlib.suppress(OSError):
            one.bind((host, port))
            return port
    raise Busy(Problem(what="no free port", where=f"{host}:{_PORTS.start}-{_PORTS.stop - 1}", expected="a free one",
                       todo="stop what holds them"))
