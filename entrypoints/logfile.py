"""A server's log while it grows: new lines, the tail, and the first error in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

TAIL_LINES = 25
#: one line is cut here: SGLang prints its whole configuration in one
LINE_LIMIT = 2000
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Timeout|Fault)\b.*")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class LogFile:
    """Reads a file that another process appends to. Never raises for a file that is not there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> Sequence[str]:
        """Complete lines since the last call; progress bars (`\\r`) count as lines."""
        try:
            if self.path.stat().st_size <= self._offset:
                return ()
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return ()
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        fresh = [clean(line.decode("utf-8", "replace")) for line in whole if line.strip()]
        self.lines += fresh
        return fresh

    def everything(self) -> list[str]:
        """All lines so far, the unfinished last one included."""
        self.new_lines()
        rest = clean(self._rest.decode("utf-8", "replace"))
        return [*self.lines, rest] if rest.strip() else list(self.lines)


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
