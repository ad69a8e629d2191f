"""Names of one run: whose they are, and when they are nobody's any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from buildctl import runs

TAG = "cuda:chain-0123456789abcdef"


def test_a_name_is_its_runs_alone_as_long_as_it_lives() -> None:
    name = runs.name(TAG)
    assert name.startswith(f"{TAG}-")
    assert len(name.partition(":")[2]) <= 128, "the most that a tag may have"
    assert name != runs.name(TAG)
    assert runs.owned(name)
    assert not runs.dead(name)


@pytest.mark.parametrize("tag", [TAG, "cuda:key-0123456789abcdef", "cuda:13.0-small", f"{TAG}-x", ""])
def test_other_tags_are_no_names_of_runs(tag: str) -> None:
    assert not runs.owned(tag)
    assert not runs.dead(tag)


def test_a_process_that_has_ended_leaves_dead_names() -> None:
    done = subprocess.run([sys.executable, "-c", f"from buildctl import runs; print(runs.name('{TAG}'))"],
                          capture_output=True, text=True, check=True)
    assert runs.dead(done.stdout.strip())


def test_of_another_machine_only_the_age_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_machine", lambda: "00000000")
    name = runs.name(TAG).replace(f"-{os.getpid()}-", f"-{2**40}-")
    assert runs.dead(name)
    monkeypatch.setattr(runs, "_machine", lambda: "11111111")
    assert not runs.dead(name)
    head, _, began = name.rpartition("-")
    assert runs.dead(f"{head}-{int(began, 16) - int(runs.LONGEST * 1e9):x}")


def test_a_machine_without_namespaces_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Path) -> Path:
        raise FileNotFoundError

    with_namespace = runs._machine()
    monkeypatch.setattr(Path, "readlink", missing)
    assert runs._machine() not in ("", with_namespace)


def test_a_process_of_another_user_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert not runs.dead(runs.name(TAG))
