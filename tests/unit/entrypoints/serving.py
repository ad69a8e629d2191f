"""Helpers: launches of the fault server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from entrypoints.supervise import Launch, Server, free_port

FAULT_SERVER = Path(__file__).parents[2] / "fakes" / "fault_server.py"
MODEL = "/models/target"


def launch(folder: Path, **script: Any) -> Launch:
    """One start of the fault server with a script."""
    port = free_port()
    return Launch(argv=(sys.executable, str(FAULT_SERVER), "--port", str(port), "--model-path", MODEL),
                  env={"PATH": os.environ["PATH"], "FAULT_SCRIPT": json.dumps(script), "TMPDIR": str(folder)},
                  cwd=folder, log=folder / "server.log", port=port)


def server(folder: Path, *, grace: float = 5.0, version: str = "0.5.23", **script: Any) -> Server:
    """A supervised fault server, not started."""
    return Server(launch(folder, **script), grace=grace, version=version)
