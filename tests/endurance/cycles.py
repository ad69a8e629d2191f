"""Start and stop a server again and again, inside its container, and say after each cycle what is there.

Run by the entrypoint's own Python: `python cycles.py COUNT MODEL [DRAFT]`. One JSON line for each cycle: the arm,
seconds until ready, how it stopped, and counts that must not grow. It uses the classes that `benchmark` uses.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from entrypoints import image, processes
from entrypoints.command import server_argv, server_environment
from entrypoints.errors import EntrypointError
from entrypoints.readiness import Expect, wait_ready
from entrypoints.supervise import Launch, Server, free_port


def files(folder: Path) -> list[str]:
    """Everything below a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def left(temporary: Path) -> dict[str, Any]:
    """What is there now: other processes, our descriptors, shared memory, temporary files, listeners, our memory."""
    own = {os.getpid(), *ancestors()}
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return {"processes": sorted(one.name for pid, one in processes.everyone().items() if pid not in own),
            "fds": len(list(Path("/proc/self/fd").iterdir())), "shm": files(processes.SHM),
            "temporary": files(temporary), "ports": sorted(processes.listeners()),
            "rss_kb": next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))}


def ancestors() -> set[int]:
    """Pids from our parent up to PID 1."""
    found, pid = set(), os.getppid()
    while pid and (one := processes.read(pid)):
        found.add(pid)
        pid = one.parent
    return found


def cycle(number: int, model: str, draft: str, temporary: Path) -> dict[str, Any]:
    """One life of one server; both arms in turn when there is a draft."""
    built = image.load()
    name = "eagle3" if draft and number % 2 else "baseline"
    port = free_port()
    argv = server_argv(built, built.profile.arms[name], model=model, draft=draft, host="127.0.0.1", port=port)
    log = temporary / "server.log"
    log.unlink(missing_ok=True)
    launch = Launch(argv=argv, env=server_environment(built, os.environ), cwd=temporary, log=log, port=port)
    with Server(launch) as server:
        ready = wait_ready(server, Expect(model), stall=120)
        living = [one.name for one in server.look()]
    report = server.stop()
    return {"cycle": number, "arm": name, "ready_s": round(ready.seconds, 1), "processes_alive": len(living),
            "stop_s": round(report.seconds, 2), "signals": list(report.signals), "exit_code": report.exit_code,
            "clean": report.clean, **left(temporary)}


def main(count: int, model: str, draft: str = "") -> int:
    """Print one line for each cycle; 0 when all came up."""
    temporary = Path(tempfile.gettempdir())
    for number in range(count):
        try:
            print(json.dumps(cycle(number, model, draft, temporary)), flush=True)
        except EntrypointError as error:
            print(json.dumps({"cycle": number, "error": str(error)}), flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
