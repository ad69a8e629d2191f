"""What a build is doing and did: BuildKit's vertexes gathered into the steps that the user wrote.

With several targets BuildKit reports one instruction once per target, sometimes under different digests
(`[sglang torch 2/5] RUN ...` and `[torch torch 2/5] RUN ...`). Here it is one step of stage `torch`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from buildctl import fault
from buildctl.errors import Problem
from buildctl.progress.rawjson import Event, Log, Text, Transfer, Vertex, Warned

#: lines of a failed step's output that an error shows
TAIL = 40
#: a progress bar without a newline is cut into lines of this many bytes
_LINE_LIMIT = 64 * 1024

_POSITION = re.compile(r"\d+/\d+")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f]")
_CLIPPED = re.compile(r"\[output clipped, log limit .* reached\]")
_PROCESS = re.compile(r'process "(?P<command>.*)" did not complete successfully: (?P<reason>exit code: (?P<code>\d+))',
                      re.DOTALL)
_RUN_OPTIONS = re.compile(r"^RUN (?:--\S+ )+")
_PLACE = re.compile(r"\S+:\d+")
_RULE = re.compile(r"-{10,}")
_CANCELED = "context canceled"


class Kind(Enum):
    """What a step is: the stage's base, an instruction, an export or push, or BuildKit's own work."""

    BASE = "base"
    INSTRUCTION = "instruction"
    EXPORT = "export"
    INTERNAL = "internal"


class State(Enum):
    """Where a step stands."""

    WAITING = "waiting"
    RUNNING = "running"
    RAN = "ran"
    CACHED = "cached"
    FAILED = "failed"
    CANCELED = "canceled"


class Cause(Enum):
    """What kind of trouble ended a build, as far as its messages tell; it decides the exit code."""

    STEP = "step"
    DISK = "disk"
    MEMORY = "memory"
    NETWORK = "network"
    AUTH = "auth"
    REFUSED = "refused"
    BASE = "base"
    ENGINE = "engine"
    COLLISION = "collision"
    DEFINITION = "definition"


@dataclass(frozen=True, slots=True)
class Name:
    """A vertex' name, taken apart: `[TARGET PLATFORM STAGE 2/5] RUN ...`, where each part may be missing."""

    kind: Kind
    stage: str
    position: str
    instruction: str

    @property
    def label(self) -> str:
        """Short name of the step: `torch 2/5`, `torch export`."""
        last = self.position
        if self.kind is Kind.EXPORT:
            last = "push" if self.instruction.startswith("pushing ") else "export"
        elif self.kind is Kind.INTERNAL:
            last = "internal"
        return f"{self.stage} {last}".strip()


def parse_name(text: str) -> Name:
    """Take a vertex' name apart."""
    inside, bracket, rest = text[1:].partition("] ") if text.startswith("[") else ("", "", "")
    words = inside.split() if bracket else []
    instruction = rest if bracket else text
    if words and _POSITION.fullmatch(words[-1]):
        position = words.pop()
        stage = words[-1] if words else ""
        # with more than one platform BuildKit puts it before the stage; an unnamed stage leaves the platform alone
        platform = next((word for word in words if "/" in word), "")
        if platform and platform != stage:
            stage = f"{stage} {platform}"
        kind = Kind.BASE if instruction.startswith("FROM ") else Kind.INSTRUCTION
        return Name(kind, stage, position, instruction)
    internal = bool(words) and words[-1] in {"internal", "auth"}
    if not internal and instruction.startswith(("exporting ", "pushing ", "sending tarball")):
        return Name(Kind.EXPORT, " ".join(words), "", instruction)
    return Name(Kind.INTERNAL, " ".join(words[:-1] if internal else words), "", instruction)


