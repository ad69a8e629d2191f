"""The installed server's parser judges; here a small one stands for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from entrypoints import flags
from entrypoints.errors import BadConfig
from entrypoints.image import load
from tests.unit.entrypoints.image import write

PARSER = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--cuda-graph-max-bs-decode", type=int)
        parser.add_argument("--cuda-graph-max-bs-prefill", type=int)
        parser.add_argument("--dtype", choices=["auto", "half"])
"""
START: tuple[str, ...] = ("python", "-m", "sglang.launch_server", "--model-path", "/m")


def validate(tmp_path: Path, commands: dict[str, tuple[str, ...]], *, parser: str = PARSER,
             memory: Path | None = None, python: str | None = None) -> str:
    package = tmp_path / "site" / "sglang" / "srt"
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "server_args.py").write_text(parser, encoding="utf-8")
    image = load(write(tmp_path, **({"python": python} if python else {})))
    return flags.validate(image, commands, {"PYTHONPATH": str(tmp_path / "site")}, memory)


def test_good_flags() -> None:
    assert "--x" not in flags._SCRIPT


def test_all_arms_are_judged_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as caught:
        validate(tmp_path, {"baseline": (*START, "--cuda-graph-max-bs", "8"), "eagle3": (*START, "--frob", "1"),
                            "third": (*START, "--dtype", "float7"), "fine": START})
    assert [problem.where for problem in caught.value.problems] == ["arm baseline", "arm eagle3", "arm third"]
    text = str(caught.value)
    assert "--cuda-graph-max-bs-decode and --cuda-graph-bs-decode" in text  # our remedy
    assert "unrecognized arguments: --frob 1" in text
    assert "invalid choice: 'float7'" in text


def test_a_good_verdict_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    good: dict[str, tuple[str, ...]] = {"a": (*START, "--dtype", "half")}
    assert validate(tmp_path, good, memory=tmp_path / "memory") == ""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("asked again")
    monkeypatch.setattr(subprocess, "run", forbidden)
    assert validate(tmp_path, good, memory=tmp_path / "memory") == ""
    with pytest.raises(AssertionError):
        validate(tmp_path, {"a": START}, memory=tmp_path / "memory")


def test_help_among_the_flags_is_no_refusal(tmp_path: Path) -> None:
    assert validate(tmp_path, {"a": (*START, "--help")}) == ""


def test_a_parser_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    assert "no GPU here" in validate(tmp_path, {"a": START}, parser="raise RuntimeError('no GPU here')")
    assert "No such file" in validate(tmp_path, {"a": START}, python="/no/python")
    assert validate(tmp_path, {"a": START}, python="/bin/false") == "no answer"
