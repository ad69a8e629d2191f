"""A server process tree: start it, watch it, say why it died, stop all of it, prove that it is gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Launch:
    """One server start: full command line (its --port included), full environment, where it runs, where it logs."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    port: int


@dataclass(frozen=True)
class StopReport:
    """How a server went. `clean` when nothing is left: `survivors` are (pid, name), `busy_ports` still listen."""

    seconds: float
    signals: tuple[str, ...]
    exit_code: int | None
    survivors: tuple[tuple[int, str], ...] = ()
    busy_ports: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether no process and no listener is left."""
        return not self.survivors and not self.busy_ports


class Server:
    """A supervised server. Use as a context manager: leaving stops the whole tree."""

    pid: int
    base_url: str

    def __init__(self, launch: Launch, *, grace: float = 30.0) -> None:
        self.launch = launch
        self.grace = grace

    def start(self) -> None:
        """Start in a session of its own. Raises `Busy` when the port is taken, `BadConfig` when argv cannot run."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `ServerDied` with a diagnosis when any process that the server needs is gone; cheap."""
        raise NotImplementedError

    def stop(self) -> StopReport:
        """TERM, grace, KILL of own descendants only; idempotent; never raises for a dead server."""
        raise NotImplementedError

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, and neither on the ones that SGLang derives from it."""
    raise NotImplementedError