@dataclass(slots=True)
class Step:
    """One step, as it grows; renderers only read it. Seconds are the engine's, except for `since`."""

    name: Name
    since: float | None = None  # our clock, while it runs
    error: str = ""
    clipped: bool = False
    last_line: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))
    announced: float | None = None  # seconds at the last `Finished`
    items: dict[str, int] = field(default_factory=dict)  # what it moves, and how many bytes of it
    _spans: list[tuple[float, float]] = field(default_factory=list)
    _open: set[str] = field(default_factory=set)
    _completed: set[str] = field(default_factory=set)
    _cached: set[str] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        """Time in which it ran, counted once where several targets report it or it ran in parts."""
        total, end = 0.0, float("-inf")
        for start, stop in sorted(self._spans):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    @property
    def bytes(self) -> int:
        """What it moved: a base pulled, a layer exported; 0 where BuildKit does not say."""
        return sum(self.items.values())

    @property
    def state(self) -> State:
        """Where it stands."""
        if self.error:
            return State.CANCELED if is_canceled(self.error) else State.FAILED
        if self._open:
            return State.RUNNING
        if self.name.kind is Kind.BASE and self._completed:
            # looking a base up is no work; pulling it is
            return State.RAN if self.bytes else State.CACHED
        if self._completed - self._cached:
            return State.RAN
        return State.CACHED if self._cached else State.WAITING

    @property
    def reason(self) -> str:
        """Why it failed, in few words; empty when it did not."""
        return short_reason(self.error) if self.state is State.FAILED else ""

    def elapsed(self, now: float) -> float:
        """Seconds until now, for a running step; `now` is our clock."""
        return self.seconds + (now - self.since if self.since is not None else 0.0)

    def report(self, vertex: Vertex, now: float) -> None:
        """Take in what BuildKit says about one of its vertexes."""
        # one vertex is reported once per target, with clocks that differ by milliseconds
        report = f"{vertex.digest} {vertex.name}"
        if vertex.cached:
            self._cached.add(vertex.digest)
        if vertex.error and (not self.error or is_canceled(self.error)):
            self.error = vertex.error
        if vertex.started is None:
            return
        if vertex.completed is None:
            if not self._open:
                self.since = now
            self._open.add(report)
            return
        self._open.discard(report)
        if not vertex.relink:
            self._completed.add(vertex.digest)
        self._spans.append((vertex.started, vertex.completed))
        if not self._open:
            self.since = None

    def moved(self, transfer: Transfer) -> None:
        """Take in how far one of its transfers is."""
        self.items[transfer.item] = max(transfer.current, self.items.get(transfer.item, 0))

    def printed(self, line: str) -> None:
        """Take in one line of its output."""
        self.last_line = line or self.last_line
        self.tail.append(line)
        self.clipped = self.clipped or _CLIPPED.fullmatch(line) is not None

    def record(self) -> StepRecord:
        """What became of it, once the build has ended: what still ran then was cut off."""
        state = State.CANCELED if self.state is State.RUNNING else self.state
        return StepRecord(self.name.stage, self.name.position, self.name.instruction, self.name.kind, state,
                          self.seconds, self.bytes)


@dataclass(frozen=True, slots=True)
class Started:
    """A step began to run."""

    step: Step


@dataclass(frozen=True, slots=True)
class Printed:
    """A step printed a line."""

    step: Step
    line: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A step ended: ran, cached, failed or canceled."""

    step: Step


@dataclass(frozen=True, slots=True)
class Said:
    """buildx or the Dockerfile frontend said something."""

    line: str


Change = Started | Printed | Finished | Said


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What became of one step."""

    stage: str
    position: str
    instruction: str
    kind: Kind
    state: State
    seconds: float
    bytes: int

    @property
    def label(self) -> str:
        """Short name of the step: `torch 2/5`."""
        return Name(self.kind, self.stage, self.position, self.instruction).label

    def as_dict(self) -> dict[str, object]:
        """The step for `--json`."""
        return {"stage": self.stage, "position": self.position, "instruction": self.instruction,
                "kind": self.kind.value, "state": self.state.value, "seconds": round(self.seconds, 3),
                "bytes": self.bytes}


