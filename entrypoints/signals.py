"""Signals to the runner become an exception, so that every `with` and `finally` does its work."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from entrypoints.errors import Terminated

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: one Ctrl-C reaches us twice, from the terminal and from tini -g: what follows so soon is the same one
_SAME = 2.0


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Within: TERM, INT and HUP raise `Terminated`. A second one after two seconds raises again: stop at once."""
    last = [-_SAME]

    def handle(number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - last[0] < _SAME:
            return
        last[0] = now
        raise Terminated(number)

    before = {one: signal.signal(one, handle) for one in STOPPING}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
