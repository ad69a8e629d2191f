"""`buildctl bench` and `buildctl compare` with the real engine and the real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from entrypoints import plan
from tests.conftest import ROOT
from tests.integration.conftest import PREFIX, Ran, buildctl, docker
from tests.unit.entrypoints import image as image_facts

pytestmark = [pytest.mark.engine, pytest.mark.server]

#: exit codes of a benchmark that measured something valid
VALID = {0: "win", 10: "loss", 11: "equivalent", 12: "inconclusive"}
SHORT = ("--effort", "quick", "--pairs", "2", "--prompts-per-stratum", "1", "--max-tokens", "64", "--task-check", "16")


@pytest.fixture(scope="module")
def cache() -> Iterator[str]:
    """A volume for the cache; whoever uses it is one of our containers."""
    name = f"{PREFIX}-cache-{time.monotonic_ns()}"
    yield name
    docker("volume", "rm", name, check=False)


def words(image: str, models: Path, out: Path, cache: str) -> tuple[str, ...]:
    return ("bench", image, "--model", str(models / "target"), "--draft", str(models / "draft"), "--out", str(out),
            "--cache", cache)


def containers(cache: str) -> str:
    return docker("ps", "--all", "--quiet", "--filter", f"volume={cache}")


@dataclass(frozen=True)
class Measured:
    """A finished `buildctl bench`."""

    ran: Ran
    folder: Path

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found


@pytest.fixture(scope="module")
def measured(demo_image: str, models: Path, cache: str, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """One real benchmark; a folder that only the caller may enter is no hindrance."""
    out = tmp_path_factory.mktemp("out") / "closed"
    out.mkdir(mode=0o700)
    ran = buildctl(*words(demo_image, models, out, cache), "--", *SHORT)
    assert ran.code in VALID, ran.err
    (folder,) = out.iterdir()
    return Measured(ran, folder)


def test_a_benchmark_measures_what_the_models_were_built_for(measured: Measured) -> None:
    """In the container as `bench` makes it: read-only root, no capability, no new privileges."""
    result = measured.read("result.json")
    assert result["verdict"]["class"] == VALID[measured.ran.code]
    assert result["exit_code"] == measured.ran.code
    (comparison,) = result["comparison"]
    assert comparison["pairs"] == 2
    assert comparison["base_tok_s"] > 0
    assert comparison["spec_tok_s"] > 0
    # by construction the draft is right on its first token and on no other
    requests = [json.loads(line) for line in (measured.folder / "requests.jsonl").read_text().splitlines()]
    assert result["arms"]["eagle3"]["load_points"]["1"]["spec"]["accept_length"] == 2.0
    (speculation,) = [one for one in result["evidence"] if one["claim"] == "speculation"]
    assert (speculation["arm"], speculation["state"]) == ("eagle3", "active")
    for request in requests:
        if request["arm"] == "eagle3":
            assert request["n_tokens_server"] / request["spec_verify_ct"] == pytest.approx(2.0, abs=0.1)
        else:
            assert not request["spec_verify_ct"]
    assert len([block for block in result["blocks"] if block["validity"]["ok"]]) == 4
    assert {request["finish_reason"] for request in requests} == {"length"}
    assert (measured.folder / "report.md").read_text() in measured.ran.out
    assert len(list(measured.folder.glob("server-*.log"))) == 4


def test_the_word_problems_are_beyond_the_demo_model_and_that_is_said(measured: Measured) -> None:
    found = measured.read("result.json")["equivalence"]["task"]
    assert (found["state"], found["n"], found["acc_base"]) == ("unavailable", 16, 0.0)
    assert "this model is too weak for the task" in measured.ran.out


def test_the_page_has_its_pictures_and_needs_nothing_from_outside(measured: Measured) -> None:
    page = (measured.folder / "report.html").read_text()
    assert page.count("<svg ") == 7, "ratios, pairs, prompts, two distributions, acceptance, timeline"
    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", page)


def test_the_result_is_the_callers_and_bound_to_the_image(measured: Measured, demo_image: str, cache: str) -> None:
    bound = measured.read("binding.json")
    assert bound["raw_sha256"] == measured.read("result.json")["raw_sha256"]
    about = json.loads(docker("image", "inspect", demo_image))[0]
    assert bound["image"]["id"] == about["Id"]
    assert bound["image"]["digest"] in {one.partition("@")[2] for one in about["RepoDigests"]}
    assert bound["image"]["key"] == about["Config"]["Labels"]["buildctl.key"]
    assert {path.stat().st_uid for path in measured.folder.iterdir()} == {os.getuid()}
    assert f"results: {measured.folder}" in measured.ran.err
    assert containers(cache) == ""


def copied(run: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The same run a day later, under another number and with a plan of its own."""
    shutil.copytree(run, target)
    document = json.loads((target / "plan.json").read_text())
    document["run_id"] = target.name
    change(document)
    document["sha256"] = plan.digest(document)
    (target / "plan.json").write_text(json.dumps(document))
    context = json.loads((target / "context.json").read_text())
    for name in ("started_at", "ended_at"):
        context[name] = context[name].replace(context[name][:4], str(int(context[name][:4]) + 1))
    (target / "context.json").write_text(json.dumps(context))
    return target