@dataclass(frozen=True, slots=True)
class StepError:
    """Why a build failed: the first error that is no consequence of another one."""

    message: str
    stage: str = ""
    label: str = ""
    instruction: str = ""
    exit_code: int | None = None
    cause: Cause = Cause.STEP
    log: tuple[str, ...] = ()
    clipped: bool = False
    where: str = ""
    excerpt: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """The error for `--json`."""
        return {"message": self.message, "stage": self.stage, "label": self.label, "instruction": self.instruction,
                "exit_code": self.exit_code, "cause": self.cause.value, "log": list(self.log), "clipped": self.clipped,
                "where": self.where, "excerpt": list(self.excerpt)}

    def problem(self, log_file: str = "") -> Problem:
        """The error in the three parts that every error has."""
        found = [self.message]
        if self.log:
            found += [f"    | {line}" for line in self.log]
        if self.clipped:
            found.append("    (the engine clipped this output; an own builder with BUILDKIT_STEP_LOG_MAX_SIZE=-1 and "
                         "BUILDKIT_STEP_LOG_MAX_SPEED=-1 keeps all of it)")
        what = "the build failed"
        if self.instruction:
            what = f"step [{self.label}] failed: {brief(self.instruction)}"
        todo = _TODO[self.cause]
        return Problem(what, self.where, "\n".join(found), "", f"{todo}; whole log: {log_file}" if log_file else todo)


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """What a build did; `seconds` by our clock, `plain_text` what buildx printed outside its JSON stream."""

    steps: tuple[StepRecord, ...]
    cached: int
    ran: int
    seconds: float
    error: StepError | None = None
    canceled: bool = False
    warnings: tuple[str, ...] = ()
    plain_text: str = ""

    def slowest(self, count: int = 5) -> tuple[StepRecord, ...]:
        """The steps that took longest, longest first; cached ones are not among them."""
        ran = (step for step in self.steps if step.state not in {State.CACHED, State.WAITING})
        return tuple(sorted(ran, key=lambda step: -step.seconds)[:count])

    def as_dict(self) -> dict[str, object]:
        """The record for `--json`."""
        return {"seconds": round(self.seconds, 3), "ran": self.ran, "cached": self.cached, "canceled": self.canceled,
                "error": self.error.as_dict() if self.error else None, "warnings": list(self.warnings),
                "slowest": [{"step": step.label, "seconds": round(step.seconds, 3)} for step in self.slowest()],
                "steps": [step.as_dict() for step in self.steps]}


