"""Signals to the runner become an exception, so that every `with` and `finally` does its work."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from entrypoints.errors import Terminated

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: one Ctrl-C reaches us twice, from the terminal and from tini -g: what follows so soon is the same one
_SAME = 2.0
#: seconds until a signal is given again that came while a destructor ran, where Python drops what is raised
_AGAIN = 0.05


class _Gate:
    """What the handler knows: when a signal came last, whether it must wait, and which one waits."""

    def __init__(self) -> None:
        self.last = -_SAME
        self.held = 0
        self.waiting: int | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self.last < _SAME:
            return
        self.last = now
        if self.held:
            self.waiting = number
        else:
            raise Terminated(number)


_gate = _Gate()


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Within: TERM, INT and HUP raise `Terminated`. A second one after two seconds raises again: stop at once."""
    _gate.last, _gate.waiting = -_SAME, None
    before = {one: signal.signal(one, _gate.handle) for one in STOPPING}
    report = sys.unraisablehook

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if not isinstance(what.exc_value, Terminated):
            report(what)
            return
        _gate.last = -_SAME
        threading.Timer(_AGAIN, os.kill, (os.getpid(), what.exc_value.signum)).start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = report
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within: a signal waits, and raises at the end. For the few steps between making a thing and knowing it."""
    _gate.held += 1
    try:
        yield
    finally:
        _gate.held -= 1
    if not _gate.held and _gate.waiting is not None:
        number, _gate.waiting = _gate.waiting, None
        raise Terminated(number)
