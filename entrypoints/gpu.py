"""What NVML says, when there is a GPU. Everything here answers "nothing" on a machine without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

#: memory that may stay in use after a server without counting as held: contexts of the driver itself, bytes
TOLERANCE = 200 * 2**20


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """The initialised pynvml module, or None without library, driver or GPU."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
        pynvml.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def used_memory() -> Sequence[int]:
    """Bytes in use on each GPU; empty without one."""
    with nvml() as library:
        if library is None:
            return ()
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        return tuple(int(library.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
