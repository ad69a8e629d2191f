"""How many compilers a server may run at once: FlashInfer and others compile kernels at its first start.

`MAX_JOBS` times `NVCC_THREADS` times 3 to 5 GB is what that takes (users report «cicc died due to signal 9» and frozen
machines). The same formula is in the build, images/tools/bin/jit/ahead.py.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

from entrypoints import host

#: what one thread of nvcc may take, in bytes (LMCache PR 4733, flash-attention PR 2079: 3 to 5 GB)
PER_JOB = 4 << 30
JOBS = "MAX_JOBS"
#: FlashInfer has a variable of its own
THREADS = ("NVCC_THREADS", "FLASHINFER_NVCC_THREADS")


def jobs(cpus: int, memory: int, threads: int = 1) -> int:
    """How many compilers of that many threads run at once without running out of CPUs or memory (bytes)."""
    return max(1, min(cpus // threads, memory // (PER_JOB * threads)))


def processors(root: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this container may use: those it may run on, or its quota (cgroup v2 or v1) if that is less."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        if (root / "cpu.max").is_file():
            quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = ((root / "cpu" / name).read_text(encoding="ascii")
                             for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if quota != "max" and int(quota) > 0:
            return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    return allowed


def variables(environ: Mapping[str, str], cpus: int | None = None, memory: int | None = None) -> dict[str, str]:
    """What a server's environment needs beyond the caller's; what the caller has set is left alone.

    The memory that counts is the container's limit, not what is free at the moment: all arms get the same.
    """
    threads = _threads(environ)
    fitting = jobs(cpus or processors(), host.memory_limit() if memory is None else memory, threads)
    wanted = {JOBS: str(fitting), THREADS[0]: str(threads)}
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def too_many(environ: Mapping[str, str], memory: int) -> str:
    """What is wrong with explicit values, in words; empty when they fit into the memory (bytes) or there are none."""
    given, threads = _number(environ.get(JOBS, "")) or 1, _threads(environ)
    if given * threads * PER_JOB <= max(memory, PER_JOB):
        return ""
    return (f"{JOBS}={given}, {threads} thread{'s' * (threads > 1)} each: about {given * threads * PER_JOB >> 30} GiB "
            f"while kernels compile, with {memory >> 30} GiB of memory")


def _threads(environ: Mapping[str, str]) -> int:
    return max((_number(environ.get(name, "")) or 1 for name in THREADS), default=1)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None