def test_runs_are_compared_in_a_container_of_their_image(measured: Measured, tmp_path: Path) -> None:
    other = copied(measured.folder, tmp_path / "later", lambda _: None)
    ran = buildctl("compare", f"before={measured.folder}", f"after={other}", "--json")
    assert ran.code == 12, ran.err
    found = json.loads(ran.out)
    assert (found["basis"], found["reference"], found["verdict"]) == ("blocks", "before", "inconclusive")
    assert {one["ratio"] for one in found["comparison"]} == {1.0}

    def longer(document: dict[str, Any]) -> None:
        document["max_tokens"] = 512

    refused = buildctl("compare", f"before={measured.folder}", f"after={copied(other, tmp_path / 'x', longer)}")
    assert refused.code == 13, refused.err
    assert "max_tokens differs" in refused.err
    assert "64 | 512" in refused.err


def test_an_interrupted_benchmark_keeps_its_folder(demo_image: str, models: Path, cache: str, tmp_path: Path) -> None:
    """K6-1, starting: TERM goes on to the container, which is waited for."""
    seen = ""
    with subprocess.Popen([sys.executable, "-m", "buildctl", *words(demo_image, models, tmp_path / "out", cache), "--",
                           *SHORT], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            seen += line
            if ": starting " in line:
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 130, seen
    assert "entrypoint: stopped by SIGTERM" in seen
    (run,) = (tmp_path / "out").iterdir()
    assert f"--resume {run}" in seen
    assert json.loads((run / "result.json").read_text())["status"] == "aborted"
    assert json.loads((run / "binding.json").read_text())["run_id"] == run.name
    assert containers(cache) == ""


@pytest.fixture
def simulated(demo_image: str, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two images whose server is simulated: the second one's decodes 20 % faster, in both arms."""
    names = []
    for place, rate in enumerate((300.0, 360.0)):
        folder, key = tmp_path / f"image-{place}", f"{place}" * 64
        folder.mkdir()
        shutil.copy(ROOT / "tests" / "fakes" / "sim_server.py", folder)
        (folder / "python").write_text('#!/bin/sh\nexec /opt/venv/bin/python /sim/sim_server.py "$@"\n')
        (folder / "python").chmod(0o755)
        (folder / "sim.json").write_text(json.dumps({"state": "/tmp/starts", "seed": 1, "arms": {
            "baseline": {"rate": rate}, "eagle3": {"rate": 2 * rate, "tau": 2.0}}}))
        image_facts.write(folder, key=key, python="/sim/python", packages={"sglang": "0.5.23"}, profile={
            "sglang": "0.5.23", "environment": {"SIM_SERVER": "/sim/sim.json"}, "server": {"mem-fraction-static": 0.5},
            "arms": {"baseline": {}, "eagle3": {"speculative-algorithm": "EAGLE3", "speculative-num-steps": 3}}})
        (folder / "Dockerfile").write_text(
            f"FROM {demo_image}\nCOPY sim_server.py python sim.json /sim/\nCOPY image.json /etc/buildctl/image.json\n"
            f"LABEL buildctl.key={key} buildctl.stack=sim\n")
        names.append(f"{PREFIX}-sim-{place}:{time.monotonic_ns()}")
        docker("buildx", "build", "--quiet", "--tag", names[-1], str(folder))
    yield names[0], names[1]
    docker("rmi", *names, check=False)


def test_two_images_run_alternately_and_are_compared(simulated: tuple[str, str], cache: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = buildctl("bench", *simulated, "--rounds", "2", "--model", "m", "--draft", "d", "--out", str(out), "--cache",
                   cache, "--json", "--", "--passes", "1", "--prompts-per-stratum", "1", "--max-tokens", "64",
                   "--task-check", "0")
    assert ran.code in VALID, ran.err
    document = json.loads(ran.out)
    assert [one["image"] for one in document["runs"]] == [simulated[0]] * 2 + [simulated[1]] * 2
    found = document["comparison"]
    assert found["exit_code"] == ran.code
    assert (found["basis"], found["allowance"]) == ("interleaved", 0.0)
    assert found["reference"].endswith(f", {'0' * 12})")
    first = found["comparison"][0]
    assert (first["arm"], first["runs"]) == ("eagle3", [2, 2])
    assert first["ratio"] == pytest.approx(1.2, rel=0.25), "a busy machine slows whole runs"
    assert {one["verdict"] for one in document["runs"]} == {"inconclusive"}, "one pair each"
    assert len(list(out.glob("*/binding.json"))) == 4
    assert containers(cache) == ""


def test_an_engine_without_gpus_is_named(tmp_path: Path, cache: str) -> None:
    name = f"{PREFIX}-gpu:{time.monotonic_ns()}"
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    labels = 'LABEL buildctl.targets="12.0" buildctl.key="' + "ab" * 32 + '"'
    docker("import", "--change", labels, "--change", 'ENTRYPOINT ["/none"]', str(tmp_path / "empty.tar"), name)
    try:
        ran = buildctl("bench", name, "--model", "org/model", "--out", str(tmp_path / "out"), "--cache", cache)
    finally:
        docker("rmi", name)
    assert ran.code == 9, ran.err
    assert "the engine has no GPU runtime" in ran.err
    assert "nvidia-container-toolkit" in ran.err
    assert list((tmp_path / "out").iterdir()) == []
    assert containers(cache) == ""
