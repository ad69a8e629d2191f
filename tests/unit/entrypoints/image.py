"""An image.json for tests."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

DOCUMENT: dict[str, Any] = {
    "schema": 1, "image": "sglang", "version": "0.5.23", "stack": "cpu-demo", "key": "ab" * 32,
    "lock_sha256": "cd" * 32, "targets": ["cpu"], "cuda": None, "python": sys.executable,
    "packages": {"pytest": "0"}, "patches": [], "trees": {},
    "profile": {
        "sglang": "0.5.23", "environment": {"SGLANG_USE_CPU_ENGINE": "1"},
        "server": {"device": "cpu", "mem-fraction-static": 0.2, "enable-metrics": True, "skip-server-warmup": False},
        "arms": {"baseline": {}, "eagle3": {"speculative-algorithm": "EAGLE3", "speculative-num-steps": 3}}}}


def document(**changes: Any) -> dict[str, Any]:
    """The content of image.json with some keys replaced."""
    return {**copy.deepcopy(DOCUMENT), **changes}


def write(folder: Path, **changes: Any) -> Path:
    """An image.json in a folder."""
    path = folder / "image.json"
    path.write_text(json.dumps(document(**changes)), encoding="utf-8")
    return path
