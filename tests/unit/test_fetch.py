"""Fetching: what is asked for, what is kept, and what a build without network refuses. The index is on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import base, compose, fetch, layout
from buildctl.errors import ManifestError, NetworkError
from buildctl.host import Host
from buildctl.lock import LockedBase, apt_of
from tests.unit.index import Index
from tests.unit.projects import ready, wheel

GOOD = hashlib.sha256(b"good").hexdigest()


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "house"
    folder.mkdir()
    return folder


def test_apt_lists_are_those_of_the_layers_and_the_tools(tmp_path: Path) -> None:
    _, stack, _ = ready(tmp_path)
    assert apt_of(stack) == {"cuda": ("python3",), "tools": ("tini",)}
    more = replace(stack, apt={"torch": ("gdb",), "cuda": ("python3", "git")})
    assert apt_of(more) == {"cuda": ("python3", "git"), "torch": ("gdb",), "tools": ("tini",)}


def test_fetched_packages_are_held_against_the_lock(tmp_path: Path, house: Path) -> None:
    _, _, lock = ready(tmp_path / "p")
    (house / "apt" / "cuda").mkdir(parents=True)
    (house / "apt" / "cuda" / "python3_3.11.2_amd64.deb").write_bytes(b"good")
    (house / "apt" / "cuda" / "libc6_2.36-10_amd64.deb").write_bytes(b"newer")
    held = replace(lock, debian={"base": {}, "cuda": {"python3": f"3.11.2 sha256:{GOOD}"}})
    assert fetch.drift_of(held, house) == ("libc6_2.36-10_amd64.deb",)
    assert fetch.drift_of(replace(lock, debian={}), house) == ()


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
    for layer in apt_of(stack):
        (house / "apt" / layer).mkdir(parents=True)
        (house / "apt" / layer / "x_1_amd64.deb").write_bytes(b"deb")
    tar = base.path_of(lock, tmp_path / "cache")
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


def test_what_no_hash_names_cannot_be_fetched(tmp_path: Path, house: Path) -> None:
    _, stack, lock = ready(tmp_path / "p")
    lock = replace(lock, base=LockedBase("registry", image="debian:x"))
    with pytest.raises(ManifestError, match=r"(?s)unlocked: base debian:x.*buildctl lock small"):
        fetch.fetch(stack, lock, Host(None, None, None, ()), None, house, tmp_path, print)  # type: ignore[arg-type]
    assert list(house.iterdir()) == []
    with pytest.raises(ManifestError, match="base debian:x, which the lock does not hold"):
        fetch.prepare_offline(stack, lock, Host(None, None, None, (house,), offline=True), tmp_path / "cache")


def test_a_base_from_a_registry_is_taken_from_where_it_was_saved(tmp_path: Path, house: Path) -> None:
    project, stack, lock = ready(tmp_path / "p")
    lock = replace(lock, base=LockedBase("registry", image="debian:x", digest=f"sha256:{'ab' * 32}"))
    saved = layout.path_of(house, lock.base.digest)
    host = Host(None, None, None, (house,), offline=True)
    with pytest.raises(ManifestError) as caught:
        fetch.prepare_offline(stack, replace(lock, wheels=(), entrypoint=(), tools=()), host, tmp_path / "cache")
    assert f"base/{saved.name}" in str(caught.value)
    saved.mkdir(parents=True)
    (saved / "index.json").write_text("{}")
    bake = json.loads(compose.compose(project, stack, lock, host).written()["docker-bake.json"].content())
    assert {target["contexts"]["base"] for target in bake["target"].values()} == {
        f"oci-layout://{saved}@{lock.base.digest}"}
    online = compose.compose(project, stack, lock, replace(host, offline=False)).written()["docker-bake.json"]
    assert "contexts" not in online.content().decode()


# --- wheels, by the real pip -----------------------------------------------------------------------------------------


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as made:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", made.url)
        monkeypatch.setenv("PIP_RETRIES", "0")
        yield made


def test_wheels_come_by_hash_and_nothing_else_stays(tmp_path: Path, house: Path, index: Index) -> None:
    _, stack, lock = ready(tmp_path / "p")
    wanted = [wheel(name, "1.0", "torch", sha256=index.add(name, "1.0", ["far"])) for name in ("one", "two")]
    index.add("two", "2.0")
    said: list[str] = []
    fetch._download(stack, lock, wanted, "public", house, said.append)
    assert sorted(path.name for path in house.iterdir()) == ["one-1.0-py3-none-any.whl", "two-1.0-py3-none-any.whl"]
    assert fetch._missing(wanted, house) == []
    assert said == ["wheels: 2 from the index 'public', 0 MB"]


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, house: Path, index: Index) -> None:
    _, stack, lock = ready(tmp_path / "p")
    index.add("one", "1.0")
    with pytest.raises(ManifestError, match="another file than the lock names"):
        fetch._download(stack, lock, [wheel("one", "1.0", "torch", sha256=GOOD)], "public", house, print)
    assert list(house.iterdir()) == []


def test_an_index_that_is_down_is_a_network_error(tmp_path: Path, house: Path, index: Index) -> None:
    _, stack, lock = ready(tmp_path / "p")
    digest = index.add("one", "1.0")
    index.faults["/simple/one/"] = 503
    with pytest.raises(NetworkError, match="1 wheels of the index 'public'"):
        fetch._download(stack, lock, [wheel("one", "1.0", "torch", sha256=digest)], "public", house, print)
    assert list(house.iterdir()) == []
