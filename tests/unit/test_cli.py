"""The command line: exit codes, messages and JSON of every kind of bad input, without an engine."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import click
import pytest

from buildctl import cli
from buildctl import lock as locks
from buildctl.errors import EngineError, Problem
from tests.unit.projects import make, ready


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.run(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help_and_json(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert "Usage: buildctl" in out
    assert "--json" in out or name == "patch"


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "biuld")[0] == 2
    assert run(capsys, "plan", "--nothing")[0] == 2
    assert run(capsys, "--version")[1].startswith("buildctl ")


@pytest.mark.parametrize("words", [["du"], ["--addr=tcp://x", "du"], ["debug", "workers"]])
def test_those_who_meant_buildkits_client_are_told(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "not BuildKit's buildctl" in err


def test_plan_and_render(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILDCTL_CACHE_DIR", str(tmp_path / "cache"))
    project, loaded, _ = ready(tmp_path / "p")
    where = ("--project", str(project.root))
    code, out, _ = run(capsys, *where, "plan", "--stack", "small")
    assert code == 0
    assert "torch:2.0-small  new: never built here" in out
    assert "patch 0001-change.patch" in out
    code, out, _ = run(capsys, *where, "plan", "torch", "--stack", "small", "--json")
    assert [image["image"] for image in json.loads(out)["images"]] == ["torch"]
    code, out, _ = run(capsys, *where, "list")
    assert "cuda:none-small -> torch:2.0-small -> sglang:0.5-small" in out
    assert json.loads(run(capsys, *where, "list", "--json")[1])["stacks"][0]["lock"] == "current"
    assert run(capsys, *where, "plan", "touch", "--stack", "small")[0] == 3
    locks.path_of(loaded).unlink()
    assert "has no lock" in run(capsys, *where, "list")[1]


def test_a_lock_that_a_build_would_refuse_is_not_called_current(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, lock = ready(tmp_path)
    path = locks.path_of(loaded)
    path.write_text(locks.dump(replace(lock, base=locks.LockedBase("registry", image="debian:bookworm-slim"))))
    code, out, _ = run(capsys, "--project", str(project.root), "list", "--json")
    assert code == 0
    (row,) = json.loads(out)["stacks"]
    assert (row["lock"], row["unlocked"]) == ("incomplete: 1 unlocked", ["base debian:bookworm-slim"])
    assert "lock incomplete: 1 unlocked" in run(capsys, "--project", str(project.root), "list")[1]
    code, _, err = run(capsys, "--project", str(project.root), "build", "--stack", "small")
    assert (code, "is not complete" in err) == (3, True)


def test_missing_stale_and_edited_locks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, _ = ready(tmp_path)
    where = ("--project", str(tmp_path))
    path = locks.path_of(loaded)
    text = path.read_text()

    path.write_text(text.replace("ab" * 32, "cd" * 32, 1))
    code, _, err = run(capsys, *where, "plan", "--stack", "small")
    assert code == 3
    assert "changed by hand or damaged" in err
    assert "images/stacks/small.lock" in err

    path.write_text(text[:-20])
    assert "not valid JSON" in run(capsys, *where, "plan", "--stack", "small")[2]

    path.write_text(text)
    patch = project.patches / "sglang" / "0.5" / "0001-change.patch"
    patch.write_text(patch.read_text().replace("changed", "changed!"))
    code, _, err = run(capsys, *where, "plan", "--stack", "small")
    assert code == 3
    assert "changed since: patches" in err
    assert "buildctl lock small" in err
    assert "stale: patches" in run(capsys, *where, "list")[1]

    path.unlink()
    code, out, err = run(capsys, *where, "plan", "--stack", "small", "--json")
    assert code == 3
    error = json.loads(out)["error"]
    assert error["kind"] == "manifest"
    assert error["problems"][0]["todo"] == "run `buildctl lock small`"
    assert "has no lock" in err


def test_broken_yaml_and_unknown_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = make(tmp_path)
    where = ("--project", str(tmp_path))
    code, _, err = run(capsys, *where, "build", "--stack", "smal")
    assert code == 3
    assert "did you mean 'small'?" in err
    (project.stacks / "small.yaml").write_text("layers: [cuda\ntargets: x\n")
    code, _, err = run(capsys, *where, "plan", "--stack", "small")
    assert code == 3
    assert "images/stacks/small.yaml:2: stack 'small' is not valid YAML" in err
    assert run(capsys, *where, "list")[0] == 3


def test_two_stacks_with_the_same_tags_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, loaded, lock = ready(tmp_path)
    (project.stacks / "twin.yaml").write_text(loaded.path.read_text())
    (project.stacks / "twin.lock").write_text(locks.dump(lock))
    code, _, err = run(capsys, "--project", str(tmp_path), "list")
    assert code == 3
    assert "two stacks make the same tag cuda:none-small" in err


def test_no_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--project", str(tmp_path), "list")
    assert code == 2
    assert "no project here" in err


@pytest.mark.parametrize(("raised", "code"), [
    (KeyboardInterrupt(), 130), (click.exceptions.Abort(), 130), (EngineError(Problem("gone")), 9),
    (BrokenPipeError(), 0)])
def test_every_end_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(cli.group, "main", fail)
    monkeypatch.setattr("sys.stderr", io.StringIO())  # closed by the code under test
    assert cli.run([]) == code


def test_termination_is_an_interruption() -> None:
    with pytest.raises(KeyboardInterrupt):
        cli._terminated(15, None)
