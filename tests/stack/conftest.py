"""The real CUDA stack, built whole from the public index. Long, and 40 GB of disk: runs by `make test-stack` only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

STACK = "sglang-0.5.23-cu130"
SITE = "/opt/venv/lib/python3.11/site-packages"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Nothing of this folder runs unless it is asked for."""
    if "stack" in str(config.option.markexpr):
        return
    here = Path(__file__).parent
    chosen = [item for item in items if not item.path.is_relative_to(here)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@dataclass(frozen=True)
class Stack:
    """The built stack: image name -> tag, and what `buildctl build --json` said."""

    tags: Mapping[str, str]
    outcome: Mapping[str, Any]

    def run(self, image: str, code: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command in an image, without network, as its own user."""
        return subprocess.run(["docker", "run", "--rm", "--network", "none", "--entrypoint", "/bin/bash", *options,
                               self.tags[image], "-c", code], capture_output=True, text=True, check=False,
                              stdin=subprocess.DEVNULL)

    def ok(self, image: str, code: str, *options: str) -> str:
        """The output of a command that has to succeed."""
        done = self.run(image, code, *options)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


def buildctl(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    return subprocess.run([sys.executable, "-m", "buildctl", *words], cwd=ROOT, env={**os.environ, **env}, text=True,
                          capture_output=True, stdin=subprocess.DEVNULL, check=False)


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The default stack, built now or present already."""
    began = time.monotonic()
    done = buildctl("build", "--stack", STACK, "--json", "--progress", "plain")
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout)
    print(f"\nbuilt in {time.monotonic() - began:.0f} s")
    for image in outcome["images"]:
        print(f"  {image['tags'][0]:40} {image['bytes'] / 1e9:6.2f} GB compressed  {image['state']}")
    return Stack({image["image"]: image["tags"][0] for image in outcome["images"]}, outcome)
