"""Which engine `docker` talks to, and a way to it for the SDK, which knows neither contexts nor ssh."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

#: where an engine listens unless somebody says otherwise
DEFAULT = "unix:///var/run/docker.sock"


def context(environment: Mapping[str, str] | None = None) -> str:
    """The docker context in force, as the docker client chooses it; empty for the default one."""
    env = os.environ if environment is None else environment
    if env.get("DOCKER_HOST"):
        return ""
    name = env.get("DOCKER_CONTEXT", "")
    if not name:
        folder = Path(env["DOCKER_CONFIG"]) if env.get("DOCKER_CONFIG") else Path(env.get("HOME", "/")) / ".docker"
        with contextlib.suppress(OSError, ValueError, AttributeError):
            name = str(json.loads((folder / "config.json").read_text()).get("currentContext", ""))
    return "" if name == "default" else name


def address(program: str | None, environment: Mapping[str, str] | None = None) -> str:
    """The engine's address: DOCKER_HOST, else that of the context in force.

    :param program: the docker client, to ask for a context's address. What it says of a context that it does not know
        is returned as it is.
    """
    env = os.environ if environment is None else environment
    if name := context(env):
        done = subprocess.run([program or "docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}",
                               name], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=env)
        return (done.stdout or done.stderr).strip()
    return env.get("DOCKER_HOST") or DEFAULT


class Dialer:
    """A socket of our own whose connections the docker client carries to its engine (`docker system dial-stdio`): it
    knows contexts, ssh and TLS. Only this user can reach it. `close` ends the connections.
    """

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="buildctl-")
        self._program, self._errors = program, Path(self._folder.name) / "errors"
        self._carriers: list[subprocess.Popen[bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(self._folder.name) / "engine.sock"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, args=(self._listener,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where the SDK connects."""
        return f"unix://{self._folder.name}/engine.sock"

    @property
    def complaint(self) -> str:
        """The last thing that the docker client said on stderr; empty when it was silent."""
        with contextlib.suppress(OSError):
            return (self._errors.read_text(errors="replace").strip().splitlines() or [""])[-1]
        return ""

    def close(self) -> None:
        """End everything; may be called again."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()  # it may be making the last carrier
        for carrier in self._carriers:
            carrier.terminate()
            carrier.wait()
        self._folder.cleanup()

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                self._carriers = [one for one in self._carriers if one.poll() is None]
                with connection, self._errors.open("ab") as errors:
                    self._carriers.append(subprocess.Popen(
                        [self._program, "system", "dial-stdio"], stdin=connection.fileno(),
                        stdout=connection.fileno(), stderr=errors,
                        # an interrupt is ours to handle
                        start_new_session=True))
