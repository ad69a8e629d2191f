"""A server's log while it grows: new lines, the tail, and the first error in it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

TAIL_LINES = 25
#: one line is cut here: SGLang prints its whole configuration in one
LINE_LIMIT = 2000
#: bytes of an unfinished line that are held back when secrets are to be hidden
HELD = 65536
#: lines kept from each end of a log that is passed through
KEPT_LINES = 2000
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Timeout|Fault)\b.*")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class LogFile:
    """Reads a file that another process appends to. Never raises for a file that is not there yet.

    SGLang writes its whole configuration there, keys included: `secrets` are blanked, in the file too, as it is read.
    """

    def __init__(self, path: Path, secrets: Iterable[str] = ()) -> None:
        self.path = path
        self._secrets = tuple(one.encode() for one in secrets)
        self.lines: list[str] = []
        self.dropped = 0
        self._offset = 0
        self._rest = b""

    def writer(self) -> IO[bytes]:
        """Where the other process writes to; the caller closes its end after the start."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.open("wb")

    def new_lines(self) -> Sequence[str]:
        """Complete lines since the last call; progress bars (`\\r`) count as lines."""
        start = self._offset - len(self._rest)
        data = self._rest + self._read()
        if (shown := self._blank(data)) != data:
            self._rewrite(start, shown)
        *whole, self._rest = shown.replace(b"\r", b"\n").split(b"\n")
        fresh = [clean(line.decode("utf-8", "replace")) for line in whole if line.strip()]
        self.lines += fresh
        return fresh

    def since(self, count: int) -> Sequence[str]:
        """Lines after the first `count` that were ever read."""
        return self.lines[max(0, count - self.dropped):]

    @property
    def total(self) -> int:
        """How many lines were ever read."""
        return self.dropped + len(self.lines)

    def everything(self) -> list[str]:
        """All lines so far, the unfinished last one included."""
        self.new_lines()
        rest = clean(self._rest.decode("utf-8", "replace"))
        return [*self.lines, rest] if rest.strip() else list(self.lines)

    def close(self) -> None:
        """Nothing more will come."""
        self.new_lines()

    def _blank(self, data: bytes) -> bytes:
        """The same length, so that nothing moves."""
        for one in self._secrets:
            data = data.replace(one, b"*" * len(one))
        return data

    def _rewrite(self, start: int, data: bytes) -> None:
        """In place; whoever writes goes on behind it."""
        with contextlib.suppress(OSError), self.path.open("r+b") as file:
            file.seek(start)
            file.write(data)

    def _read(self) -> bytes:
        try:
            if self.path.stat().st_size <= self._offset:
                return b""
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return b""
        self._offset += len(data)
        return data


class PassThrough(LogFile):
    """Copies the log to our stdout as it comes; keeps its beginning and its end, as a server may run for weeks."""

    def __init__(self, secrets: Iterable[str] = (), target: int = 1) -> None:
        super().__init__(Path("stdout"), secrets)
        self._target = target
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def writer(self) -> IO[bytes]:
        """The writing end of a pipe that a thread of ours empties."""
        reading, writing = os.pipe()
        self._thread = threading.Thread(target=self._copy, args=(reading,), name="log", daemon=True)
        self._thread.start()
        return os.fdopen(writing, "wb")

    def new_lines(self) -> Sequence[str]:
        """Complete lines since the last call; the middle of a long log is dropped."""
        fresh = super().new_lines()
        if len(self.lines) > 2 * KEPT_LINES:
            excess = len(self.lines) - 2 * KEPT_LINES + KEPT_LINES // 2
            del self.lines[KEPT_LINES:KEPT_LINES + excess]
            self.dropped += excess
        return fresh

    def close(self) -> None:
        """Wait for the last lines."""
        if self._thread:
            self._thread.join(1.0)

    def _copy(self, reading: int) -> None:
        rest = b""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while data := pipe.read(65536):
                if self._secrets:  # whole lines only: a secret may come in two pieces
                    data = rest + data
                    cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
                    cut = cut or (len(data) if len(data) > HELD else 0)
                    data, rest = self._blank(data[:cut]), data[cut:]
                self._forward(data)
        self._forward(self._blank(rest))

    def _forward(self, data: bytes) -> None:
        self._queue.put(data)
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._target, view):]
            except OSError:  # whoever read our stdout is gone; the server must not block on it
                break

    def _rewrite(self, start: int, data: bytes) -> None:
        """Nothing: what reaches us was blanked before."""

    def _read(self) -> bytes:
        parts = []
        while not self._queue.empty():
            parts.append(self._queue.get())
        return b"".join(parts)


def clean(line: str) -> str:
    """Without colours, trailing blanks and excess length."""
    return _ANSI.sub("", line).rstrip()[:LINE_LIMIT]


def tail(lines: Sequence[str], count: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines."""
    return tuple(lines[-count:])


def first_exception(lines: Iterable[str]) -> str:
    """Last line of the first traceback: of chained exceptions that is the one which started it. "" when none."""
    inside = False
    for line in lines:
        if "Traceback (most recent call last)" in line:
            inside = True
        elif inside and line and not line[0].isspace():
            text = re.sub(r"^\[[^\]]*\]\s*", "", line)
            if _EXCEPTION.match(text):
                return text
    return ""
