"""Builds on the real engine: what comes out, what is rebuilt, what goes wrong and how that is said."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildctl import lock as locks
from buildctl.engine import Engine
from buildctl.project import Project
from tests.conftest import ROOT
from tests.integration.conftest import PREFIX, buildctl, copy_project, docker, remove_images
from tests.registry.proxy import Fault, FaultProxy
from tests.registry.server import RegistryServer

pytestmark = pytest.mark.engine


def inspect(tag: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(docker("image", "inspect", tag))[0]
    return found


def content(tag: str) -> dict[str, Any]:
    """Layers and configuration; the commit that an image was built at does not count."""
    found: dict[str, Any] = json.loads(docker("image", "inspect", tag))[0]
    found["Config"]["Labels"].pop("org.opencontainers.image.revision", None)
    return {"layers": found["RootFS"]["Layers"], "config": found["Config"], "created": found["Created"]}


def tags() -> set[str]:
    return set(docker("images", "--format", "{{.Repository}}:{{.Tag}}").split())


def steps_that_ran(err: str) -> list[str]:
    return sorted({match[1] for match in re.finditer(r"^\[([\w-]+ \d+/\d+)\] done in", err, re.MULTILINE)})


def test_the_demo_stack_has_its_tags_labels_and_user(demo_image: str) -> None:
    plan = json.loads(buildctl("plan", "--stack", "cpu-demo", "--json").out)
    for image in plan["images"]:
        assert set(image["tags"]) <= tags()
        config = inspect(image["tags"][0])["Config"]
        assert isinstance(config, dict)
        assert config["Labels"]["buildctl.key"] == image["key"]
        assert config["Labels"]["org.opencontainers.image.title"] == image["image"]
        assert config["User"] == "1000:1000"
    assert "uid=1000(sglang)" in docker("run", "--rm", demo_image, "bash", "-c", "id")
    assert {demo_image, "sglang:0.5.23-cpu-demo"} <= tags()


def test_the_image_tells_its_versions_and_checks_itself(demo_image: str) -> None:
    version = docker("run", "--rm", demo_image, "version")
    assert "sglang 0.5.23" in version
    assert re.search(r"torch +2\.13\.0\+cpu", version)
    checked = docker("run", "--rm", demo_image, "check")
    assert re.search(r"ok +packages", checked)
    assert re.search(r"ok +patches", checked)


def test_secrets_and_build_tools_are_not_in_the_image(demo_image: str) -> None:
    history = docker("history", "--no-trunc", demo_image)
    assert "BUILDCTL_INDEX" not in history
    left = docker("run", "--rm", "--user", "0", demo_image, "bash", "-c",
                  "ls /run/secrets /opt/tools /buildctl /layer /root/.cache 2>/dev/null; true")
    assert left.strip() == ""


def test_nothing_to_do_is_noticed_and_by_hand_it_is_the_same(demo_image: str) -> None:
    again = buildctl("build", "--stack", "cpu-demo")
    assert again.code == 0
    assert "nothing to build" in again.err
    assert again.out.count("present") == 3
    rendered = buildctl("render", "--stack", "cpu-demo", "--json")
    folder = json.loads(rendered.out)["folder"]
    # by hand first: an image outlives its steps in an engine's cache, and steps that run again make other layers
    subprocess.run(["docker", "buildx", "bake", "-f", "docker-bake.json"], cwd=folder, check=True, capture_output=True)
    by_hand = content(demo_image)
    plan = json.loads(buildctl("plan", "--stack", "cpu-demo", "--json").out)
    docker("rmi", "--force", *(tag for image in plan["images"] for tag in image["tags"]))
    built = buildctl("build", "--stack", "cpu-demo", "--progress", "plain")
    assert built.code == 0, built.err
    assert built.out.count("built") == 3
    assert steps_that_ran(built.err) == []
    assert content(demo_image) == by_hand


def test_a_patch_rebuilds_its_own_step_alone(demo_image: str, tmp_path: Path) -> None:
    project = copy_project(tmp_path / "patched", "[cuda, torch, sglang]")
    try:
        assert buildctl("build", "sglang", "--stack", "tiny", "--progress", "plain", cwd=project).code == 0
        folder = project / "patches" / "sglang" / "0.5.23-cpu"
        patch = next(folder.glob("0001-*.patch"))
        # never built before, so that nothing of it is in the engine's cache
        patch.write_text(patch.read_text().replace("stays the attention backend", f"stays backend {time.time_ns()}"))
        refused = buildctl("build", "sglang", "--stack", "tiny", cwd=project)
        assert refused.code == 3
        assert "changed since: patches" in refused.err
        assert buildctl("lock", "tiny", cwd=project).code == 0
        built = buildctl("build", "sglang", "--stack", "tiny", "--progress", "plain", cwd=project)
        assert built.code == 0, built.err
        ran = steps_that_ran(built.err)
        assert "sglang 1/1" in ran
        below = ("cuda", "torch", "tools", "entrypoint", "sglang-unpatched")
        assert not [step for step in ran if step.startswith(below) and "guard" not in step]
    finally:
        remove_images()


def test_a_mirror_that_moved_on_is_said_and_refused_when_asked(tiny: Path) -> None:
    """The lock names a version that no mirror has."""
    path = tiny / "images" / "stacks" / "tiny.lock"
    lock = locks.read(path, Project(tiny))
    cuda = {**lock.debian["cuda"], "libgomp1": "0-gone sha256:" + "0" * 64}
    path.write_text(locks.dump(replace(lock, debian={**lock.debian, "cuda": cuda})))
    built = buildctl("build", "--stack", "tiny", "--json", "--progress", "quiet", cwd=tiny)
    assert built.code == 0, built.err
    there = lock.debian["cuda"]["libgomp1"].split()[0]
    assert json.loads(built.out)["drift"]["libgomp1"] == ["0-gone", there]
    assert f"  libgomp1: 0-gone -> {there}" in built.err
    again = buildctl("build", "--stack", "tiny", "--strict", "--progress", "quiet", cwd=tiny)
    assert again.code == 7
    assert "libgomp1 0-gone" in again.err
    engine = Engine()
    tag = json.loads(built.out)["images"][0]["tags"][1]
    assert b'"libgomp1"' in (engine.file(tag, "/etc/buildctl/guard.json") or b"")
    assert engine.file(tag, "/etc/buildctl/none") is None
    assert engine.file("inttest-none:1", "/etc/passwd") is None


def test_a_failing_step_is_shown_with_its_last_lines(tiny: Path) -> None:
    path = tiny / "images" / "cuda" / "Dockerfile"
    path.write_text(path.read_text() + 'RUN echo "about to fail" && exit 3\n')
    ran = buildctl("build", "--stack", "tiny", "--progress", "quiet", cwd=tiny)
    assert ran.code == 6
    assert "about to fail" in ran.err
    assert "exit code: 3" in ran.err
    log = re.search(r"whole log: (\S+)", ran.err)
    assert log
    assert "about to fail" in (tiny / log[1]).read_text()
    assert not [tag for tag in tags() if PREFIX in tag]


def test_a_wheel_with_another_hash_is_refused_by_the_build(tiny: Path) -> None:
    """The lock is signed again after the change, so only the installation itself can notice."""
    project = Project(tiny)
    path = project.stacks / "tiny.lock"
    data = json.loads(path.read_text())
    next(wheel for wheel in data["entrypoint"] if wheel["name"] == "h11")["sha256"] = "0" * 64
    del data["sha256"]
    path.write_text(json.dumps({**data, "sha256": locks.digest(data)}))
    ran = buildctl("build", "--stack", "tiny", "--progress", "quiet", cwd=tiny)
    assert ran.code == 6
    assert "h11" in ran.err
    assert "ash mismatch" in ran.err or "hash" in ran.err


def test_an_index_that_does_not_answer(tiny: Path) -> None:
    before = (tiny / "images/stacks/tiny.lock").read_text()
    ran = buildctl("lock", "tiny", "--upgrade-all", cwd=tiny, UV_DEFAULT_INDEX="http://user:geheim@127.0.0.1:9/simple",
                   UV_HTTP_RETRIES="0")
    assert ran.code == 11
    assert "index does not answer" in ran.err
    assert "geheim" not in ran.out + ran.err
    assert (tiny / "images/stacks/tiny.lock").read_text() == before


def test_no_engine(tiny: Path) -> None:
    ran = buildctl("build", "--stack", "tiny", cwd=tiny, DOCKER_HOST="unix:///nowhere/docker.sock")
    assert ran.code == 9
    assert "engine does not answer" in ran.err
    assert "make engine" in ran.err
    assert "Traceback" not in ran.err


def test_a_nearly_full_disk(tiny: Path) -> None:
    ran = buildctl("build", "--stack", "tiny", "--json", cwd=tiny, BUILDCTL_FREE_DISK="100000000")
    assert ran.code == 8
    assert "0.1 GB free" in ran.err
    assert json.loads(ran.out)["error"]["retry"] == "after cleaning"
    assert not (tiny / ".buildctl" / "tiny" / "context").exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_running(tiny: Path, sent: signal.Signals) -> None:
    path = tiny / "images" / "cuda" / "Dockerfile"
    path.write_text(path.read_text() + "RUN echo started-the-long-step && sleep 333\n")
    process = subprocess.Popen([sys.executable, "-m", "buildctl", "build", "--stack", "tiny", "--progress", "plain"],
                               cwd=tiny, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                               env=dict(os.environ))
    assert process.stderr is not None
    for line in process.stderr:
        if "| started-the-long-step" in line:
            break
    process.send_signal(sent)
    rest = process.stderr.read()
    assert process.wait(timeout=30) == 130, rest
    assert "interrupted" in rest
    process.stderr.close()
    deadline = time.monotonic() + 15
    while running("sleep 333") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not running("sleep 333")
    assert not [tag for tag in tags() if PREFIX in tag]


def running(command: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().replace(b"\0", b" ").strip() == command.encode():
                return True
        except OSError:
            continue
    return False


def test_list_knows_the_stacks_of_this_checkout() -> None:
    ran = buildctl("list")
    assert ran.code == 0, ran.err
    assert "cpu-demo" in ran.out
    assert "sglang-0.5.23-cu130" in ran.out
    assert ROOT.is_dir()


def test_the_default_stack_plans_and_renders(tmp_path: Path) -> None:
    ran = buildctl("plan", "--json")
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    assert [image["image"] for image in plan["images"]] == ["cuda", "torch", "flashinfer", "sglang"]
    assert all(image["wheels"] > 0 for image in plan["images"])
    assert sum(image["wheel_bytes"] for image in plan["images"]) > 3_000_000_000
    rendered = buildctl("render", "--to", str(tmp_path / "out"))
    assert rendered.code == 0, rendered.err
    shown = subprocess.run(["docker", "buildx", "bake", "-f", "docker-bake.json", "--print"], cwd=tmp_path / "out",
                           check=True, capture_output=True, text=True).stdout
    assert set(json.loads(shown)["target"]) == {"cuda-image", "torch-image", "flashinfer-image", "sglang-image"}


def test_prune_takes_the_stages_of_a_build_that_was_killed_and_of_no_other(tiny: Path, tmp_path: Path) -> None:
    before = {tag for tag in tags() if ":chain-" in tag}

    def left() -> set[str]:
        return {tag for tag in tags() if ":chain-" in tag} - before

    with RegistryServer(tmp_path / "registry") as server, FaultProxy(server.host) as proxy:
        proxy.add(hang := Fault("PUT", "/blobs/uploads/", "hang"))
        with subprocess.Popen([sys.executable, "-m", "buildctl", "build", "--stack", "tiny", "--progress", "quiet",
                               "--push", proxy.host], cwd=tiny, stderr=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL) as process:
            while not hang.fired and process.poll() is None:
                time.sleep(0.01)
            assert buildctl("prune", cwd=tiny).code == 0
            stages = {tag for tag in left() if "/" not in tag}
            assert stages, "its run lives"
            process.kill()
        for tag in left() - stages:  # the name that the engine pushes under
            docker("rmi", tag)
    said = buildctl("prune", cwd=tiny)
    assert said.code == 0, said.err
    assert all(tag in said.out for tag in stages)
    assert left() == set()


def test_prune_takes_what_no_stack_makes_and_nothing_else(tiny: Path) -> None:
    first = json.loads(buildctl("build", "--stack", "tiny", "--json", cwd=tiny).out)["images"][0]
    (tiny / "entrypoints" / "__init__.py").write_text('"""changed"""\n')
    second = json.loads(buildctl("build", "--stack", "tiny", "--json", cwd=tiny).out)["images"][0]
    others = tags() - {*first["tags"], *second["tags"]}
    said = buildctl("prune", "--dry-run", cwd=tiny)
    assert first["tags"][1] in said.out
    assert second["tags"][1] not in said.out
    assert buildctl("prune", cwd=tiny).code == 0
    assert set(second["tags"]) <= tags()
    assert first["tags"][1] not in tags()
    assert others <= tags()
