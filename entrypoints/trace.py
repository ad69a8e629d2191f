"""A profiler trace of a few decode steps: which kernels ran, how many all-reduces a step needs.

Kernel counts outlive the texts of log lines. A trace slows the server down: it is taken in a pass of its own, never in
the measured window.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrypoints import contract, probe
from entrypoints.probe import NoAnswer

STEPS = 5
#: SGLang annotates each forward pass; one verify or decode is one step of the stream
_STEP = re.compile(r"^step\[(VERIFY|DECODE|TARGET_VERIFY)\b")
_PROFILER_STEP = re.compile(r"^ProfilerStep#")


@dataclass(frozen=True)
class Summary:
    """What ran. `kernels` counts GPU kernels by name, `families` by the contract's kernel entries.

    `steps` is the number of decode or verify steps in the trace, 0 when the trace does not tell.
    """

    steps: int
    kernels: Mapping[str, int]
    families: Mapping[str, int]
    graph_launches: int
    files: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether any GPU kernel was recorded; a CPU trace has none."""
        return bool(self.kernels)

    def per_step(self, family: str) -> float | None:
        """Kernels of a family for each step; None when the number of steps is unknown."""
        return self.families.get(family, 0) / self.steps if self.steps else None

    def as_dict(self, top: int = 40) -> dict[str, Any]:
        """For trace-summary.json: the most frequent kernels, all families."""
        return {"steps": self.steps, "graph_launches": self.graph_launches, "families": dict(self.families),
                "kernels": dict(Counter(self.kernels).most_common(top)), "files": list(self.files)}


def read(path: Path) -> list[Mapping[str, Any]]:
    """Events of a trace file, gzipped or not. Raises `ValueError` when it is none."""
    data = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = document["traceEvents"] if isinstance(document, dict) else document
        return [one for one in events if isinstance(one, dict)]
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no profiler trace: {error}") from error


def summarize(events: Sequence[Mapping[str, Any]], version: str = "", files: tuple[str, ...] = ()) -> Summary:
    """Count kernels, families, steps and graph launches; complete events (`ph` X) only."""
    kernels: Counter[str] = Counter()
    steps = profiler_steps = launches = 0
    for one in events:
        if one.get("ph") != "X":
            continue
        category, name = one.get("cat"), str(one.get("name", ""))
        if category == "kernel":
            kernels[name] += 1
        elif category == "user_annotation":
            steps += bool(_STEP.match(name))
            profiler_steps += bool(_PROFILER_STEP.match(name))
        elif category in {"cuda_runtime", "cuda_driver"} and "GraphLaunch" in name:
            launches += 1
    families = {}
    for entry in contract.select("kernel", version):
        if entry.pattern:
            families[entry.name] = sum(count for name, count in kernels.items() if entry.pattern.search(name))
    return Summary(steps=steps or profiler_steps, kernels=dict(kernels), families=families, graph_launches=launches,
                   files=files)


def take(port: int, folder: Path, *, version: str = "", gpu: bool, api_key: str = "", patience: float = 120.0,
         while_waiting: Callable[[], None] = lambda: None) -> Summary:
    """Profile some steps of one greedy completion on a live, idle server; rank 0's trace is read, all are kept.

    `folder` must be writable by the server. Raises `NoAnswer` when the server does not profile, and what
    `while_waiting` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = set(folder.glob("*.json*"))
    order = {"output_dir": str(folder), "num_steps": STEPS, "activities": ["CPU", "GPU"] if gpu else ["CPU"],
             "with_stack": False}
    answer = probe.ask(port, "/start_profile", order, silence=patience, api_key=api_key, while_waiting=while_waiting)
    if answer.status != 200:
        raise NoAnswer(f"/start_profile says {answer.status}")
    prompt = {"text": "The capital city of France is",
              "sampling_params": {"temperature": 0.0, "max_new_tokens": 16 * STEPS, "ignore_eos": True}}
    probe.ask(port, "/generate", prompt, silence=patience, api_key=api_key, while_waiting=while_waiting)
    end = time.monotonic() + patience
    trouble = "no trace file appeared"
    while time.monotonic() < end:
        while_waiting()
        files = sorted(set(folder.glob("*.json*")) - known)
        if files:
            try:
                return summarize(read(_first_rank(files)), version, tuple(one.name for one in files))
            except ValueError as error:  # still being written
                trouble = str(error)
        time.sleep(0.2)
    raise NoAnswer(trouble)


def _first_rank(files: list[Path]) -> Path:
    return next((one for one in files if re.search(r"TP-0\b", one.name)), files[0])
