"""What a server would resolve its arguments to, asked of the installed SGLang before any server is started.

On a GPU machine a start takes minutes. When the arms would differ in more than speculation, this says so in seconds.
The comparison of the live servers' own answers stays: this one only comes earlier.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoints import plan

TIMEOUT = 240.0
#: SGLang 0.5.23 resolves in `resolve_once`, 0.5.9 while the arguments are made
_SCRIPT = """
import dataclasses, json, sys
from sglang.srt.server_args import prepare_server_args
for words in json.loads(sys.argv[1]):
    found = prepare_server_args(words)
    if hasattr(found, "resolve_once"):
        found.resolve_once()
    table = found.resolved_dict() if hasattr(found, "resolved_dict") else dataclasses.asdict(found)
    print("RESOLVED", json.dumps(table, default=str))
"""


def arguments(python: Path, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The resolved arguments of each command line, or [] when they cannot be had without a server."""
    words = [list(argv[3:]) for argv in commands]  # without python -m sglang.launch_server
    try:
        done = subprocess.run([str(python), "-c", _SCRIPT, json.dumps(words)], capture_output=True, text=True,
                              timeout=TIMEOUT, env=dict(environment), check=False)
        tables = [json.loads(line[9:]) for line in done.stdout.splitlines() if line.startswith("RESOLVED ")]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return [plan.resolved(table) for table in tables] if len(tables) == len(words) else []


def refuse_unequal(python: Path, arms: Sequence[plan.Arm], environment: Mapping[str, str]) -> bool:
    """Raise `Invalid` when the arms would differ in more than they may; whether that could be judged."""
    tables = arguments(python, [arm.command(30000) for arm in arms], environment)
    for arm, table in zip(arms[1:], tables[1:], strict=False):
        wrong = plan.check_resolved(arms[0], arm, tables[0], table)["forbidden"]
        if wrong:
            raise plan.refuse(arms[0], arm, wrong)
    return bool(tables)
