"""What NVML says, when there is a GPU. Everything here answers "nothing" on a machine without one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from entrypoints import processes

#: memory that may stay in use after a server without counting as held: contexts of the driver itself, bytes
TOLERANCE = 200 * 2**20
#: a container without the host's process table is often told nothing
UNKNOWN = "a process that NVML does not name here"


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


def handles(library: Any, environ: Mapping[str, str] = os.environ) -> list[tuple[int, Any]]:
    """(NVML index, handle) of the GPUs that CUDA programs here may use: NVML itself ignores CUDA_VISIBLE_DEVICES.

    Numbers are taken in NVML's order, which is CUDA's for cards of one kind. What we cannot read (MIG) means all.
    """
    every = [(index, library.nvmlDeviceGetHandleByIndex(index)) for index in range(library.nvmlDeviceGetCount())]
    words = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    numbers = {int(word) for word in words if word.isdigit()}
    names = tuple(word for word in words if word.startswith("GPU-"))
    if not words or len(numbers) + len(names) != len(set(words)):
        return every

    def named(handle: Any) -> bool:
        found = library.nvmlDeviceGetUUID(handle)
        return (found.decode() if isinstance(found, bytes) else str(found)).startswith(names)

    return [(index, handle) for index, handle in every if index in numbers or (names and named(handle))]


def memory(library: Any, handle: Any) -> tuple[int, int]:
    """Bytes (in all, in use) of one GPU; (0, 0) where it has none of its own: a DGX Spark shares the machine's."""
    try:
        found = library.nvmlDeviceGetMemoryInfo(handle)
    except Exception:
        return 0, 0
    return int(found.total), int(found.used)


def used_memory() -> Sequence[int]:
    """Bytes in use on each GPU that we may use; empty without one."""
    with nvml() as library:
        return tuple(memory(library, handle)[1] for _, handle in handles(library)) if library is not None else ()


def holders() -> Sequence[str]:
    """Who uses each GPU that we may use: «name (pid N), ...», or `UNKNOWN`. NVML may name pids of the host."""
    with nvml() as library:
        if library is None:
            return ()
        return tuple(_names(library, handle) or UNKNOWN for _, handle in handles(library))


def _names(library: Any, handle: Any) -> str:
    pids: list[int] = []
    with contextlib.suppress(Exception):
        pids = sorted(int(one.pid) for one in library.nvmlDeviceGetComputeRunningProcesses(handle))
    seen = [(pid, processes.read(pid)) for pid in pids]
    return ", ".join(f"{one.name} (pid {pid})" if one else f"pid {pid} outside this container" for pid, one in seen)
