"""Modes, their exit codes, and how errors are told."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoints import cli, host
from entrypoints.errors import InputMissing, Problem, Terminated
from tests.unit.entrypoints.image import write


@pytest.fixture(autouse=True)
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRYPOINT_IMAGE_FILE", str(write(tmp_path)))


@pytest.mark.parametrize(("argv", "mode"), [
    ([], "serve"), (["--tp", "2"], "serve"), (["serve", "--x"], "serve"), (["--version"], "version"),
    (["--help"], "help"), (["-h"], "help"), (["help"], "help"), (["check"], "check"), (["bash", "-c"], "bash"),
])
def test_the_first_word_says_the_mode(argv: list[str], mode: str) -> None:
    assert cli._mode(argv)[0] == mode


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "docker run IMAGE benchmark" in capsys.readouterr().out
    assert cli.main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stack"] == "cpu-demo"
    assert cli.main(["version"]) == 0


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "entrypoints", *words], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(Path.cwd())})


def test_any_other_word_is_executed_as_given(tmp_path: Path) -> None:
    done = run("sh", "-c", "echo $0 $1; exit 7", "a b", "c")
    assert (done.returncode, done.stdout) == (7, "a b c\n")
    done = run("benchmrk")
    assert (done.returncode, done.stdout) == (127, "")
    assert "did you mean benchmark?" in done.stderr
    assert run("qqqq").stderr == "entrypoint: qqqq: no mode of this image and no command in it\n"
    plain = tmp_path / "plain"
    plain.touch()
    assert run(str(plain)).returncode == 126


def test_errors_go_to_stderr_and_as_json_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["benchmark", "--pears", "1"], {}) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: usage\nunknown option --pears")
    assert cli.main(["check", "--json"], {"ENTRYPOINT_PARIS": "1"}) == 78
    assert json.loads(capsys.readouterr().out)["problems"][0]["what"] == "unknown variable ENTRYPOINT_PARIS"
    assert cli.main(["analyze"], {"ENTRYPOINT_JSON": "1"}) == 64
    assert json.loads(capsys.readouterr().out)["kind"] == "usage"


@pytest.mark.parametrize(("error", "code"), [
    (InputMissing(Problem("x")), 66), (Terminated(15), 143), (Terminated(2), 130), (KeyboardInterrupt(), 130),
    (ZeroDivisionError(), 70),
])
def test_what_a_mode_raises_becomes_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                 error: BaseException, code: int) -> None:
    def fail(*_: Any) -> int:
        raise error
    monkeypatch.setattr(cli, "MODES", {"check": fail})
    assert cli.main(["check"]) == code
    assert capsys.readouterr().err or isinstance(error, KeyboardInterrupt)


def test_a_closed_pipe_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(["/bin/sh", "-c", f"{sys.executable} -m entrypoints version | true; exit 0"], check=False,
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    assert "Traceback" not in done.stderr


def test_check_prints_lines_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--cache", str(tmp_path), "--results", str(tmp_path)]
    assert cli.main(words, {}) == 69  # the pinned pytest of this image.json is another one
    assert "fail  packages" in capsys.readouterr().out
    cli.main([*words, "--json"], {})
    assert {one["name"] for one in json.loads(capsys.readouterr().out)} >= {"gpu", "cache", "results", "patches"}


def test_plan_shows_every_setting_with_its_source_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "/models/m", "--draft", "/models/d", "--pairs", "2"]
    assert cli.main(words, {"ENTRYPOINT_PASSES": "1", "ENTRYPOINT_API_KEY": "sesame"}) == 0
    text = capsys.readouterr().out
    assert "pairs                2                        command line" in text
    assert "passes               1                        environment ENTRYPOINT_PASSES" in text
    assert "sesame" not in text
    assert "--speculative-draft-model-path /models/d" in text
    assert cli.main([*words, "--json"], {}) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"name": "pairs", "value": "2", "source": "command line"} in shown["settings"]
    assert shown["plan"]["order"]


def test_plan_shows_no_secret_among_the_server_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("entrypoints.flags.validate", lambda *_: "")
    words = ["plan", "--model", "/models/m", "--draft", "/models/d", "--cache", str(tmp_path), "--arm", "baseline",
             "--arm", "locked=--api-key hunter3"]
    for more in ([], ["--json"]):
        assert cli.main([*words, *more, "--", "--api-key", "hunter2", "--admin-api", "hunter2"], {}) == 0
        said = capsys.readouterr()
        assert "hunter" not in said.out + said.err
        assert "--api-key ***" in said.out
        assert "--admin-api ***" in said.out


def test_flags_of_the_user_are_judged_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def validate(_image: Any, commands: Any, environment: Any, memory: Path) -> str:
        asked.append((commands, memory))
        return "no GPU here"

    monkeypatch.setattr("entrypoints.flags.validate", validate)
    words = ["plan", "--model", "/models/m", "--draft", "/models/d", "--cache", str(tmp_path)]
    assert cli.main(words, {}) == 0
    assert not asked  # flags of the profile were judged when the image was built
    assert cli.main([*words, "--", "--context-length", "2048"], {}) == 0
    assert "not checked before the start: no GPU here" in capsys.readouterr().err
    commands, memory = asked[0]
    assert memory == tmp_path / "abababababababab"
    assert all(argv[-2:] == ("--context-length", "2048") for argv in commands.values())
    assert set(commands) == {"baseline", "eagle3"}


def test_a_benchmark_without_its_models_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["benchmark", "--model", "/none", "--draft", "/none2", "--results", str(tmp_path),
                     "--cache", str(tmp_path)], {}) == 66
    assert "the draft folder is not there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["image.json"]


def test_a_resumed_run_asks_first_whether_the_gpu_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended the run before may still be there; models and flags are the stored ones and are not judged here."""
    monkeypatch.setenv("ENTRYPOINT_IMAGE_FILE", str(write(tmp_path, targets=["sm120"], cuda="13.0")))
    full = host.Gpu(0, "NVIDIA RTX PRO 6000 Blackwell", "12.0", 96 * 2**30, 90 * 2**30)
    facts = dataclasses.replace(host.read(), driver="580.95.05", driver_cuda="13.0", gpus=(full,))
    monkeypatch.setattr(host, "read", lambda: facts)
    assert cli.main(["benchmark", "--resume", str(tmp_path)], {}) == 69
    captured = capsys.readouterr()
    assert "check: gpu memory" in captured.err
    assert "90.0 of 96 GiB used" in captured.err
    free = dataclasses.replace(facts, gpus=(dataclasses.replace(full, memory_used=0),))
    monkeypatch.setattr(host, "read", lambda: free)
    assert cli.main(["benchmark", "--resume", str(tmp_path)], {}) == 66, "then the folder is looked at"


def test_health_takes_no_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                 tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["health"]) == 1
    assert "no runner here" in capsys.readouterr().out
    assert cli.main(["health", "--x"]) == 64


def test_analyze_takes_one_folder(tmp_path: Path) -> None:
    assert cli.main(["analyze", "a", "b"], {}) == 64
    assert cli.main(["analyze", str(tmp_path / "none")], {}) == 66
