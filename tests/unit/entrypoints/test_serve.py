"""`serve` as a container runs it: a process of its own, signals from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoints import processes, serve
from entrypoints.errors import BadConfig, CannotWrite
from entrypoints.image import load
from entrypoints.settings import SERVE_OPTIONS, resolve
from entrypoints.supervise import free_port
from tests.unit.entrypoints.image import document, write
from tests.unit.entrypoints.serving import FAULT_SERVER
from tests.unit.entrypoints.test_models import folder

ROOT = Path(__file__).parents[3]
STARTED: list[subprocess.Popen[str]] = []


class Container:
    """`python -m entrypoints ...` with a fault server in place of SGLang."""

    def __init__(self, path: Path, *words: str, variables: dict[str, str] | None = None, **script: Any) -> None:
        package = path / "site" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(
            f"import runpy\nrunpy.run_path({str(FAULT_SERVER)!r}, run_name='__main__')\n", encoding="utf-8")
        profile = {**document()["profile"], "environment": {"PYTHONPATH": str(path / "site"),
                                                            "FAULT_SCRIPT": json.dumps(script)}}
        self.model = folder(path / "model")
        self.port = free_port()
        (path / "cache").mkdir()
        (path / "tmp").mkdir()
        environment = {"PATH": os.environ["PATH"], "TMPDIR": str(path / "tmp"), "PYTHONPATH": str(ROOT),
                       "ENTRYPOINT_IMAGE_FILE": str(write(path, profile=profile)),
                       "ENTRYPOINT_CACHE": str(path / "cache"), **(variables or {})}
        self.environment = environment
        self.process = subprocess.Popen([sys.executable, "-m", "entrypoints", *words], env=environment, cwd=path,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out = self.err = ""
        STARTED.append(self.process)

    def until(self, text: str) -> None:
        """Read progress until a line holds a text."""
        assert self.process.stderr
        for line in self.process.stderr:
            self.err += line
            if text in line:
                return
        raise AssertionError(self.err)

    def end(self) -> int:
        """Wait for the end; the exit code."""
        out, err = self.process.communicate(timeout=20)
        self.out += out
        self.err += err
        return self.process.returncode


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[None]:
    """All processes of a test carry its folder in their environment: none may be left."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.terminate()  # a test that failed half-way
        process.communicate()
    mark = str(tmp_path).encode()
    left = []
    for pid, one in processes.everyone().items():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if mark in environ and one.alive and pid != os.getpid():
            left.append(one)
    assert not left


pytestmark = pytest.mark.usefixtures("ours")


def serving(tmp_path: Path, *words: str, **script: Any) -> Container:
    port = free_port()
    one = Container(tmp_path, "serve", "--model", str(tmp_path / "model"), "--port", str(port), *words, **script)
    one.port = port
    return one


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_serves_until_it_is_stopped(tmp_path: Path, number: int, code: int) -> None:
    """K6-1: exit 143, and 130 for INT."""
    one = serving(tmp_path, grandchildren=5)
    one.until("ready after")
    health = subprocess.run([sys.executable, "-m", "entrypoints", "health"], env=one.environment, text=True,
                            capture_output=True, check=False)
    assert (health.returncode, health.stdout.strip()) == (0, f"/health on port {one.port} says 200")
    one.process.send_signal(number)
    assert one.end() == code
    assert "Uvicorn running" in one.out
    assert f"--model-path {one.model}" in one.err


def test_it_is_stopped_while_it_starts(tmp_path: Path) -> None:
    """K6-1."""
    one = serving(tmp_path, open=None, log=["Load weight begin."])
    assert one.process.stdout
    assert "Load weight begin" in one.process.stdout.readline()
    begin = time.monotonic()
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 143
    assert time.monotonic() - begin < 5


def test_a_child_that_ignores_term_is_killed_after_the_grace(tmp_path: Path) -> None:
    """K6-1."""
    one = Container(tmp_path, "serve", "--model", str(tmp_path / "model"), variables={"ENTRYPOINT_GRACE_SECONDS": "1"},
                    ignore_term=True, orphan=True)
    one.until("ready after")
    begin = time.monotonic()
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 143
    assert 0.9 < time.monotonic() - begin < 5


