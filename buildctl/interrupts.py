"""An interrupt between making a process and knowing it would leave that process behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within: Ctrl-C and TERM wait, and act at the end. Only in the main thread, which is where they arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    # handlers, not a mask: a process that is started within would inherit the mask
    before = {one: signal.signal(one, lambda number, _frame: waiting.append(number)) for one in _STOPPING}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
    if waiting:
        signal.raise_signal(waiting[0])
