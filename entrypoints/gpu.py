"""What NVML says, when there is a GPU. Everything here answers "nothing" on a machine without one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrypoints import processes

#: memory that may stay in use after a server without counting as held: contexts of the driver itself, bytes
TOLERANCE = 200 * 2**20
#: a container without the host's process table is often told nothing
UNKNOWN = "a process that NVML does not name here"
#: nvml.h: NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION
_NOT_SUPPORTED, _NO_PERMISSION = 3, 4


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


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU by NVML's index: its handle, or None and NVML's word on why there is none (lost, without power)."""

    index: int
    handle: Any
    error: str = ""
    #: a card of the machine that this container may not use: not ours, and counted by NVML all the same
    refused: bool = False


def every(library: Any) -> list[Card]:
    """All cards that NVML counts, whether they answer or not."""
    found = []
    with contextlib.suppress(Exception):
        for index in range(library.nvmlDeviceGetCount()):
            try:
                found.append(Card(index, library.nvmlDeviceGetHandleByIndex(index)))
            except Exception as error:
                found.append(Card(index, None, reason(error), getattr(error, "value", None) == _NO_PERMISSION))
    return found


def cards(library: Any, environ: Mapping[str, str] = os.environ) -> list[Card]:
    """The GPUs that CUDA programs here may use, lost ones among them: NVML itself ignores CUDA_VISIBLE_DEVICES.

    Numbers are taken in NVML's order, which is CUDA's for cards of one kind. What we cannot read (MIG) means all.
    """
    ours = [card for card in every(library) if not card.refused]
    words = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    numbers = {int(word) for word in words if word.isdigit()}
    names = tuple(word for word in words if word.startswith("GPU-"))
    if not words or len(numbers) + len(names) != len(set(words)):
        return ours
    known = {card.index: _uuid(library, card) for card in ours} if names else {}
    # a lost card does not tell its name: it may be one that nobody else has
    unclaimed = not all(any(uuid.startswith(name) for uuid in known.values()) for name in names)
    return [card for place, card in enumerate(ours) if place in numbers
            or (names and (known[card.index].startswith(names) or (unclaimed and not known[card.index])))]


def _uuid(library: Any, card: Card) -> str:
    """ "" when the card does not say."""
    with contextlib.suppress(Exception):
        if not card.error:
            found = library.nvmlDeviceGetUUID(card.handle)
            return found.decode() if isinstance(found, bytes) else str(found)
    return ""


def reason(error: Exception) -> str:
    """NVML's own words («GPU is lost»), or the kind of the error."""
    return str(error) or type(error).__name__


def memory(library: Any, handle: Any) -> tuple[int, int]:
    """Bytes (in all, in use) of one GPU; (0, 0) where it has none of its own: a DGX Spark shares the machine's.

    Raises NVML's error for a card that does not answer: that is no zero.
    """
    try:
        found = library.nvmlDeviceGetMemoryInfo(handle)
    except Exception as error:
        if getattr(error, "value", None) == _NOT_SUPPORTED:
            return 0, 0
        raise
    return int(found.total), int(found.used)


def used_memory() -> Sequence[int | None]:
    """Bytes in use on each GPU that we may use, None for one that does not answer; empty without one. Never raises."""
    with nvml() as library:
        return tuple(_used(library, card) for card in cards(library)) if library is not None else ()


def _used(library: Any, card: Card) -> int | None:
    with contextlib.suppress(Exception):
        return None if card.error else memory(library, card.handle)[1]
    return None


def holders() -> Sequence[str]:
    """Who uses each GPU that we may use: «name (pid N), ...», or `UNKNOWN`. NVML may name pids of the host."""
    with nvml() as library:
        if library is None:
            return ()
        return tuple(_names(library, card.handle) or UNKNOWN for card in cards(library))


def _names(library: Any, handle: Any) -> str:
    pids: list[int] = []
    with contextlib.suppress(Exception):
        pids = sorted(int(one.pid) for one in library.nvmlDeviceGetComputeRunningProcesses(handle))
    seen = [(pid, processes.read(pid)) for pid in pids]
    return ", ".join(f"{one.name} (pid {pid})" if one else f"pid {pid} outside this container" for pid, one in seen)
