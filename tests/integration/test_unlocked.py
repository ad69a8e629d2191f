"""--allow-unlocked, for real: small made-up wheels from two indexes of this machine, installed by a real build."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from buildctl import lock as locks
from buildctl.project import Project
from tests.conftest import ROOT
from tests.integration.conftest import PREFIX, buildctl, docker, remove_images
from tests.unit.index import Index

pytestmark = pytest.mark.engine

STACK = """\
description: torch from an index that is out of reach when the lock is made
tag: {tag}
python: "3.11"
glibc: "2.36"
base: {{bootstrap: {{suite: bookworm}}}}
targets: [cpu]
layers: [cuda, torch, sglang]
indexes:
  - {{name: special, url: "{url}", packages: [torch, kernel]}}
requirements:
  torch: [torch==2.9.1+cpu, helper==1.0]
  sglang: [sglang==0.5, kernel==1.0]
constraints:
  - {{requirement: deep<3, reason: held although the lock does not know it}}
profile:
  sglang: "0.5"
  server: {{enable-metrics: true}}
  arms: {{baseline: {{}}}}
"""


@pytest.fixture
def indexes() -> Iterator[tuple[Index, Index]]:
    """The public index and a special one, where build steps of the engine reach them."""
    gateway = json.loads(docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]["Gateway"]
    with Index(address=gateway) as public, Index(address=gateway) as special:
        flags = [f"    parser.add_argument('--filler-{number}', type=str)\n" for number in range(100)]
        parser = "".join(["def add_cli_args(parser):\n",
                          "    parser.add_argument('--enable-metrics', action='store_true')\n", *flags])
        # what the entrypoint needs of SGLang is looked for in its files
        words = "".join(f"# {line}\n" for line in (ROOT / "entrypoints" / "contract.toml").read_text().splitlines())
        public.add("sglang", "0.5", ["late==1.0"], files={
            "sglang/__init__.py": words, "sglang/launch_server.py": "", "sglang/srt/server_args.py": parser})
        for name, version in (("helper", "1.0"), ("helper", "2.0"), ("late", "1.0"), ("late", "2.0"), ("deep", "2.5"),
                              ("deep", "3.0"), ("torch", "2.9.1"), ("kernel", "1.0")):
            public.add(name, version)
        special.add("torch", "2.9.1+cpu", ["helper", "late", "deep"])
        special.add("kernel", "1.0", ["torch==2.9.1", "helper"], files={"kernel/special.py": ""})
        yield public, special


def test_what_no_lock_holds_is_resolved_held_to_the_lock_and_recorded(demo_image: str, tmp_path: Path,
                                                                      indexes: tuple[Index, Index]) -> None:
    public, special = indexes
    project = tmp_path / "project"
    for name in ("images", "patches", "entrypoints"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "stacks"))
    stacks = project / "images" / "stacks"
    stacks.mkdir()
    (stacks / "open.yaml").write_text(STACK.format(tag=f"{PREFIX}-unlocked", url=special.url))
    # the parts that all stacks share, so that nothing but the two indexes is asked
    shared = locks.read(ROOT / "images" / "stacks" / "cpu-demo.lock", Project(ROOT))
    (stacks / "open.lock").write_text(locks.dump(replace(shared, wheels=())))
    settings = {"UV_DEFAULT_INDEX": public.url, "PIP_INDEX_URL": public.url, "PIP_CONFIG_FILE": "/dev/null",
                "PIP_TRUSTED_HOST": public.address}
    special.faults.update({"/simple/torch/": 503, "/simple/kernel/": 503})
    locked = buildctl("lock", "open", "--json", cwd=project, UV_HTTP_RETRIES="0", **settings)
    assert locked.code == 0, locked.err
    assert json.loads(locked.out)["unlocked"] == ["kernel==1.0 of index 'special'",
                                                  "torch==2.9.1+cpu of index 'special'"]
    refused = buildctl("build", "--stack", "open", cwd=project, **settings)
    assert (refused.code, "torch==2.9.1+cpu of index 'special'" in refused.err) == (3, True)
    special.faults.clear()
    try:
        built = buildctl("build", "--stack", "open", "--allow-unlocked", "--progress", "plain", cwd=project, **settings)
        assert built.code == 0, built.err
        image = f"sglang:0.5-{PREFIX}-unlocked"
        code = ("import importlib.metadata as m, json; "
                "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()})); "
                "import kernel.special, torch, deep")
        said = docker("run", "--rm", "--entrypoint", "python", image, "-c", code)
        # late and helper as the lock has them although newer ones are there; torch and kernel from their own index
        assert json.loads(said) == {"sglang": "0.5", "late": "1.0", "helper": "1.0", "torch": "2.9.1+cpu",
                                    "kernel": "1.0", "deep": "2.5"}
        record = docker("run", "--rm", "--entrypoint", "cat", image, "/etc/buildctl/unlocked.txt").splitlines()
        assert dict(line.split("  # ") for line in record) == {
            "deep==2.5": sha(public, "deep-2.5"), "torch==2.9.1+cpu": sha(special, "torch-2.9.1+cpu"),
            "kernel==1.0": sha(special, "kernel-1.0"), "late==1.0": "of the lock, early",
            "helper==1.0": "of the lock, early"}
        facts = json.loads(docker("run", "--rm", "--entrypoint", "cat", image, "/etc/buildctl/image.json"))
        assert facts["unlocked"] == json.loads(locked.out)["unlocked"]
    finally:
        remove_images("open")


def sha(index: Index, name: str) -> str:
    """Digest of a wheel that an index offers."""
    return "sha256:" + hashlib.sha256(index.files[f"{name}-py3-none-any.whl"]).hexdigest()
