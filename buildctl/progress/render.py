"""Show a build: live on a terminal, as plain lines in CI and in the log file, folded on GitHub, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

from buildctl.progress.model import (
    Build,
    BuildRecord,
    Change,
    Finished,
    Kind,
    Printed,
    Said,
    Started,
    State,
    Step,
    brief,
)
from buildctl.units import duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType

Mode = Literal["auto", "terminal", "plain", "github", "quiet"]

#: lines of one step that a fold keeps; the log file has all
_FOLD_LINES = 2000
#: BuildKit's own work shows up only when it takes this long
_INTERNAL_SECONDS = 1.0
_REFRESH_PER_SECOND = 5


class Renderer(Protocol):
    """Something that shows a build."""

    def show(self, change: Change) -> None:
        """Show one change."""

    def close(self, record: BuildRecord | None) -> None:
        """End the show; no record when the build was left by an exception."""


class Quiet:
    """Shows nothing."""

    def show(self, change: Change) -> None:
        """Show nothing."""

    def close(self, record: BuildRecord | None) -> None:
        """Say nothing."""


class Plain:
    """One line per start, end and line of output, each with its step.

    Without a width, as in the log file, nothing is cut, and the text of a failing buildx is there too; people get that
    from the error that follows.
    """

    def __init__(self, stream: TextIO, width: int | None = 120) -> None:
        self._stream = stream
        self._width = width
        self._failed = False

    def show(self, change: Change) -> None:
        """Print one change."""
        match change:
            case Started(step):
                self._print(f"[{step.name.label}] {self._instruction(step)}")
            case Printed(step, line):
                self._print(f"[{step.name.label}] | {line}")
            case Finished(step):
                self._failed = self._failed or step.state is State.FAILED
                self._print(self._ending(step))
            case Said(line):
                self._failed = self._failed or line.startswith("ERROR:")
                if self._width is None or not self._failed:
                    self._print(line)

    def close(self, record: BuildRecord | None) -> None:
        """Print what the build did."""
        if record is not None and not record.error and not record.canceled:
            self._print(summary(record))

    def _ending(self, step: Step) -> str:
        if step.state is State.CACHED:
            return f"[{step.name.label}] cached: {self._instruction(step)}"
        ending = {State.RAN: "done", State.CANCELED: "canceled", State.FAILED: "failed"}[step.state]
        return f"[{step.name.label}] {ending} in {duration(step.seconds)}{_size(step)}{_reason(step)}"

    def _instruction(self, step: Step) -> str:
        return step.name.instruction if self._width is None else brief(step.name.instruction, self._width)

    def _print(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()


class Folded(Plain):
    """Plain lines for GitHub: the output of a finished step in a fold, that of a failed one in the open."""

    def __init__(self, stream: TextIO, width: int | None = 120) -> None:
        super().__init__(stream, width)
        self._held: dict[int, tuple[Step, list[str]]] = {}

    def show(self, change: Change) -> None:
        """Hold a step's output back until it has ended, since folds cannot be interleaved."""
        match change:
            case Printed(step, line):
                # the prefix also keeps a build from giving commands (::set-env::) to the runner
                self._held.setdefault(id(step), (step, []))[1].append(f"[{step.name.label}] | {line}")
            case Finished(step):
                self._failed = self._failed or step.state is State.FAILED
                self._unfold(step, fold=step.state is State.RAN)
            case Started() | Said():
                super().show(change)

    def close(self, record: BuildRecord | None) -> None:
        """Print what was held back, then what the build did."""
        for step, _ in list(self._held.values()):
            self._unfold(step, fold=False)
        super().close(record)

    def _unfold(self, step: Step, *, fold: bool) -> None:
        _, lines = self._held.pop(id(step), (step, []))
        ending = self._ending(step) if step.state is not State.RUNNING else ""
        if fold and lines:
            self._print(f"::group::{ending}: {self._instruction(step)}")
        if len(lines) > _FOLD_LINES:
            self._print(f"[{step.name.label}] | ({len(lines) - _FOLD_LINES} lines left out; the log file has them)")
        for line in lines[-_FOLD_LINES:]:
            self._print(line)
        if fold and lines:
            self._print("::endgroup::")
        elif ending:
            self._print(ending)


class Terminal:
    """A few live lines: how far the build is, and each running step with its time and last line of output."""

    def __init__(self, stream: TextIO, build: Build, lock: threading.RLock,
                 clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._build, self._lock, self._clock = build, lock, clock
        self._began = clock()
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, get_renderable=self._lines, refresh_per_second=_REFRESH_PER_SECOND,
                          transient=True)
        self._live.start()

    def show(self, change: Change) -> None:
        """Print a finished step above the live lines; these refresh by themselves."""
        from rich.text import Text

        match change:
            case Finished(step) if step.state is State.RAN:
                self._console.print(Text.assemble(("✓ ", "green"), (step.name.label, "bold"), " ",
                                                  brief(step.name.instruction, max(20, self._console.width - 40)),
                                                  (f"  {duration(step.seconds)}{_size(step)}", "dim")))
            case Finished(step) if step.state is State.FAILED:
                self._console.print(Text.assemble(("✗ ", "red"), (step.name.label, "bold"), _reason(step)))
            case Said(line) if line.startswith("WARN"):
                self._console.print(Text(line, "yellow"))

    def close(self, record: BuildRecord | None) -> None:
        """Take the live lines away and say what the build did."""
        from rich.text import Text

        self._live.stop()
        if record is not None and not record.error and not record.canceled:
            self._console.print(Text(summary(record)))

    def _lines(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        with self._lock:
            now = self._clock()
            steps = [step for step in self._build.steps.values() if step.name.kind in {Kind.BASE, Kind.INSTRUCTION}]
            states = [step.state for step in steps]
            done = states.count(State.RAN) + states.count(State.CACHED)
            lines = [Text.assemble(("building ", "bold"), f"{done}/{len(steps)} steps, ",
                                   f"{states.count(State.CACHED)} cached, {duration(now - self._began)}")]
            for step in self._build.running():
                if step.name.kind is Kind.INTERNAL and step.elapsed(now) < _INTERNAL_SECONDS:
                    continue
                doing = step.last_line or step.name.instruction
                line = Text.assemble("  ", (step.name.label, "bold"), " ", (duration(step.elapsed(now)), "dim"),
                                     f"{_size(step)}  ", brief(doing, 400))
                lines.append(line)
        for line in lines:
            line.truncate(self._console.width, overflow="ellipsis")
        return Group(*lines[:max(2, self._console.height - 1)])


def choose(mode: Mode, stream: TextIO, environ: Mapping[str, str]) -> Mode:
    """What `auto` means for this stream and environment."""
    if mode != "auto":
        return mode
    if environ.get("GITHUB_ACTIONS") == "true":
        return "github"
    dumb = environ.get("TERM") == "dumb"
    return "terminal" if stream.isatty() and not environ.get("CI") and not dumb else "plain"


def summary(record: BuildRecord) -> str:
    """One or two lines on what a successful build did."""
    text = f"built in {duration(record.seconds)}: {record.ran} steps ran, {record.cached} cached"
    slow = [f"{step.label} {duration(step.seconds)}" for step in record.slowest() if step.seconds >= 0.5]
    return f"{text}\nslowest: {', '.join(slow)}" if slow else text


def _size(step: Step) -> str:
    return f", {size(step.bytes)}" if step.bytes else ""


def _reason(step: Step) -> str:
    return f": {step.reason}" if step.reason else ""