class Build:
    """Events in, changes out; the state of the whole build in between."""

    def __init__(self) -> None:
        self.steps: dict[tuple[Kind, str, str, str], Step] = {}
        self._by_vertex: dict[str, Step] = {}
        self._partial: dict[tuple[str, int], bytes] = {}
        self._text: list[str] = []
        self._warnings: list[str] = []

    def apply(self, event: Event, now: float) -> list[Change]:
        """What the event changes; `now` is our clock in seconds."""
        return list(self._apply(event, now))

    def _apply(self, event: Event, now: float) -> Iterator[Change]:
        match event:
            case Vertex():
                yield from self._vertex(event, now)
            case Transfer():
                if (step := self._by_vertex.get(event.vertex)) is not None:
                    yield from self._transfer(step, event)
            case Log():
                yield from self._log(event)
            case Warned():
                if event.text not in self._warnings:
                    self._warnings.append(event.text)
                    yield Said(f"WARNING: {event.text}")
            case Text():
                self._text.append(event.line)
                yield Said(event.line)

    def _vertex(self, vertex: Vertex, now: float) -> Iterator[Change]:
        name = parse_name(vertex.name)
        step = self.steps.setdefault((name.kind, name.stage, name.position, name.instruction), Step(name))
        self._by_vertex[vertex.digest] = step
        before = step.state
        step.report(vertex, now)
        after = step.state
        if name.kind is Kind.INTERNAL and after is not State.FAILED:
            return
        if after is State.RUNNING and before is State.WAITING and name.kind is not Kind.BASE and not vertex.cached:
            yield Started(step)
        if after in {State.RUNNING, State.WAITING} or vertex.completed is None:
            return
        yield from self._rest_of_log(vertex.digest)
        if name.kind is Kind.BASE and after is State.CACHED:
            return
        # a step may run in parts (a base is looked up, pulled, unpacked): say it again only when it took longer
        if step.announced is None or step.seconds - step.announced >= 1:
            step.announced = step.seconds
            yield Finished(step)

    def _transfer(self, step: Step, transfer: Transfer) -> Iterator[Change]:
        moved, known = step.bytes, transfer.item in step.items
        step.moved(transfer)
        if step.name.kind is Kind.BASE and not moved and step.bytes:
            yield Started(step)
        # exports are silent for minutes otherwise; their digests say nothing to people
        if step.name.kind is Kind.EXPORT and not known and "sha256:" not in transfer.item:
            step.printed(transfer.item)
            yield Printed(step, transfer.item)

    def _log(self, log: Log) -> Iterator[Change]:
        step = self._by_vertex.get(log.vertex)
        if step is None:
            return
        *lines, rest = (self._partial.pop((log.vertex, log.stream), b"") + log.data).split(b"\n")
        while len(rest) > _LINE_LIMIT:
            lines.append(rest[:_LINE_LIMIT])
            rest = rest[_LINE_LIMIT:]
        if rest:
            self._partial[log.vertex, log.stream] = rest
        for line in lines:
            yield _print(step, line)

    def _rest_of_log(self, digest: str) -> Iterator[Change]:
        for key in [key for key in self._partial if key[0] == digest]:
            yield _print(self._by_vertex[digest], self._partial.pop(key))

    def close(self) -> list[Change]:
        """What is still to say when the stream has ended."""
        return [change for digest in {key[0] for key in self._partial} for change in self._rest_of_log(digest)]

    def running(self) -> list[Step]:
        """The steps that run now, in the order of their start."""
        return sorted((step for step in self.steps.values() if step.state is State.RUNNING),
                      key=lambda step: step.since or 0.0)

    def record(self, exit_code: int, seconds: float) -> BuildRecord:
        """What the build did, once it has ended."""
        steps = tuple(step.record() for step in self.steps.values()
                      if step.name.kind is not Kind.INTERNAL or step.state is State.FAILED)
        counted = [step.state for step in steps if step.kind in {Kind.BASE, Kind.INSTRUCTION}]
        error = self._error() if exit_code else None
        canceled = bool(exit_code) and error is None
        return BuildRecord(steps, counted.count(State.CACHED), counted.count(State.RAN), seconds, error, canceled,
                           tuple(self._warnings), "\n".join(self._text))

    def _error(self) -> StepError | None:
        said = "\n".join(self._text)
        failed = [step for step in self.steps.values() if step.state is State.FAILED]
        # a cache that cannot be read is an error too, but ends no build: buildx repeats the one that did
        failed.sort(key=lambda step: step.error not in said)
        step = failed[0] if failed else None
        where, excerpt = _excerpt(self._text)
        if step is None:
            message = next((line.removeprefix("ERROR: ") for line in reversed(self._text) if line.startswith("ERROR:")),
                           said.strip() or "buildx ended without saying why")
            message = message.removeprefix("failed to solve: ")
            if is_canceled(message):
                return None
            return StepError(message, cause=_cause(None, message, ()), where=where, excerpt=excerpt)
        process = _PROCESS.search(step.error)
        message = step.reason
        log = tuple(step.tail)
        return StepError(message, step.name.stage, step.name.label, step.name.instruction,
                         int(process["code"]) if process else None, _cause(step.name.kind, message, log), log,
                         step.clipped, where, excerpt)


def is_canceled(error: str) -> bool:
    """Whether a step's error only says that another one, or the user, ended the build."""
    return error.endswith(_CANCELED)


def short_reason(error: str) -> str:
    """A step's error without the command that it repeats."""
    process = _PROCESS.search(error)
    return process["reason"] if process else error


