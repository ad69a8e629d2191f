"""Many lives of a server in one container leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.endurance import leaks
from tests.unit.entrypoints.image import document, write
from tests.unit.entrypoints.serving import FAULT_SERVER

SCRIPT = Path(__file__).with_name("cycles.py")


def line(cycle: int, **changes: Any) -> dict[str, Any]:
    return {"cycle": cycle, "clean": True, "processes": [], "shm": [], "ports": [], "temporary": ["server.log"],
            "fds": 4, "rss_kb": 21000, **changes}


@pytest.mark.parametrize(("change", "said"), [
    ({"clean": False}, "cycle 1: the stop was not clean"),
    ({"processes": ["sglang::schedul"]}, "cycle 1: processes left: sglang::schedul"),
    ({"shm": ["psm_1"]}, "cycle 1: shm left: psm_1"),
    ({"ports": [31000]}, "cycle 1: ports left: 31000"),
    ({"temporary": ["server-x/a", "server.log"]}, "cycle 1: temporary files left: server-x/a"),
    ({"fds": 5}, "cycle 1: 5 open descriptors, 4 after the first"),
    ({"error": "server died"}, "cycle 1: server died"),
])
def test_each_leak_is_named(change: dict[str, Any], said: str) -> None:
    assert leaks.complaints([line(0), line(1, **change)]) == [said]


def test_memory_may_settle_and_not_grow() -> None:
    assert leaks.complaints([line(n, rss_kb=15000 + min(n, 3) * 2000) for n in range(20)]) == []
    assert leaks.complaints([line(n, rss_kb=20000 + n * 300) for n in range(20)]) == [
        "the runner's own memory grew by 3600 KiB"]


def test_a_stand_in_leaves_nothing(tmp_path: Path) -> None:
    """The script itself, on the fault server."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        f"import runpy\nrunpy.run_path({str(FAULT_SERVER)!r}, run_name='__main__')\n", encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    profile = {**document()["profile"], "environment": {"PYTHONPATH": str(tmp_path / "site"), "FAULT_SCRIPT": "{}"}}
    count = int(os.environ.get("ENDURANCE_CYCLES", "3"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(count), "/models/target"], text=True, capture_output=True, check=False,
        cwd=tmp_path, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"),
                           "ENTRYPOINT_IMAGE_FILE": str(write(tmp_path, profile=profile))})
    assert done.returncode == 0, done.stdout + done.stderr
    cycles = [json.loads(text) for text in done.stdout.splitlines()]
    assert len(cycles) == count
    # other processes and listeners of this machine are none of the server's: only a container shows them alone
    assert leaks.complaints([{**one, "processes": [], "ports": [], "shm": []} for one in cycles]) == []


@pytest.mark.endurance
@pytest.mark.engine
@pytest.mark.server
def test_fifty_lives_of_the_real_server(tmp_path: Path) -> None:
    """Both arms in turn, read-only root, in one container: no process, port, descriptor, segment or file is left."""
    from tests.integration.conftest import buildctl, docker
    ran = buildctl("build", "--stack", "cpu-demo", "--progress", "plain", "--json")
    assert ran.code == 0, ran.err
    image = next(tag for one in json.loads(ran.out)["images"] if one["image"] == "sglang" for tag in one["tags"]
                 if ":key-" in tag)
    models = tmp_path / "models"
    models.mkdir()
    models.chmod(0o777)
    docker("run", "--rm", "-v", f"{models}:/models", image, "python",
           "/opt/entrypoint/lib/entrypoints/demo_model.py", "/models")
    # without HEALTHCHECK: its processes would be taken for the server's
    out = docker("run", "--rm", "--no-healthcheck", "--read-only", "--tmpfs", "/tmp", "-v", f"{models}:/models:ro",
                 "-v", f"{SCRIPT}:/cycles.py:ro", "--env", "PYTHONPATH=/opt/entrypoint/lib", image,
                 "/opt/entrypoint/venv/bin/python", "/cycles.py", os.environ.get("ENDURANCE_CYCLES", "50"),
                 "/models/target", "/models/draft", check=False)
    print(out)
    assert leaks.complaints([json.loads(text) for text in out.splitlines()]) == []
