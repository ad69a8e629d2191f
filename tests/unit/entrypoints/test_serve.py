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

from entrypoints import probe, processes, serve
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

    def health(self) -> tuple[int, str]:
        """What HEALTHCHECK gets."""
        done = subprocess.run([sys.executable, "-m", "entrypoints", "health"], env=self.environment, text=True,
                              capture_output=True, check=False)
        return done.returncode, done.stdout.strip()

    def stop(self) -> None:
        """As `docker stop`."""
        self.process.send_signal(signal.SIGTERM)
        assert self.end() == 143

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
    assert one.health() == (0, f"/health on port {one.port} says 200")
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
    assert "out-of-memory kills in this container: 0" in one.err, "the state, also where the log names the cause"


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


def test_another_node_of_a_cluster_is_watched(tmp_path: Path) -> None:
    one = serving(tmp_path, "--node-rank", "1", then=[["after", 0.5], ["exit", 3]])
    assert one.end() == 69
    assert "ended with status 3" in one.err
    assert "ready after" not in one.err


TLS = ("--ssl-certfile", str(Path(__file__).parents[2] / "fixtures" / "tls" / "server.pem"))


@pytest.mark.parametrize(("words", "where"), [
    (("--host", "127.0.0.2"), " of 127.0.0.2"),
    (("--host", "::1"), " of ::1"),
    (TLS, ", TLS"),
    (("--host", "::1", *TLS), " of ::1, TLS"),
])
def test_a_server_is_asked_where_and_how_it_listens(tmp_path: Path, words: tuple[str, ...], where: str) -> None:
    """HEALTHCHECK is red while it loads, asks the real address when it serves, and is red when it is sick."""
    one = serving(tmp_path, *words, open=1.0, then=[["requests", 1], ["exists", str(tmp_path / "now")], ["sick"]])
    one.until("launch_server")
    assert one.health()[0] == 1
    one.until("ready after")
    assert one.health() == (0, f"/health on port {one.port}{where} says 200")
    (tmp_path / "now").touch()
    while one.health()[0] == 0:
        pass
    assert one.health() == (1, f"/health on port {one.port}{where} says 503")
    one.stop()


def test_a_server_that_speaks_no_http_is_unhealthy_until_it_listens(tmp_path: Path) -> None:
    one = serving(tmp_path, "--grpc-mode", log=[[0.0, "Load weight begin."]], open=1.0)
    one.until("launch_server")
    assert one.health()[0] == 1
    one.until("listening; it speaks gRPC, so nothing more is proved")
    while one.health()[1] != "serve: listening":
        pass
    assert one.health()[0] == 0
    one.stop()


def test_what_the_server_made_of_its_flags_is_told(tmp_path: Path) -> None:
    """SGLang sets the draft tokens itself where there is one draft path: a note, and no other server."""
    words = ("--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", str(tmp_path / "model"),
             "--speculative-num-draft-tokens", "8", "--page-size", "1", "--random-seed", "7", "--lora-paths", "a", "b")
    info = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4, "page_size": 64, "random_seed": 7,
            "lora_paths": [], "speculative_draft_model_path": str(tmp_path / "model")}
    one = Container(tmp_path, "serve", "--model", str(tmp_path / "model"), *words, info=info,
                    variables={"ENTRYPOINT_CHECK": "0", "ENTRYPOINT_PORT": str(free_port())})
    one.until("ready after")
    one.stop()
    assert [line for line in one.err.splitlines() if "note: " in line] == [
        "entrypoint: note: speculative_algorithm: asked NEXTN, server says EAGLE",
        "entrypoint: note: speculative_num_draft_tokens: asked 8, server says 4",
        "entrypoint: note: page_size: asked 1, server says 64"]


def test_a_server_with_another_seed_is_not_the_one_asked_for(tmp_path: Path) -> None:
    one = serving(tmp_path, "--random-seed", "7", info={"random_seed": 8})
    assert one.end() == 69
    assert "the server that answers is not the one asked for: random_seed: asked 7, server says 8" in one.err


def test_a_key_from_the_environment_protects_the_server(tmp_path: Path) -> None:
    one = Container(tmp_path, "serve", "--model", str(tmp_path / "model"), "--port", str(free_port()),
                    variables={"ENTRYPOINT_API_KEY": "sesame"}, log=["server_args={'api_key': 'sesame'}"])
    one.until("ready after")
    port = int(one.err.partition("--port ")[2].split()[0])
    assert probe.ask(port, "/server_info").status == 401
    assert probe.ask(port, "/server_info", api_key="sesame").status == 200
    one.stop()
    assert "--api-key ***" in one.err
    assert "sesame" not in one.out + one.err


def test_the_servers_own_help(tmp_path: Path) -> None:
    one = Container(tmp_path, "serve", "--", "--help")
    assert one.end() == 0
    assert "--model-path" in one.out


def test_a_model_must_be_named(tmp_path: Path) -> None:
    """SGLang imports for half a minute before it says so: refused at once, with what to give."""
    one = Container(tmp_path)
    assert one.end() == 64
    assert "serve: no model named" in one.err
    assert "serve --model /models/NAME" in one.err
    assert "launch_server" not in one.err


@pytest.mark.parametrize("words", [("--model", "/m"), ("--model-path=/m",), ("--", "--model", "/m"),
                                   ("--", "--model-pa", "/m"), ("--", "--config", "server.yaml")])
def test_a_model_may_be_named_in_every_way(tmp_path: Path, words: tuple[str, ...]) -> None:
    serve.require_model(resolve(words, {}, only=SERVE_OPTIONS), load(write(tmp_path)))


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