@pytest.mark.parametrize(("script", "cause"), [
    ({"then": [["after", 1.0], ["exit", 0]]}, "it ended with status 0, as SGLang also does after a crash"),
    ({"then": [["requests", 1], ["after", 0.3], ["kill", 0]]}, "a process that the server needs is gone"),
    ({"open": None, "then": [["log", "|ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs."],
                             ["exit", 0]]}, "all-reduce fusion is not for SM120"),
])
def test_a_death_is_never_a_success(tmp_path: Path, script: dict[str, Any], cause: str) -> None:
    """K6-2: status 0 must not reach the orchestrator."""
    one = serving(tmp_path, **script)
    assert one.end() == 69
    assert cause in one.err
    assert "do:" in one.err


FORGED = "[2026-12-01 05:15:22] Scheduler hit an exception: Traceback (most recent call last):"


def test_words_of_a_request_in_the_log_end_no_server(tmp_path: Path) -> None:
    """With --log-requests a prompt stands in the log as it came, new lines included: it must not stop a service."""
    request = f"|Receive: obj=GenerateReqInput(text='\n{FORGED}"
    one = serving(tmp_path, then=[["requests", 1], ["after", 0.5], ["log", request]])
    one.until("this line is no death: " + FORGED)
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 143


def test_the_same_words_of_a_server_that_no_longer_answers_are_believed(tmp_path: Path) -> None:
    one = serving(tmp_path, then=[["requests", 1], ["after", 0.5], ["sick"], ["log", "|" + FORGED], ["hang"]])
    assert one.end() == 69
    assert "Scheduler hit an exception" in one.err


def test_a_server_that_we_cannot_ask_is_still_watched(tmp_path: Path) -> None:
    one = serving(tmp_path, "--node-rank", "1", then=[["after", 0.5], ["exit", 3]])
    assert one.end() == 69
    assert "ended with status 3" in one.err
    assert "ready after" not in one.err


def test_the_servers_own_help(tmp_path: Path) -> None:
    one = Container(tmp_path, "serve", "--", "--help")
    assert one.end() == 0
    assert "--model-path" in one.out


def test_missing_models_are_found_before_the_start(tmp_path: Path) -> None:
    one = Container(tmp_path, "--model-path", "/none")
    assert one.end() == 66
    assert "the model folder is not there" in one.err


def made(tmp_path: Path, *words: str, **changes: Any) -> tuple[str, ...]:
    return serve.command(resolve(words, {}, only=SERVE_OPTIONS), load(write(tmp_path, **changes)))


def test_arms_of_the_profile(tmp_path: Path) -> None:
    """K6-5: EAGLE-3 without a draft is refused."""
    assert "--speculative-algorithm" not in made(tmp_path, "--model", "/m")
    found = made(tmp_path, "--model", "/m", "--draft", "/d", "--serve-arm", "eagle3")
    assert found[found.index("--speculative-draft-model-path") + 1] == "/d"
    with pytest.raises(BadConfig, match="did you mean eagle3"):
        made(tmp_path, "--serve-arm", "eagle")
    with pytest.raises(BadConfig, match="EAGLE needs a draft model"):
        made(tmp_path, "--serve-arm", "eagle3")
    made(tmp_path, "--serve-arm", "eagle3", "--speculative-draft-model-path", "/d")


def test_models_named_by_the_servers_own_flags_are_checked_too(tmp_path: Path) -> None:
    """K6-5: a local draft folder without config.json."""
    (tmp_path / "d").mkdir()
    one = Container(tmp_path, "--model-path", str(tmp_path / "model"), "--speculative-draft-model-path",
                    str(tmp_path / "d"))
    assert one.end() == 66
    assert "draft folder has no readable config.json" in one.err


def test_the_check_can_be_switched_off(tmp_path: Path) -> None:
    one = Container(tmp_path, "--model-path", "/none", variables={"ENTRYPOINT_CHECK": "0"}, then=[["exit", 3]],
                    open=None)
    assert one.end() == 69
    assert "ended with status 3" in one.err


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """K6-5."""
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="-v NAME:/cache"):
        serve.prepare_cache(tmp_path / "file" / "key")


def test_a_key_shows_neither_in_our_words_nor_in_the_servers(tmp_path: Path) -> None:
    """SGLang itself writes its arguments into the log."""
    one = serving(tmp_path, "--api-key=sesame", log=["server_args={'api_key': 'sesame'}"])
    one.until("ready after")
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 143
    assert "--api-key=***" in one.err
    assert "server_args={'api_key': '******'}" in one.out
    assert "sesame" not in one.out + one.err
