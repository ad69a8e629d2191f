"""What a build with --allow-unlocked resolves: what the lock's hashes still hold, and the record of the rest."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.unit.guards import tool

resolved = tool("wheels/resolved")

PYLOCK = """
lock-version = "1.0"
[[packages]]
name = "Torch"
version = "2.9.1+cu130"
wheels = [
  {url = "https://x/torch-2.9.1%2Bcu130-cp311-cp311-manylinux_2_28_x86_64.whl", hashes = {sha256 = "aa"}},
  {url = "https://x/torch-2.9.1%2Bcu130-cp312-cp312-manylinux_2_28_x86_64.whl", hashes = {sha256 = "bb"}},
]
[[packages]]
name = "late_one"
version = "1.0"
wheels = [{name = "late_one-1.0-py3-none-any.whl", path = "late_one-1.0-py3-none-any.whl", hashes = {sha256 = "cc"}}]
"""
LISTS = {"public.txt": "late-one==1.0 --hash=sha256:cc\nother==2 --hash=sha256:dd\n",
         "special.txt": "--index-url https://s/simple\nlate-two==1 --hash=sha256:ee\n"}


class Installed:
    """A distribution with a WHEEL file."""

    def __init__(self, tags: str, name: str = "torch", version: str = "2.9.1+cu130") -> None:
        self.version = version
        self.metadata = {"Name": name}
        self.read_text = {"WHEEL": tags}.get


def test_locked_packages_that_are_needed_early_come_by_the_locks_hashes() -> None:
    packages = resolved.chosen(PYLOCK)
    assert list(packages) == ["torch", "late-one"]
    assert resolved.early(packages, LISTS, set()) == {"public.txt": "late-one==1.0 --hash=sha256:cc\n"}
    assert resolved.early(packages, LISTS, {"late-one"}) == {}
    assert resolved.early({"late-two": {}}, LISTS, set()) == {"special.txt": LISTS["special.txt"]}


def test_the_file_that_was_installed_is_told_by_its_tags() -> None:
    torch = resolved.chosen(PYLOCK)["torch"]
    assert resolved.hashes(torch, Installed("Tag: cp312-cp312-manylinux_2_28_x86_64\n")) == ["bb"]
    assert resolved.hashes(torch, Installed("Tag: cp312-cp312-linux_x86_64\n")) == ["aa", "bb"]
    assert resolved.tags_of("a-1-py2.py3-none-any.whl") == {"py2-none-any", "py3-none-any"}


def test_plan_and_record_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, record = tmp_path / "layer", tmp_path / "etc" / "unlocked.txt"
    (folder / "locked").mkdir(parents=True)
    for name, text in LISTS.items():
        (folder / "locked" / name).write_text(text)
    (tmp_path / "pylock.toml").write_text(PYLOCK)

    def run(what: str, target: Path) -> int:
        monkeypatch.setattr("sys.argv", ["resolved.py", what, str(folder), str(tmp_path / "pylock.toml"), str(target)])
        return int(resolved.main())

    monkeypatch.setattr(resolved, "distributions", lambda: [])
    assert run("plan", tmp_path / "early") == 0
    assert [path.name for path in (tmp_path / "early").iterdir()] == ["public.txt"]
    there = [Installed("Tag: cp311-cp311-manylinux_2_28_x86_64\n"), Installed("", "late_one", "1.0")]
    monkeypatch.setattr(resolved, "distributions", lambda: there)
    record.parent.mkdir()
    record.write_text("earlier==1  # sha256:00\n")
    assert run("record", record) == run("record", record) == 0
    assert record.read_text() == ("earlier==1  # sha256:00\nlate-one==1.0  # of the lock, early\n"
                                  "torch==2.9.1+cu130  # sha256:aa\n")
    guard = tool("wheels/guard")
    monkeypatch.setattr(guard, "RECORD", record)
    monkeypatch.setattr(guard, "distributions", lambda: [*there, Installed("", "earlier", "1")])
    (tmp_path / "expect.txt").write_text("late-one==1.0\n")
    monkeypatch.setattr("sys.argv", ["guard.py", str(tmp_path / "expect.txt")])
    assert guard.main() == 0
    monkeypatch.setattr(guard, "distributions", lambda: [*there, Installed("", "earlier", "1"),
                                                         importlib.metadata.distribution("pytest")])
    assert guard.main() == 1
