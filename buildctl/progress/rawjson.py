"""Decode the stderr of `docker buildx --progress=rawjson`: BuildKit's status objects mixed with plain text.

Seen on buildx 0.13: every object is printed over many lines; newer versions print one object per line; errors of buildx
itself and the Dockerfile excerpt follow as plain text. Objects are therefore found by their braces, not by newlines.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Vertex:
    """One report about one build step. Times are seconds of the engine's clock, None when not (yet) known."""

    digest: str
    name: str
    started: float | None = None
    completed: float | None = None
    cached: bool = False
    error: str = ""
    relink: bool = False  # puts what COPY --link made, perhaps long ago, upon the present base


@dataclass(frozen=True, slots=True)
class Transfer:
    """How many bytes of one thing (a layer, a context) a step has moved."""

    vertex: str
    item: str
    current: int


@dataclass(frozen=True, slots=True)
class Log:
    """A piece of a step's output; it may begin and end anywhere, inside a character too."""

    vertex: str
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning of the Dockerfile frontend."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A line that buildx printed outside the JSON stream."""

    line: str


Event = Vertex | Transfer | Log | Warned | Text

_STATUS_KEYS = frozenset({"vertexes", "statuses", "logs", "warnings"})
_MARKS = re.compile(r'[{}"\\\n]')
_NOT_AN_OBJECT = -1


class Decoder:
    """Bytes in, events out; where the bytes are cut does not matter."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer = ""
        self._start = 0  # first character not handed out; always the start of a line
        self._after_object = False
        self._restart(0)

    def feed(self, data: bytes) -> list[Event]:
        """Events that are complete with these bytes."""
        return self._decode(self._utf8.decode(data), final=False)

    def close(self) -> list[Event]:
        """Events of what is left when the stream has ended; a half object is handed out as text."""
        return self._decode(self._utf8.decode(b"", final=True), final=True)

    def _decode(self, text: str, *, final: bool) -> list[Event]:
        self._buffer += text
        events = list(self._events(final))
        self._buffer = self._buffer[self._start:]
        self._scanned -= self._start
        self._start = 0
        return events

    def _events(self, final: bool) -> Iterator[Event]:
        while self._start < len(self._buffer):
            if self._buffer[self._start] == "{":
                end = self._scan()
                if end is None and not final:
                    return
                status = _status(self._buffer[self._start:end]) if end and end != _NOT_AN_OBJECT else None
                if status is not None:
                    self._restart(end or 0)
                    self._after_object = True
                    yield from _events_of(status)
                    continue
            end_of_line = self._buffer.find("\n", self._start)
            if end_of_line < 0:
                if not final:
                    return
                end_of_line = len(self._buffer)
            line = self._buffer[self._start:end_of_line].rstrip("\r")
            self._restart(min(end_of_line + 1, len(self._buffer)))
            # the newline that ends an object is not an empty line of text
            if line or not self._after_object:
                yield Text(line)
            self._after_object = False

    def _restart(self, position: int) -> None:
        self._start = self._scanned = position
        self._depth = 0
        self._in_string = False

    def _scan(self) -> int | None:
        """End of the object that begins at the start; None: more is needed. Work already done is not repeated."""
        buffer = self._buffer
        position = self._scanned
        while True:
            mark = _MARKS.search(buffer, position)
            if mark is None:
                self._scanned = len(buffer)
                return None
            at, sign = mark.start(), mark.group()
            position = at + 1
            if sign in '\\\n' and position == len(buffer):
                # the next character decides
                self._scanned = at
                return None
            if self._in_string:
                if sign == "\n":
                    return _NOT_AN_OBJECT
                if sign == "\\":
                    position += 1
                elif sign == '"':
                    self._in_string = False
            elif sign == '"':
                self._in_string = True
            elif sign == "{":
                self._depth += 1
            elif sign == "}":
                self._depth -= 1
                if self._depth == 0:
                    return position
            elif buffer[position] not in " \t}":
                # inner lines of a printed object are indented: this was a text that began with a brace
                return _NOT_AN_OBJECT


def _status(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and (not value or value.keys() & _STATUS_KEYS) else None


def _events_of(status: dict[str, Any]) -> Iterator[Event]:
    for item in _items(status, "vertexes"):
        group = item.get("progressGroup")
        name = str(item.get("name", ""))
        # COPY --link is two vertexes, the second named "LINK COPY ..."; their group has the instruction's name
        whole = str(group.get("name") or name) if isinstance(group, dict) else name
        yield Vertex(str(item.get("digest", "")), whole, _seconds(item.get("started")),
                     _seconds(item.get("completed")), item.get("cached") is True, str(item.get("error", "")),
                     whole != name)
    for item in _items(status, "statuses"):
        current = item.get("current")
        yield Transfer(str(item.get("vertex", "")), str(item.get("id", "")), current if isinstance(current, int) else 0)
    for item in _items(status, "logs"):
        stream = item.get("stream")
        yield Log(str(item.get("vertex", "")), stream if isinstance(stream, int) else 1, _base64(item.get("data")))
    for item in _items(status, "warnings"):
        yield Warned(_base64(item.get("short")).decode("utf-8", "replace"))


def _items(status: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = status.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _seconds(value: object) -> float | None:
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(value).timestamp()
    except ValueError:
        return None


def _base64(value: object) -> bytes:
    try:
        return base64.b64decode(value) if isinstance(value, str) else b""
    except binascii.Error:
        return b""
