"""The machine: what it is, and how it does while a block runs."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import psutil


def describe() -> dict[str, Any]:
    """What the machine is, without its name."""
    return {"hostname_hash": hashlib.sha256(platform.node().encode()).hexdigest()[:16], "cpu": _cpu_model(),
            "cores_usable": len(os.sched_getaffinity(0)), "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "shm_gb": _shm_gb(), "kernel": platform.release(), "numa_nodes": _numa_nodes(),
            "load_1m": round(os.getloadavg()[0], 2)}


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")),
                platform.machine())


def _shm_gb() -> float | None:
    try:
        stat = os.statvfs("/dev/shm")  # noqa: S108
    except OSError:
        return None
    return round(stat.f_blocks * stat.f_frsize / 1e9, 2)


def _numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
