"""Debian packages of a lock: what the real apt would install, from an archive on this disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import debian
from buildctl.errors import ManifestError, NetworkError
from tests.unit import archive

needs_apt = pytest.mark.skipif(not debian.available(), reason="this machine has no apt-get")


@needs_apt
def test_base_layers_and_tools_each_with_what_they_add(tmp_path: Path) -> None:
    line = archive.write(tmp_path)
    found = debian.resolve([line], "amd64", ["ca-certificates"], {"cuda": ["python3", "libc6"], "kernels": ["g++"]},
                           {"tools": ["python3", "tini"]})
    assert {place: list(packages) for place, packages in found.items()} == {
        "base": ["apt", "ca-certificates", "dpkg", "libc6"], "cuda": ["python3", "python3-minimal"],
        "kernels": ["g++"], "tools": ["python3", "python3-minimal", "tini"]}
    assert found["base"]["ca-certificates"].startswith("1:2023 sha256:")
    assert all(len(text.partition("sha256:")[2]) == 64 for packages in found.values() for text in packages.values())


@needs_apt
def test_a_layer_that_adds_nothing(tmp_path: Path) -> None:
    assert debian.resolve([archive.write(tmp_path)], "amd64", [], {"cuda": ["libc6"]}, {})["cuda"] == {}


@needs_apt
def test_a_package_that_the_mirror_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"(?s)apt of cuda.*pyton3.*mend 'apt'"):
        debian.resolve([archive.write(tmp_path)], "amd64", [], {"cuda": ["pyton3"]}, {})


@needs_apt
def test_a_mirror_that_is_not_there_or_not_signed(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="does not give its lists"):
        debian.resolve([f"deb [trusted=yes] file:{tmp_path}/none bookworm main"], "amd64", [], {}, {})
    unsigned = archive.write(tmp_path).replace("[trusted=yes] ", "")
    with pytest.raises(NetworkError, match="not signed"):
        debian.resolve([unsigned], "amd64", [], {}, {})


def test_no_apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not debian.available()


def test_passwords_of_a_mirror_are_not_shown() -> None:
    assert debian._last("E: Failed to fetch https://me:secret@mirror.example/debian") == \
        "E: Failed to fetch https://***@mirror.example/debian"
    assert debian._last("nothing special") == "nothing special"


def test_pins_are_preferences() -> None:
    assert debian.preferences({}) == ""
    assert debian.preferences({"g++": "12.2 sha256:ab"}) == "Package: g++\nPin: version 12.2\nPin-Priority: 990\n"
