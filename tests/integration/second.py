"""A second engine in a network namespace of its own: another machine, as far as the network can tell. Needs root.

What it has - network, mounts, processes - ends with it, also when the tests are killed. Its disk is a sparse file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from buildctl.engine import Engine

#: of RFC 2544: addresses for tests between machines, never routed
NETWORK = "198.18"


class SecondEngine:
    """An engine at `tcp://ADDRESS:2375` whose only neighbour is this machine, at `gateway`. A context manager."""

    def __init__(self, folder: Path, *, disk: str = "12G") -> None:
        """`disk`: how much it may hold, as `truncate` takes it."""
        self.folder, self._disk = folder, disk
        pid = os.getpid()
        subnet = f"{NETWORK}.{pid >> 6 & 255}"
        self.gateway, self.address = (f"{subnet}.{(pid & 63) * 4 + last}" for last in (1, 2))
        self.host = f"tcp://{self.address}:2375"
        self._link = f"second{pid}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """The same engine for processes of this machine."""
        return self.folder / "docker.sock"

    def __enter__(self) -> SecondEngine:
        self.folder.mkdir(parents=True)
        (self.folder / "daemon.json").write_text(json.dumps({
            "features": {"containerd-snapshotter": True}, "insecure-registries": [self.gateway + "/32"]}))
        folder = self.folder
        command: list[str | Path] = [
            "dockerd", "--config-file", folder / "daemon.json", "--data-root", folder / "data", "--exec-root",
            folder / "exec", "--pidfile", folder / "pid", "--tls=false", "--host", self.host, "--host",
            f"unix://{self.socket}"]
        image = folder / "disk"
        subprocess.run(["truncate", "--size", self._disk, image], check=True)
        subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", image], check=True)
        (folder / "data").mkdir()
        with (folder / "log").open("ab") as log:
            # it says when it has its namespaces, and waits for its network, which is made from outside
            script = 'mount -o loop,noatime "$1" "$2" && echo && read _; shift 2; exec "$@"'
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "unshare", "--net", "--mount", "sh", "-c", script, "sh", image,
                 folder / "data", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdout.readline()
            self._connect(self._process.pid)
            self._process.stdin.close()
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        subprocess.run(["ip", "link", "delete", self._link], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def docker(self, *words: str) -> str:
        """Ask it something."""
        return subprocess.run(["docker", "--host", self.host, *words], capture_output=True, text=True, check=True,
                              stdin=subprocess.DEVNULL).stdout

    def inside(self, *command: str | Path) -> list[str | Path]:
        """The command as one that runs beside this engine."""
        assert self._process is not None
        return ["nsenter", "--net", "--mount", "--target", str(self._process.pid), *command]

    def traffic(self) -> tuple[int, int]:
        """Bytes that it has received and sent over its network so far, headers included."""
        folder = Path("/sys/class/net") / self._link / "statistics"
        return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())

    def _connect(self, pid: int) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True)

        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("address", "add", f"{self.gateway}/30", "dev", self._link)
        ip("link", "set", self._link, "up")
        for words in (("link", "set", "lo", "up"), ("address", "add", f"{self.address}/30", "dev", "eth0"),
                      ("link", "set", "eth0", "up"), ("route", "add", "default", "via", self.gateway)):
            subprocess.run(["nsenter", "--net", "--target", str(pid), "ip", *words], check=True, capture_output=True)

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "--host", self.host, "version"], capture_output=True, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the second engine does not start: {(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.1)


class Bridge:
    """The BuildKit inside an engine, offered as a `buildkitd` would offer itself: for buildx's driver `remote`."""

    def __init__(self, engine: SecondEngine) -> None:
        self._engine = engine.address, 2375
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._engine) as server:
            server.sendall(b"POST /grpc HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += server.recv(1)
            self._open |= {client, server}
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()
            self._open -= {client, server}


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def remote_builder(name: str, address: str, folder: Path) -> Iterator[dict[str, str]]:
    """A buildx builder that lies elsewhere; the environment in which buildx knows it."""
    env = {"BUILDX_CONFIG": str(folder)}
    subprocess.run([Engine().program(), "buildx", "create", "--name", name, "--driver", "remote", address],
                   env={**os.environ, **env}, check=True, capture_output=True)
    yield env


@contextlib.contextmanager
def ssh_server(engine: SecondEngine, folder: Path) -> Iterator[Path]:
    """An ssh server beside a second engine, for one key; yields a folder for PATH with an `ssh` that has it."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(parents=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd.conf").write_text(
        f"ListenAddress {engine.address}:2222\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        f"SetEnv DOCKER_HOST=unix://{engine.socket}\n")
    (folder / "known").write_text(f"[{engine.address}]:2222 {(folder / 'host.pub').read_text()}")
    wrapper = bin_folder / "ssh"
    wrapper.write_text(f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -i {folder}/user -o BatchMode=yes "
                       f'-o UserKnownHostsFile={folder}/known "$@"\n')
    wrapper.chmod(0o755)
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert server, "sshd is not installed: make tools"
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(engine.inside(server, "-D", "-e", "-f", folder / "sshd.conf"), stderr=log,
                                   stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while "listening on" not in (folder / "log").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd does not start: {(folder / 'log').read_text()}")
            time.sleep(0.02)
        yield bin_folder
    finally:
        process.terminate()
        process.wait()
