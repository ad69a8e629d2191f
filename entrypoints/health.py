"""The container's HEALTHCHECK: asks the server in `serve`, reads the runner's heartbeat in `benchmark`.

A health request makes SGLang generate a token. In a benchmark that would disturb what is measured, so there the
runner writes a heartbeat and nobody asks the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoints import probe
from entrypoints.errors import CannotWrite, Problem
from entrypoints.probe import Address, NoAnswer

#: a heartbeat older than this is a runner that hangs, seconds
STALE = 60.0
_last: dict[str, float] = {}


def state_file() -> Path:
    """Where the runner of this container says what it does. Raises `CannotWrite` when no folder is writable."""
    try:
        return Path(tempfile.gettempdir()) / f"entrypoint-{os.getuid()}.json"
    except FileNotFoundError as error:
        raise CannotWrite(Problem(what="no writable temporary folder", found=str(error), expected="/tmp",  # noqa: S108
                                  todo="a read-only container needs --tmpfs /tmp")) from error


def beat(phase: str, mode: str = "benchmark", **more: Any) -> None:
    """Write the heartbeat; at most once a second for the same phase, so it may be called in any loop."""
    now = time.monotonic()
    if now - _last.get(phase, -1.0) < 1.0:
        return
    _last.clear()
    _last[phase] = now
    path = state_file()
    fresh = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk shows where results are written, with a message
        fresh.write_text(json.dumps({"mode": mode, "pid": os.getpid(), "time": time.time(), "phase": phase, **more}),
                         encoding="utf-8")
        fresh.replace(path)


def forget() -> None:
    """The runner ends: no heartbeat is better than an old one."""
    with contextlib.suppress(OSError):
        state_file().unlink(missing_ok=True)


def check() -> tuple[bool, str]:
    """(healthy, one line why). A server that still starts is not healthy: whoever waits for it wants answers."""
    try:
        state: Mapping[str, Any] = json.loads(state_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False, "no runner here: this container was not started with serve or benchmark"
    age = time.time() - float(state["time"])
    if state["mode"] == "serve" and state["phase"] == "serving":
        address = Address(int(state["port"]), state.get("host", ""), state.get("tls", False))
        try:
            answer = probe.ask(address, "/health")
        except NoAnswer as trouble:
            return False, f"/health on {address}: {trouble}"
        return answer.status == 200, f"/health on {address} says {answer.status}"
    if age > STALE:
        return False, f"no heartbeat for {age:.0f} s, last phase: {state['phase']}"
    if state["mode"] == "serve" and state["phase"] == "starting":
        return False, "serve: starting, not ready yet"
    if state["mode"] == "serve" and state["phase"] == "deaf":
        return False, "serve: its port is no longer open"
    return True, f"{state['mode']}: {state['phase']}"
