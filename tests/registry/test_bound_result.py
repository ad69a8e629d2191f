"""From a run on the engine to a gate in a registry: the image that was measured is the one that is promoted."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from buildctl import binding
from buildctl.commands import promote
from buildctl.engine import Engine
from tests.registry.conftest import Ran, fast_push, run
from tests.registry.images import Images
from tests.registry.proxy import FaultProxy

pytestmark = pytest.mark.engine
KEY = "ab" * 32


def measured(folder: Path, name: str) -> Path:
    """What a run of an image leaves, bound by the engine's own words."""
    folder.mkdir()
    plan = {"run_id": "r", "image": {"key": KEY}}
    for file, text in (("plan.json", json.dumps(plan)), ("context.json", "{}"), ("blocks.jsonl", ""),
                       ("requests.jsonl", "")):
        (folder / file).write_text(text)
    with closing(Engine()) as engine:
        image = engine.image(name)
        assert image is not None
        bound = binding.write(folder, name, image, engine.info())
    (folder / "result.json").write_text(json.dumps(
        {"run_id": "r", "raw_sha256": bound["raw_sha256"], "plan": plan, "verdict": {"class": "win"}}))
    return folder


def gate(proxy: FaultProxy, name: str, folder: Path) -> Ran:
    return run(promote.command, f"{proxy.host}/{name}", "--to", "stable", "--require-verdict", "win", "--result",
               str(folder), "--attempts", "2", "--wait", "0.01")


def test_what_was_measured_on_the_engine_passes_after_its_push_and_nothing_else(
        proxy: FaultProxy, images: Images, tmp_path: Path) -> None:
    labels = {"buildctl.key": KEY}
    name, twin = images.make("a:1", labels=labels), images.make("a:2", labels=labels)
    folder = measured(tmp_path / "run", name)
    for one in (name, twin):
        assert fast_push(one, "--to", proxy.host).code == 0
    refused = gate(proxy, "regtest-a:2", folder)
    assert refused.code == 7
    assert "the result is of another image" in refused.text
    done = gate(proxy, "regtest-a:1", folder)
    assert done.code == 0, done.text
    assert images.digest(name) in done.out
    (folder / "requests.jsonl").write_text('{"faster": true}\n')
    assert "raw files are not those" in gate(proxy, "regtest-a:1", folder).text
