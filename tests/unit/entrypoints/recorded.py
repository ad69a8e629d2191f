"""Recordings of the real server: SGLang 0.5.23 on a CPU, EAGLE-3 with a pair of models of known accept length 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "fixtures" / "sglang-0.5.23-cpu"
VERSION = "0.5.23"


def log() -> list[str]:
    """The log of one start, one completion and one profile."""
    return (FOLDER / "eagle3.log").read_text(encoding="utf-8").splitlines()


def server_info() -> dict[str, Any]:
    """Its /server_info."""
    document: dict[str, Any] = json.loads((FOLDER / "server_info.json").read_text(encoding="utf-8"))
    return document


def trace_file() -> Path:
    """Its profiler trace, shortened: all annotations, the first operators."""
    return FOLDER / "decode-TP-0.trace.json.gz"
