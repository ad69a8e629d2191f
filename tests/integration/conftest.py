"""The real engine. Without one these tests fail; they are never skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from buildctl.engine import Engine
from tests.conftest import ROOT

PREFIX = "inttest"


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str


def buildctl(*words: str, cwd: Path = ROOT, **env: str) -> Ran:
    """Run the command line as a user does."""
    done = subprocess.run([sys.executable, "-m", "buildctl", *words], cwd=cwd, env={**os.environ, **env},
                          capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def docker(*words: str, check: bool = True) -> str:
    """Run the docker client."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


@pytest.fixture(scope="session", autouse=True)
def engine() -> Engine:
    """A connected engine."""
    found = Engine()
    found.facts()  # raises, with what to do, when there is none
    return found


@pytest.fixture(scope="session")
def demo_image() -> str:
    """The image of the CPU demo, built from this checkout, by its key tag: the version tag is every checkout's."""
    ran = buildctl("build", "--stack", "cpu-demo", "--progress", "plain", "--json")
    assert ran.code == 0, ran.err
    image = next(image for image in json.loads(ran.out)["images"] if image["image"] == "sglang")
    return str(next(tag for tag in image["tags"] if ":key-" in tag))


@pytest.fixture(scope="session")
def models(demo_image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft with an accept length of 2 by construction."""
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o777)
    docker("run", "--rm", "-v", f"{folder}:/models", demo_image, "python",
           "/opt/entrypoint/lib/entrypoints/demo_model.py", "/models")
    return folder


def copy_project(target: Path, layers: str = "[cuda]") -> Path:
    """A project like this checkout, with a stack `tiny` of the lowest layer: its steps are in the cache already."""
    for name in ("images", "patches", "entrypoints"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.lock"))
    text = (ROOT / "images" / "stacks" / "cpu-demo.yaml").read_text()
    if layers == "[cuda]":
        text = text.split("indexes:")[0] + "profile:" + text.split("profile:")[1]
    text = text.replace("tag: cpu-demo", f"tag: {PREFIX}-{target.name.lower()}")
    text = text.replace("[cuda, torch, sglang]", layers)
    for path in (target / "images" / "stacks").glob("*.yaml"):
        path.unlink()
    (target / "images" / "stacks" / "tiny.yaml").write_text(text)
    shutil.copy(ROOT / "images" / "stacks" / "cpu-demo.lock", target / "images" / "stacks" / "tiny.lock")
    ran = buildctl("lock", "tiny", cwd=target)
    assert ran.code == 0, ran.err
    return target


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A project with a tiny stack; its images are removed afterwards."""
    project = copy_project(tmp_path / f"p{os.getpid()}")
    yield project
    remove_images()


def remove_images(stack: str = "tiny") -> None:
    """Remove everything that stacks of a name made, under whatever tags."""
    made = docker("images", "--filter", f"label=buildctl.stack={stack}", "--format", "{{.Repository}}:{{.Tag}}").split()
    if made:
        docker("rmi", "--force", *made, check=False)
