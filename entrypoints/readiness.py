"""When a server really serves: live child, own listener, health, the right model and arguments, one real completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from entrypoints.supervise import Server


@dataclass(frozen=True)
class Expect:
    """What the server must say about itself: its model path, and `/server_info` keys with their values."""

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    api_key: str = ""


@dataclass(frozen=True)
class Ready:
    """A server that serves: seconds since its start, what was seen, and its `/server_info` whole."""

    seconds: float
    evidence: Mapping[str, Any]
    server_info: Mapping[str, Any]


def wait_ready(server: Server, expect: Expect, *, stall: float, deadline: float | None = None,
               on_progress: Callable[[str], None] = lambda _line: None) -> Ready:
    """Wait until the server serves; bounded by progress (`stall` seconds without any) and not by one wall clock.

    Raises `ServerDied`, or `NotReady` for a fatal log line, a stall, a deadline or wrong answers, each with a
    diagnosis. `on_progress` gets one short line for each step forward.
    """
    raise NotImplementedError
