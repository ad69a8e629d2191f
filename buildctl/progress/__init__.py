"""The progress of a build: BuildKit's rawjson stream in, a show for people and a record for programs out."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from buildctl.progress.model import Build, BuildRecord, Cause, Change, StepError, StepRecord
from buildctl.progress.rawjson import Decoder, Event
from buildctl.progress.render import Folded, Mode, Plain, Quiet, Renderer, Terminal, choose

__all__ = ["BuildRecord", "Cause", "Mode", "Progress", "StepError", "StepRecord"]


class Progress:
    """Follows one run of `docker buildx bake --progress=rawjson`.

    Feed it the bytes of buildx's stderr as they come, then tell it the exit status. Everything is also written as plain
    lines to the file `log`, as it comes. `auto` shows live lines on a terminal, folds on GitHub, plain lines elsewhere.
    Use as a context manager, so that the terminal is given back when something else goes wrong.
    """

    def __init__(self, *, log: Path | None = None, mode: Mode = "auto", stream: TextIO | None = None,
                 environ: Mapping[str, str] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._began = clock()
        self._decoder = Decoder()
        self._build = Build()
        self._lock = threading.RLock()  # the live lines are drawn by a thread of rich's
        self._file = None
        self._renderers: list[Renderer] = []
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._file = log.open("w", encoding="utf-8")
            self._renderers.append(Plain(self._file, width=None))
        match choose(mode, stream, os.environ if environ is None else environ):
            case "terminal":
                self._renderers.append(Terminal(stream, self._build, self._lock, clock))
            case "github":
                self._renderers.append(Folded(stream))
            case "plain":
                self._renderers.append(Plain(stream))
            case _:
                self._renderers.append(Quiet())

    def feed(self, data: bytes) -> None:
        """Take in bytes of buildx's stderr, cut anywhere."""
        self._take(self._decoder.feed(data))

    def finish(self, exit_code: int) -> BuildRecord:
        """Say what the build did, now that buildx has ended; errors are returned, not shown."""
        self._take(self._decoder.close())
        with self._lock:
            changes = self._build.close()
            record = self._build.record(exit_code, self._clock() - self._began)
        self._show(changes)
        self._close(record)
        return record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._close(None)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            with self._lock:
                changes = self._build.apply(event, self._clock())
            self._show(changes)

    def _show(self, changes: list[Change]) -> None:
        for change in changes:
            for renderer in self._renderers:
                renderer.show(change)

    def _close(self, record: BuildRecord | None) -> None:
        for renderer in self._renderers:
            renderer.close(record)
        self._renderers = []
        if self._file is not None:
            self._file.close()
