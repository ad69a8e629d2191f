"""A whole build with the network of every step off, from what `buildctl fetch` brought."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.stack.conftest import buildctl

pytestmark = pytest.mark.stack
STACK = "cpu-demo"


def test_the_demo_builds_from_a_wheelhouse_without_any_network(tmp_path: Path) -> None:
    house = tmp_path / "house"
    fetched = buildctl("fetch", STACK, "--to", str(house), "--json", "--progress", "plain")
    assert fetched.returncode == 0, fetched.stderr[-3000:]
    said = json.loads(fetched.stdout)
    assert said["wheels"] == len(list(house.glob("*.whl")))
    assert any(name.startswith("python3") for name in said["apt"]["cuda"])
    # every step runs again: a step without network is another step to BuildKit
    env = dict.fromkeys(("UV_DEFAULT_INDEX", "PIP_INDEX_URL"), "http://127.0.0.1:9/")
    built = buildctl("build", "--stack", STACK, "--offline", "--no-cache", "--wheelhouse", str(house), "--json",
                     "--progress", "plain", **env)
    assert built.returncode == 0, built.stderr[-3000:]
    assert all(image["state"] == "built" for image in json.loads(built.stdout)["images"])
    assert not re.search(r"Downloading|https?://(?!127)", built.stderr)
    # nothing is fetched twice
    again = json.loads(buildctl("fetch", STACK, "--to", str(house), "--json", "--progress", "plain").stdout)
    assert again["new"] == 0
    # and what is missing is named before anything runs
    next(house.glob("transformers-*.whl")).unlink()
    refused = buildctl("build", "--stack", STACK, "--offline", "--no-cache", "--wheelhouse", str(house))
    assert refused.returncode == 3
    assert "no transformers-" in refused.stderr
