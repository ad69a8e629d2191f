"""The bootstrapped base: made once, and a clear error where it cannot be made."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import base
from buildctl.errors import BuildError, EngineError, ManifestError
from buildctl.lock import Lock, LockedBase
from tests.unit.projects import ready

BASE = LockedBase("bootstrap", suite="bookworm", include=("ca-certificates",))


@pytest.fixture
def lock(tmp_path: Path) -> Lock:
    _, _, found = ready(tmp_path / "project")
    return replace(found, base=BASE)


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


def test_made_once_then_taken_from_the_cache(lock: Lock, tmp_path: Path, path_with: Path) -> None:
    program(path_with, 'echo run >> "$(dirname "$0")/runs"; for w; do case $w in *.tar) echo base > "$w";; esac; done')
    said: list[str] = []
    first = base.ensure(lock, tmp_path, said.append)
    assert first.read_text() == "base\n"
    assert base.ensure(lock, tmp_path, said.append) == first
    assert (path_with / "runs").read_text() == "run\n"
    assert said == ["base: making bookworm with mmdebstrap"]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_another_specification_is_another_file(lock: Lock, tmp_path: Path) -> None:
    others = (replace(lock, base=LockedBase("bootstrap", suite="bookworm")), replace(lock, platform="linux/arm64"),
              replace(lock, base=replace(BASE, snapshot="20261201T000000Z")),
              replace(lock, debian={"base": {"apt": "2.6.2 sha256:00"}}))
    assert len({base.path_of(one, tmp_path) for one in (lock, *others)}) == 5
    # what layers install is no part of the base
    assert base.path_of(replace(lock, debian={**lock.debian, "cuda": {}}), tmp_path) == base.path_of(lock, tmp_path)


def test_the_locked_versions_are_asked_for(lock: Lock, tmp_path: Path, path_with: Path) -> None:
    program(path_with, 'for w; do case $w in *.tar) echo base > "$w";; --setup-hook=*) set -- $w; cat "$2"; esac; done '
                       '> "$(dirname "$0")/pins"')
    base.ensure(lock, tmp_path, lambda _: None)
    assert "Package: libc6\nPin: version 2.36-9\n" in (path_with / "pins").read_text()


@pytest.mark.parametrize("script", ["echo E: no mirror >&2; exit 25", "exit 0"])
def test_a_failure_shows_its_last_lines_and_leaves_nothing(lock: Lock, tmp_path: Path, path_with: Path,
                                                           script: str) -> None:
    program(path_with, script)
    with pytest.raises(BuildError, match="mmdebstrap failed"):
        base.ensure(lock, tmp_path, lambda _: None)
    assert list((tmp_path / "base").iterdir()) == []


def test_missing_keys_of_debian_are_named(lock: Lock, tmp_path: Path, path_with: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    program(path_with, "exit 25")
    for present in (True, False):
        monkeypatch.setattr(base, "_KEYS", tmp_path if not present else Path(__file__))
        with pytest.raises(BuildError) as error:
            base.ensure(lock, tmp_path, lambda _: None)
        assert ("debian-archive-keyring" in str(error.value)) is not present


def test_no_mmdebstrap(lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="--base registry") as error:
        base.ensure(lock, tmp_path, lambda _: None)
    assert error.value.exit_code == 9


def test_the_mirror_of_this_machine(tmp_path: Path) -> None:
    assert base.sources(BASE, {}, tmp_path) == []
    (tmp_path / "sources.list").write_text("# deb http://no.example/debian x main\n"
                                           "deb http://me:secret@two.example/debian bookworm main\n"
                                           "deb [arch=amd64] http://one.example/debian bookworm main\n")
    assert base.sources(BASE, {}, tmp_path) == ["deb http://one.example/debian bookworm main"]
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "a.sources").write_text("Types: deb\nURIs: https://two.example/debian/\n\n"
                                                           "Types: deb\nURIs: https://two.example/debian-security\n")
    (tmp_path / "sources.list.d" / "b.sources").write_text("URIs: https://other.example/tools\n")
    assert base.sources(BASE, {}, tmp_path) == ["deb https://two.example/debian/ bookworm main",
                                                "deb https://two.example/debian-security bookworm-security main"]
    assert base.sources(replace(BASE, suite="sid"), {}, tmp_path) == ["deb https://two.example/debian/ sid main"]


def test_a_snapshot_comes_from_where_the_host_says(tmp_path: Path) -> None:
    pinned = replace(BASE, snapshot="20261201T000000Z")
    assert base.sources(pinned, {}, tmp_path)[0] == \
        f"deb [check-valid-until=no] {base.SNAPSHOTS}/debian/20261201T000000Z bookworm main"
    ours = base.sources(pinned, {base.SNAPSHOT_VARIABLE: "http://snap.example/archive/"}, tmp_path)
    assert ours[1] == ("deb [check-valid-until=no] http://snap.example/archive/debian-security/20261201T000000Z "
                       "bookworm-security main")
    for wrong in ("ftp://x", "http://me:secret@x", "http://x y"):
        with pytest.raises(ManifestError, match=base.SNAPSHOT_VARIABLE) as caught:
            base.sources(pinned, {base.SNAPSHOT_VARIABLE: wrong}, tmp_path)
        assert "secret" not in str(caught.value)
