"""What the lines of `cycles.py` say about leaks. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

#: cycles in which the runner's own memory may still grow: modules and buffers of the first use
SETTLING = 3
#: growth of the runner's own memory that is none, KiB: the kernel counts in batches
NOISE_KB = 2048


def complaints(cycles: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every trace of a cycle that is left after it; the first cycle sets what is there anyway."""
    found = []
    for one in cycles:
        if "error" in one:
            found.append(f"cycle {one['cycle']}: {one['error']}")
            continue
        first = cycles[0]
        if not one["clean"]:
            found.append(f"cycle {one['cycle']}: the stop was not clean")
        found += [f"cycle {one['cycle']}: {kind} left: {', '.join(map(str, one[kind]))}"
                  for kind in ("processes", "shm", "ports") if one[kind]]
        if fresh := sorted(set(one["temporary"]) - set(first["temporary"])):
            found.append(f"cycle {one['cycle']}: temporary files left: {', '.join(fresh)}")
        if one["fds"] > first["fds"]:
            found.append(f"cycle {one['cycle']}: {one['fds']} open descriptors, {first['fds']} after the first")
    memory = [one["rss_kb"] for one in cycles if "error" not in one][SETTLING:]
    if len(memory) >= 10:
        third = len(memory) // 3
        grown = statistics.median(memory[-third:]) - statistics.median(memory[:third])
        if grown > NOISE_KB:
            found.append(f"the runner's own memory grew by {grown:.0f} KiB")
    return found
