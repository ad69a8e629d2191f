"""A real registry per module, a fault proxy in front of it per test, the real engine, tiny images."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from click import Command
from click.testing import CliRunner

from buildctl.commands import push
from buildctl.engine import connect
from buildctl.errors import BuildctlError
from tests.registry.images import Images
from tests.registry.proxy import FaultProxy
from tests.registry.server import HOSTS, RegistryServer


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, both streams, the error."""

    code: int
    out: str
    err: str
    error: BuildctlError | None

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def text(self) -> str:
        """Everything a user would see."""
        return f"{self.out}\n{self.err}\n{self.error or ''}"


def run(command: Command, *args: str) -> Ran:
    """A command in this process; its exit code is that of its error."""
    done = CliRunner().invoke(command, args)
    error = done.exception
    if error is not None and not isinstance(error, BuildctlError | SystemExit):
        raise error
    failed = error if isinstance(error, BuildctlError) else None
    return Ran(failed.exit_code if failed else done.exit_code, done.stdout, done.stderr, failed)


def fast_push(*args: str) -> Ran:
    """`buildctl push` with four attempts and hardly any waiting."""
    return run(push.command, *args, "--attempts", "4", "--wait", "0.01")


def pushing(*words: str) -> subprocess.Popen[str]:
    """`buildctl push` in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "buildctl", "push", *words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.APIClient]:
    with closing(connect(60)) as client:
        yield client


@pytest.fixture
def images(engine: docker.APIClient) -> Iterator[Images]:
    made = Images(engine)
    before = made.names()
    yield made
    made.clean()
    assert made.names() <= before, "a push left names behind in the engine"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as running:
        yield running


@pytest.fixture
def proxy(server: RegistryServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.host) as running:
        yield running


@pytest.fixture(autouse=True)
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No login of this machine takes part. (First of all fixtures: ports of earlier tests may be others' by now.)"""
    HOSTS.clear()
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    for name in ("HOST", "USER", "PASSWORD"):
        monkeypatch.delenv(f"SGL_BUILDCTL_REGISTRY_{name}", raising=False)
    return folder