def clean(line: bytes) -> str:
    """A line of output as text: no escape sequences, and of a progress bar only its last state."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    return _ESCAPES.sub("", text.rpartition("\r")[2]).rstrip()


def brief(instruction: str, width: int = 100) -> str:
    """An instruction on one line, cut to the width; a RUN without its mounts, which would fill the line."""
    text = _RUN_OPTIONS.sub("RUN ", " ".join(instruction.split()))
    return text if len(text) <= width else f"{text[:width - 1]}…"


def _print(step: Step, line: bytes) -> Printed:
    text = clean(line)
    step.printed(text)
    return Printed(step, text)


def _excerpt(lines: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """The place (`Dockerfile:12`) and the Dockerfile lines that buildx prints with an error."""
    lines = list(lines)
    for number, line in enumerate(lines[:-1]):
        if _PLACE.fullmatch(line) and _RULE.fullmatch(lines[number + 1]):
            inside = lines[number + 2:]
            end = next((index for index, text in enumerate(inside) if _RULE.fullmatch(text)), len(inside))
            return line, tuple(inside[:end])
    return "", ()


#: the containerd store looks whether a name is there and then creates it; of two builds at once one is too late
_COLLISION = re.compile(r'image "[^"]+": already exists$')
_DISK = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_AUTH = re.compile(r"\b401\b|\b403\b|unauthorized|authorization failed|authentication required|access denied|"
                   r"requested access to the resource is denied", re.IGNORECASE)
_GONE = re.compile(r"\S@sha256:[0-9a-f]{64}: not found$")
_NETWORK = re.compile(r"dial tcp|no such host|i/o timeout|connection re(?:fused|set)|TLS handshake|unexpected EOF|"
                      r"temporary failure in name resolution|failed to establish a new connection|"
                      r"could not resolve host|(?:read|connect|connection|operation) timed out|"
                      r"too many requests|\b50[0234] (?:internal server error|bad gateway|service unavailable|"
                      r"gateway time-?out)", re.IGNORECASE)
_ENGINE = re.compile(r"cannot connect to the docker daemon|is the docker daemon running|code = Unavailable|"
                     r"error reading from server: EOF|failed to list workers|DeadlineExceeded: |no builder .* found",
                     re.IGNORECASE)

_TODO = {
    Cause.STEP: "read the end of the step's output above",
    Cause.DISK: "free disk on the engine's machine (docker system df, docker buildx prune), then build again",
    Cause.MEMORY: "the step was killed, most likely for memory: build with fewer parallel jobs or on a bigger machine",
    Cause.NETWORK: "check the network, proxy and mirror settings, then build again: finished steps are kept",
    Cause.AUTH: "log in to the registry that the message names (docker login), then build again",
    Cause.REFUSED: "repeating does not help: see what the registry says (limits of size and name, its own and those of "
                   "proxies in front of it)",
    Cause.BASE: "the registry no longer has this image: name another base in the stack and lock again; where it is a "
                "stage of ours, build once more",
    Cause.ENGINE: "see that the engine or builder runs (docker info, docker buildx ls), then build again",
    Cause.COLLISION: "another build gave the same name at the same moment: build again, finished steps are kept",
    Cause.DEFINITION: "repair the composed Dockerfile's source: the fragment or the stack",
}


#: what a failed push by the builder means: the registry client's own table of answers
_PUSHED = {fault.Kind.TRANSIENT: Cause.NETWORK, fault.Kind.LOGIN: Cause.AUTH, fault.Kind.DENIED: Cause.AUTH,
           fault.Kind.TOO_LARGE: Cause.REFUSED, fault.Kind.MISSING: Cause.REFUSED, fault.Kind.REFUSED: Cause.REFUSED}


def _cause(kind: Kind | None, message: str, log: tuple[str, ...]) -> Cause:
    text = "\n".join((message, *log[-10:]))
    if kind is Kind.EXPORT and message.startswith("failed to push "):
        found = _PUSHED.get(fault.of_engine(message).kind)
        if found is not None:
            return found
    if kind is Kind.EXPORT and _COLLISION.search(message):
        return Cause.COLLISION
    if kind is not Kind.INSTRUCTION and _GONE.search(message):
        return Cause.BASE
    if kind is Kind.INTERNAL and message == "context deadline exceeded":  # waiting for connection
        return Cause.ENGINE
    if _DISK.search(text):
        return Cause.DISK
    if message == "exit code: 137":
        return Cause.MEMORY
    if kind is not Kind.INSTRUCTION and _AUTH.search(message):
        return Cause.AUTH
    if kind is None and _ENGINE.search(message):
        return Cause.ENGINE
    if _NETWORK.search(text):
        return Cause.NETWORK
    return Cause.STEP if kind is Kind.INSTRUCTION and "exit code" in message else Cause.DEFINITION
