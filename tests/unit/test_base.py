"""The bootstrapped base: made once, and a clear error where it cannot be made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buildctl import base
from buildctl.errors import BuildError, EngineError
from buildctl.lock import LockedBase

LOCKED = LockedBase("bootstrap", suite="bookworm", include=("ca-certificates",))


def program(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / "mmdebstrap"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def path_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_made_once_then_taken_from_the_cache(tmp_path: Path, path_with: Path) -> None:
    program(path_with, 'echo run >> "$(dirname "$0")/runs"; for w; do case $w in *.tar) echo base > "$w";; esac; done')
    said: list[str] = []
    first = base.ensure(LOCKED, "linux/amd64", tmp_path, said.append)
    assert first.read_text() == "base\n"
    assert base.ensure(LOCKED, "linux/amd64", tmp_path, said.append) == first
    assert (path_with / "runs").read_text() == "run\n"
    assert said == ["base: making bookworm with mmdebstrap"]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_another_specification_is_another_file(tmp_path: Path) -> None:
    other = LockedBase("bootstrap", suite="bookworm")
    assert base.path_of(LOCKED, "linux/amd64", tmp_path) != base.path_of(other, "linux/amd64", tmp_path)
    assert base.path_of(LOCKED, "linux/amd64", tmp_path) != base.path_of(LOCKED, "linux/arm64", tmp_path)


@pytest.mark.parametrize("script", ["echo E: no mirror >&2; exit 25", "exit 0"])
def test_a_failure_shows_its_last_lines_and_leaves_nothing(tmp_path: Path, path_with: Path, script: str) -> None:
    program(path_with, script)
    with pytest.raises(BuildError, match="mmdebstrap failed"):
        base.ensure(LOCKED, "linux/amd64", tmp_path, lambda _: None)
    assert list((tmp_path / "base").iterdir()) == []


def test_missing_keys_of_debian_are_named(tmp_path: Path, path_with: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path_with, "exit 25")
    for present in (True, False):
        monkeypatch.setattr(base, "_KEYS", tmp_path if not present else Path(__file__))
        with pytest.raises(BuildError) as error:
            base.ensure(LOCKED, "linux/amd64", tmp_path, lambda _: None)
        assert ("debian-archive-keyring" in str(error.value)) is not present


def test_no_mmdebstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="--base registry") as error:
        base.ensure(LOCKED, "linux/amd64", tmp_path, lambda _: None)
    assert error.value.exit_code == 9


def test_the_mirror_of_this_machine(tmp_path: Path) -> None:
    assert base.mirrors(tmp_path) == []
    (tmp_path / "sources.list").write_text("# deb http://no.example/debian x main\n"
                                           "deb [arch=amd64] http://one.example/debian bookworm main\n")
    assert base.mirrors(tmp_path) == ["http://one.example/debian"]
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "a.sources").write_text("Types: deb\nURIs: https://two.example/debian/\n")
    (tmp_path / "sources.list.d" / "b.sources").write_text("URIs: https://other.example/tools\n")
    assert base.mirrors(tmp_path) == ["https://two.example/debian/"]
