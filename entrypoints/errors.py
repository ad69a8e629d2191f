"""Everything that can go wrong inside the image, one class per exit code.

Codes follow sysexits(3) where one fits (64 to 78), `timeout(1)` for a deadline (124) and 128 + signal for an
interruption; the verdicts of a benchmark have codes of their own, see `VERDICT_CODES`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: what and where, found against expected, what to do next."""

    what: str
    where: str = ""
    found: str = ""
    expected: str = ""
    todo: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        for label, text in (("found:", self.found), ("expected:", self.expected), ("do:", self.todo)):
            if text:
                lines.append(f"  {label:<10}{text}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str]:
        """The problem for JSON, without empty parts."""
        parts = {"what": self.what, "where": self.where, "found": self.found, "expected": self.expected,
                 "todo": self.todo}
        return {key: value for key, value in parts.items() if value}


class EntrypointError(Exception):
    """Base of all errors that a user is meant to read; carries its problems and the exit code."""

    exit_code = 70
    kind = "error"

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def as_dict(self) -> dict[str, object]:
        """The error for JSON."""
        return {"kind": self.kind, "exit_code": self.exit_code,
                "problems": [problem.as_dict() for problem in self.problems]}


class Usage(EntrypointError):
    """The command line makes no sense."""

    exit_code, kind = 64, "usage"


class InputMissing(EntrypointError):
    """A model, a draft, a prompt file or a run folder is not there."""

    exit_code, kind = 66, "input missing"


class Unusable(EntrypointError):
    """GPU, driver, image or server cannot be used."""

    exit_code, kind = 69, "unusable"


class Bug(EntrypointError):
    """A mistake of ours."""

    exit_code, kind = 70, "bug"


class CannotWrite(EntrypointError):
    """A folder that must be writable is not."""

    exit_code, kind = 73, "cannot write"


class Busy(EntrypointError):
    """A port or a GPU is held by somebody else."""

    exit_code, kind = 75, "busy"


class BadConfig(EntrypointError):
    """A setting, a server flag or image.json is wrong."""

    exit_code, kind = 78, "bad configuration"


class Deadline(EntrypointError):
    """A time limit was reached."""

    exit_code, kind = 124, "deadline"


class Invalid(EntrypointError):
    """The run cannot count: the verdict is `invalid`; what was measured is kept."""

    exit_code, kind = 13, "invalid"


@dataclass(frozen=True)
class Diagnosis:
    """Why a server is not what it should be.

    `cause` is one line for people. `fault` is the name of the row in faults.toml that matched, or "" when none did.
    `evidence` is the log line that names the first true cause, `tail` the end of the log. `exit_code` is negative for
    a signal, as in subprocess, and None while the process lives; `missing` names required processes that are gone.
    """

    cause: str
    remedy: str = ""
    fault: str = ""
    evidence: str = ""
    exit_code: int | None = None
    oom_kills: int = 0
    missing: tuple[str, ...] = ()
    tail: tuple[str, ...] = field(default=(), repr=False)
    log: str = ""

    @property
    def signal(self) -> str:
        """Name of the signal that ended the process, or "". 128 + n is read as the shell's way of saying it."""
        code = self.exit_code
        if code is None:
            return ""
        number = -code if code < 0 else code - 128
        return signal.Signals(number).name if number in {int(one) for one in signal.Signals} else ""

    @property
    def state(self) -> str:
        """How the process is, what the kernel counted and what is missing: one line, whatever the cause."""
        if self.exit_code is None:
            parts = ["its first process lives"]
        elif self.exit_code < 0:
            parts = [f"ended by signal {self.signal or -self.exit_code}"]
        else:
            parts = [f"exit status {self.exit_code}" + (f" ({self.signal})" if self.signal else "")]
        parts.append(f"out-of-memory kills in this container: {self.oom_kills}")
        if self.missing:
            parts.append(f"gone: {', '.join(self.missing)}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """The diagnosis for JSON, with the log's tail."""
        return {"cause": self.cause, "remedy": self.remedy, "fault": self.fault, "evidence": self.evidence,
                "exit_code": self.exit_code, "signal": self.signal, "oom_kills": self.oom_kills,
                "missing": list(self.missing), "tail": list(self.tail), "log": self.log}


class ServerFault(Unusable):
    """A server that cannot be used, with the reason in `diagnosis`."""

    what = "server unusable"

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        found = " | ".join(part for part in dict.fromkeys((diagnosis.cause, diagnosis.evidence)) if part)
        tail = "".join(f"\n    | {line}" for line in diagnosis.tail)
        super().__init__(Problem(what=self.what, where=diagnosis.log, found=f"{found}\n    {diagnosis.state}{tail}",
                                 expected="a server that lives and answers", todo=diagnosis.remedy))

    def as_dict(self) -> dict[str, object]:
        """The error for JSON, with the diagnosis."""
        return {**super().as_dict(), "diagnosis": self.diagnosis.as_dict()}


class ServerDied(ServerFault):
    """The server, or a process of it that it cannot do without, is gone. Exit status 0 is no excuse."""

    kind, what = "server died", "server died"


class NotReady(ServerFault):
    """The server lives and will not become ready: a fatal log line, no progress, wrong answers."""

    kind, what = "server not ready", "server does not become ready"


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGINT or SIGHUP reached the runner: clean up, keep what was measured, exit with 128 + signal.

    A KeyboardInterrupt, because asyncio lets nothing else out of a running task at once.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.signum


#: exit code of `benchmark` and `analyze` for each verdict
VERDICT_CODES: Mapping[str, int] = MappingProxyType(
    {"win": 0, "loss": 10, "equivalent": 11, "inconclusive": 12, "invalid": 13})
