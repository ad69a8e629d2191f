"""Debian's docker-registry as a process of the tests' own."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import time
from pathlib import Path

BINARY = "docker-registry"

#: all hosts that this process's registries and proxies have had
HOSTS: set[str] = set()

CONFIG = """\
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http: {{addr: "{host}", net: tcp}}
"""


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


class RegistryServer:
    """A registry on this machine, its storage under `folder`; a context manager that can be stopped and restarted."""

    def __init__(self, folder: Path, *, disk: str = "", address: str = "127.0.0.1", login: str = "") -> None:
        """`disk`: size of a file system of its own for the storage, as tmpfs takes it (`300k`). Several registries may
        share a folder: the same content at several `address`es. `login`: a line of htpasswd; without it nobody has to
        log in.
        """
        self.folder, self.disk, self.login = folder, disk, login
        self.host = f"{address}:{free_port(address)}"
        HOSTS.add(self.host)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RegistryServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def blobs(self) -> Path:
        """Where the registry keeps its blobs."""
        return self.folder / "data/docker/registry/v2/blobs/sha256"

    def start(self) -> None:
        """Start the process and return when it answers."""
        if not shutil.which(BINARY):
            raise RuntimeError(f"{BINARY} is not installed; on Debian: apt-get install docker-registry")
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / f"config-{self.host}.yml"
        text = CONFIG.format(root=self.folder / "data", host=self.host)
        if self.login:
            passwords = self.folder / "htpasswd"
            passwords.write_text(f"{self.login}\n")
            text += f"auth: {{htpasswd: {{realm: tests, path: {passwords}}}}}\n"
        config.write_text(text)
        command = [BINARY, "serve", str(config)]
        if self.disk:
            (self.folder / "data").mkdir(exist_ok=True)
            script = 'mount -t tmpfs -o "size=$1" none "$2" && shift 2 && exec "$@"'
            command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", self.disk,
                       str(self.folder / "data"), *command]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"docker-registry does not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the process; the storage stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        host, port = self.host.rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port), timeout=2)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status == (401 if self.login else 200)
        except OSError:
            return False
        finally:
            connection.close()
