"""The image in use: the real SGLang server with real EAGLE-3 on the CPU, inside its container."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.integration.conftest import docker

pytestmark = [pytest.mark.engine, pytest.mark.server]

SHORT = ("--effort", "quick", "--pairs", "2", "--prompts-per-stratum", "1", "--max-tokens", "64", "--task-check", "0")
MODELS = ("--model", "/models/target", "--draft", "/models/draft")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.fixture
def name() -> Iterator[str]:
    """A container's name; the container is gone afterwards."""
    name = f"inttest-{time.monotonic_ns()}"
    yield name
    docker("rm", "--force", "--volumes", name, check=False)


def mounts(models: Path, results: Path) -> tuple[str, ...]:
    return ("-v", f"{models}:/models:ro", "-v", f"{results}:/results")


def only_run(results: Path) -> Path:
    (run,) = [path for path in results.iterdir() if path.is_dir()]
    return run


def result_of(run: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((run / "result.json").read_text())
    return data


def start(name: str, *words: str) -> None:
    docker("run", "--detach", "--name", name, *words)


def logs(name: str) -> str:
    done = subprocess.run(["docker", "logs", name], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def wait_for(name: str, text: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while text not in (seen := logs(name)):
        state = docker("inspect", "--format", "{{.State.Status}}", name).strip()
        assert state == "running", f"the container ended before '{text}':\n{seen}"
        assert time.monotonic() < deadline, f"no '{text}' in {seconds} s:\n{seen}"
        time.sleep(0.25)


def health(name: str, *, healthy: bool) -> str:
    """What HEALTHCHECK says, once there is a runner."""
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(["docker", "exec", name, "/opt/entrypoint/bin/entrypoint", "health"],
                              capture_output=True, text=True, check=False)
        if not done.stdout.startswith("no runner"):
            assert (done.returncode == 0) is healthy, done.stdout
            return done.stdout
        assert time.monotonic() < deadline, logs(name)


def exit_code(name: str) -> int:
    return int(docker("wait", name))


@pytest.mark.parametrize(("sent", "code", "phase", "blocks"), [
    ("TERM", 143, "pass 1, concurrency", 0), ("INT", 130, ": stopping", 1)])
def test_a_benchmark_that_is_stopped_keeps_what_it_has(demo_image: str, models: Path, results: Path, name: str,
                                                       sent: str, code: int, phase: str, blocks: int) -> None:
    """K6-1: measuring, between the arms (starting: test_bench.py)."""
    start(name, *mounts(models, results), demo_image, "benchmark", *MODELS, *SHORT)
    wait_for(name, phase)
    began = time.monotonic()
    docker("kill", "--signal", sent, name)
    assert exit_code(name) == code, logs(name)
    assert time.monotonic() - began < 45
    run = only_run(results)
    assert json.loads((run / "plan.json").read_text())
    assert result_of(run)["status"] == "aborted"
    assert [block["validity"]["ok"] for block in result_of(run)["blocks"]] == [True] * blocks


#: run inside the container, where its processes may be killed
KILL_SCHEDULER = """
import os, signal
from entrypoints import processes
os.kill(next(pid for pid, one in processes.everyone().items() if one.name == "sglang::schedul"), signal.SIGKILL)
"""


def test_a_scheduler_that_is_killed_while_it_measures_is_named(demo_image: str, models: Path, results: Path,
                                                               name: str) -> None:
    """K6-2: the real server lingers; the run does not wait with it."""
    start(name, *mounts(models, results), demo_image, "benchmark", *MODELS, *SHORT)
    wait_for(name, "pass 1, concurrency")
    docker("exec", "--env", "PYTHONPATH=/opt/entrypoint/lib", name, "/opt/entrypoint/venv/bin/python", "-c",
           KILL_SCHEDULER)
    assert exit_code(name) == 13, logs(name)
    result = result_of(only_run(results))
    dead = result["blocks"][-1]
    assert dead["validity"]["causes"][0].startswith("server died: ")
    assert dead["diagnosis"]["missing"] or dead["diagnosis"]["evidence"]
    assert dead["stop"]["clean"]
    assert result["verdict"]["class"] == "invalid"


def test_the_binding_of_nvml_has_all_that_is_asked_of_it(demo_image: str) -> None:
    """Without a GPU a misspelt question would pass for a card that does not answer it."""
    text = "".join(path.read_text() for path in (ROOT / "entrypoints").glob("*.py"))
    asked = sorted(set(re.findall(r"(?:library\.|pynvml\.|ask\(\")(nvml\w+)", text)))
    assert len(asked) > 15
    script = f"import pynvml; print([one for one in {asked} if not callable(getattr(pynvml, one, None))])"
    assert docker("run", "--rm", demo_image, "/opt/entrypoint/venv/bin/python", "-c", script).strip() == "[]"


def test_serve_answers_and_stops(demo_image: str, models: Path, results: Path, name: str) -> None:
    """On a read-only root, with the volumes of the image."""
    start(name, "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "-p", "127.0.0.1::30000",
          *mounts(models, results), demo_image, "--model", "/models/target")
    assert "not ready yet" in health(name, healthy=False)
    host = docker("port", name, "30000").split()[0]
    deadline = time.monotonic() + 600
    while True:
        try:
            with urllib.request.urlopen(f"http://{host}/health", timeout=5) as answer:
                if answer.status == 200:
                    break
        except OSError:
            pass
        assert docker("inspect", "--format", "{{.State.Status}}", name).strip() == "running", logs(name)
        assert time.monotonic() < deadline, logs(name)
        time.sleep(0.5)
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    request = urllib.request.Request(f"http://{host}/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        reply = json.load(answer)
    assert reply["usage"]["completion_tokens"] == 16
    wait_for(name, "ready after")
    assert health(name, healthy=True) == "/health on port 30000 says 200\n"
    began = time.monotonic()
    docker("stop", "--time", "30", name)
    assert time.monotonic() - began < 25
    assert exit_code(name) == 143


@pytest.mark.parametrize(("words", "code", "said"), [
    (("benchmark", "--model", "/models/none", "--draft", "/models/draft"), 66, "/models/none"),
    (("benchmark", "--model", "/models/target"), 78, "--draft"),
    (("benchmark", "--modle", "x"), 64, "--modle"),
    (("false",), 1, ""),
    (("sh", "-c", "exit 7"), 7, ""),
])
def test_bad_words_and_passed_on_commands(demo_image: str, models: Path, results: Path, words: tuple[str, ...],
                                          code: int, said: str) -> None:
    done = subprocess.run(["docker", "run", "--rm", *mounts(models, results), demo_image, *words], capture_output=True,
                          text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(results.iterdir()) == []


def test_results_that_cannot_be_written(demo_image: str, models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o755)
    done = subprocess.run(["docker", "run", "--rm", *mounts(models, folder), demo_image, "benchmark", *MODELS],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 73, done.stderr
    assert "/results" in done.stderr


def test_an_unknown_variable_of_ours_is_refused(demo_image: str) -> None:
    done = subprocess.run(["docker", "run", "--rm", "-e", "ENTRYPOINT_PIARS=3", demo_image, "plan", *MODELS],
                          capture_output=True, text=True, check=False)
    assert done.returncode in (64, 78)
    assert "ENTRYPOINT_PAIRS" in done.stderr
