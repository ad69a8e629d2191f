"""Which engine the docker client talks to, and the way there."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from buildctl import dial
from buildctl.engine import Engine
from buildctl.errors import EngineError
from tests.unit.test_engine import write


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "far"}))
    return tmp_path


@pytest.mark.parametrize(("variables", "context"), [
    ({}, "far"), ({"DOCKER_CONTEXT": "near"}, "near"), ({"DOCKER_CONTEXT": "default"}, ""),
    ({"DOCKER_HOST": "tcp://h:1", "DOCKER_CONTEXT": "near"}, "")])
def test_the_context_is_the_clients(variables: dict[str, str], context: str, config: Path) -> None:
    assert dial.context({"DOCKER_CONFIG": str(config), **variables}) == context


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_without_a_readable_configuration_it_is_the_default(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / ".docker").mkdir()
        (tmp_path / ".docker" / "config.json").write_text(text)
    assert dial.context({"HOME": str(tmp_path)}) == ""
    assert dial.address(None, {"HOME": str(tmp_path)}) == dial.DEFAULT
    assert dial.address(None, {"HOME": str(tmp_path), "DOCKER_HOST": "ssh://a"}) == "ssh://a"


def test_a_contexts_address_is_asked_of_the_client(tmp_path: Path) -> None:
    write(tmp_path, '[ "$1 $2 $5" = "context inspect far" ] && echo ssh://b || echo "no such context" >&2')
    program = str(tmp_path / "docker")
    assert dial.address(program, {"DOCKER_CONTEXT": "far", "PATH": "/usr/bin:/bin"}) == "ssh://b"
    assert dial.address(program, {"DOCKER_CONTEXT": "gone", "PATH": "/usr/bin:/bin"}) == "no such context"


def test_connections_are_carried_by_the_client_and_end_with_it(tmp_path: Path) -> None:
    write(tmp_path, '[ "$*" = "system dial-stdio" ] && exec cat')
    dialer = dial.Dialer(str(tmp_path / "docker"))
    path = Path(dialer.address.removeprefix("unix://"))
    assert path.parent.stat().st_mode & 0o077 == 0, "nobody else reaches the engine through it"
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for connection in (first, second):
            connection.connect(str(path))
            connection.sendall(b"there and back")
            assert connection.recv(100) == b"there and back"
        dialer.close()
        assert first.recv(1) == b""
    assert not path.exists()
    dialer.close()
    assert dialer.complaint == ""


def test_an_engine_that_ssh_cannot_reach_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, '[ "$1" = buildx ] && exit 0; echo "ssh: Connection refused" >&2; exit 255')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_HOST", "ssh://far")
    with pytest.raises(EngineError, match="ssh: Connection refused") as error:
        Engine().facts()
    assert error.value.problems[0].where == "ssh://far"
    assert Engine().insecure("registry.example") is False, "without an engine only this machine's registries"
    assert Engine().insecure("localhost:5000") is True
