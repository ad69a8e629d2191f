"""The guard of each installing step: the installed set is the lock's share so far."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.guards import tool

guard = tool("wheels/guard")


class Installed:
    """An installed distribution."""

    def __init__(self, name: str, version: str) -> None:
        self.metadata, self.version = {"Name": name}, version


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str, *installed: tuple[str, str]) -> int:
    (tmp_path / "expect.txt").write_text(expected)
    monkeypatch.setattr("sys.argv", ["guard.py", str(tmp_path / "expect.txt")])
    monkeypatch.setattr(guard, "RECORD", tmp_path / "none")
    monkeypatch.setattr(guard, "distributions", lambda: [Installed(*one) for one in installed])
    return int(guard.main())


def test_a_step_that_swapped_torch_is_refused_with_both_versions(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A later install took the public index's CPU build, and left an old package behind (user-reports K2-3, K2-5)."""
    assert run(tmp_path, monkeypatch, "torch==2.9.1+cu130\nflashinfer-python==0.6.3\n", ("torch", "2.10.0+cpu"),
               ("flashinfer_python", "0.6.3"), ("nvidia-nccl-cu12", "2.29.3")) == 1
    said = capsys.readouterr().err
    for words in ("torch: found 2.10.0+cpu, expected 2.9.1+cu130", "nvidia-nccl-cu12: found 2.29.3, expected nothing",
                  "nothing may resolve in a build"):
        assert words in said
    assert "flashinfer" not in said  # underscore and hyphen are one package


def test_missing_and_double_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, monkeypatch, "a==1\nb==2\n", ("b", "1"), ("b", "2")) == 1
    said = capsys.readouterr().err
    assert "a: found nothing, expected 1" in said
    assert "b: installed twice, 1 and 2" in said


def test_exactly_the_lock_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, monkeypatch, "a==1\n", ("A", "1")) == 0
    assert capsys.readouterr().out == "guard: 1 packages as locked\n"
