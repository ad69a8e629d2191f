"""Fetching: what is asked for, what is kept, and what a build without network refuses. No network."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import base, compose, fetch
from buildctl.errors import ManifestError
from buildctl.host import Host
from buildctl.lock import LockedBase
from tests.unit.projects import ready, wheel

GOOD = hashlib.sha256(b"good").hexdigest()


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "house"
    folder.mkdir()
    return folder


def test_apt_lists_are_those_of_the_layers_and_the_tools(tmp_path: Path) -> None:
    _, stack, _ = ready(tmp_path)
    assert fetch.apt_lists(stack) == {"cuda": ("python3",), "tools": ("tini",)}
    more = replace(stack, apt={"torch": ("gdb",), "cuda": ("python3", "git")})
    assert fetch.apt_lists(more) == {"cuda": ("python3", "git"), "torch": ("gdb",), "tools": ("tini",)}


def test_a_build_without_network_names_what_it_would_miss(tmp_path: Path, house: Path) -> None:
    _, stack, lock = ready(tmp_path / "p")
    host = Host(None, None, None, (house,), offline=True)
    with pytest.raises(ManifestError) as caught:
        fetch.prepare_offline(stack, lock, host, tmp_path / "cache")
    said = str(caught.value)
    for words in (lock.wheels[0].file, "buildctl fetch", "--offline --wheelhouse"):
        assert words in said


def test_a_complete_wheelhouse_lends_its_base(tmp_path: Path, house: Path) -> None:
    _, stack, lock = ready(tmp_path / "p")
    lock = replace(lock, base=LockedBase("bootstrap", suite="bookworm"))
    for one in fetch.every_wheel(lock):
        (house / one.file).write_bytes(b"good")
    for layer in fetch.apt_lists(stack):
        (house / "apt" / layer).mkdir(parents=True)
        (house / "apt" / layer / "x_1_amd64.deb").write_bytes(b"deb")
    tar = base.path_of(lock.base, lock.platform, tmp_path / "cache")
    host = Host(None, None, None, (house,), offline=True)
    with pytest.raises(ManifestError, match=f"no base/{tar.name}"):
        fetch.prepare_offline(stack, lock, host, tmp_path / "cache")
    (house / "base").mkdir()
    (house / "base" / tar.name).write_bytes(b"tar")
    fetch.prepare_offline(stack, lock, host, tmp_path / "cache")
    assert tar.read_bytes() == b"tar"


def test_an_offline_build_gets_packages_and_no_network_and_the_same_keys(tmp_path: Path, house: Path) -> None:
    project, stack, lock = ready(tmp_path / "p")
    (house / "apt" / "cuda").mkdir(parents=True)
    (house / "apt" / "cuda" / "x_1_amd64.deb").write_bytes(b"deb")
    online = compose.compose(project, stack, lock, Host(None, None, None, (house,)))
    offline = compose.compose(project, stack, lock, Host(None, None, None, (house,), offline=True))
    assert "layers/cuda/system/local/x_1_amd64.deb" in offline.files
    assert "layers/cuda/system/local/x_1_amd64.deb" not in online.files
    assert [image.key.value for image in offline.images] == [image.key.value for image in online.images]
    targets = json.loads(offline.written()["docker-bake.json"].content())["target"]
    assert {target["network"] for target in targets.values()} == {"none"}
    assert "network" not in online.written()["docker-bake.json"].content().decode()


def test_damaged_wheels_are_fetched_again_and_good_ones_kept(house: Path) -> None:
    good, bad, gone = (replace(wheel(name, "1.0", "cuda"), sha256=GOOD) for name in ("good", "bad", "gone"))
    (house / good.file).write_bytes(b"good")
    (house / bad.file).write_bytes(b"half")
    assert [one.name for one in fetch._missing([good, bad, gone], house)] == ["bad", "gone"]
    assert not (house / bad.file).exists()


def test_a_base_from_a_registry_is_left_to_docker(tmp_path: Path, house: Path) -> None:
    _, stack, lock = ready(tmp_path / "p")
    lock = replace(lock, base=LockedBase("registry", image="debian:x", digest="sha256:" + "0" * 64))
    with pytest.raises(ManifestError, match="docker pull"):
        fetch.fetch(stack, lock, Host(None, None, None, ()), None, house, tmp_path, print)  # type: ignore[arg-type]
