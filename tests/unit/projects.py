"""A small project on disk, for tests: three images, one stack, one lock, no network."""

from __future__ import annotations

import textwrap
from pathlib import Path

from buildctl import lock as locks
from buildctl import stack
from buildctl.lock import Lock, LockedBase, Wheel
from buildctl.project import Project
from buildctl.stack import Stack

IMAGES = {
    "tools": ("description: tools\napt: [tini]\nrequirements: [uv]\n",
              "FROM base AS tools\nRUN --mount=type=bind,source=layers/tools,target=/layer sh /layer/x\n\n"
              "FROM tools AS entrypoint-env\nRUN true\n\n"
              "FROM entrypoint-env AS entrypoint\nCOPY entrypoints /opt/lib\n"),
    "cuda": ("description: base\napt: [python3]\n",
             "# bottom\nFROM base AS system\nRUN --mount=type=bind,source=layers/cuda/system,target=/l true\n\n"
             "FROM system AS layer\n"
             "RUN --mount=type=bind,from=tools,source=/opt/tools,target=/t \\\n"
             "    --mount=type=bind,source=layers/cuda/wheels,target=/l true\n"),
    "torch": ("description: torch\nparent: cuda\nversion_of: torch\n",
              "FROM parent AS layer\nRUN --mount=type=bind,source=layers/torch/wheels,target=/l true\n"
              "RUN --mount=type=bind,source=layers/torch/own,target=/l true\n"),
    "extra": ("description: extra\nparent: torch\nversion_of: extra\n", "FROM parent AS layer\nRUN true\n"),
    "sglang": ("description: sglang\nparent: extra\nversion_of: sglang\npatches: [sglang]\n",
               "FROM parent AS layer\nRUN --mount=type=bind,source=layers/sglang/wheels,target=/l true\n"
               "RUN --mount=type=bind,source=layers/sglang/own,target=/l true\n"
               "RUN --mount=type=bind,source=layers/sglang/patches,target=/s true\n"),
    "runtime": ("description: last stage\nrequirements: [h11]\n",
                "FROM parent AS layer\nARG IMAGE\nCOPY --link --from=entrypoint /opt/lib /opt/lib\n"
                "COPY --link image/${IMAGE}/ /etc/buildctl/\nUSER 1000\n"),
}

STACK = """\
description: a small stack
tag: small
python: "3.11"
glibc: "2.36"
base:
  image: debian:bookworm-slim
  bootstrap: {suite: bookworm}
targets: [cpu]
layers: [cuda, torch, sglang]
indexes:
  - {name: special, url: "https://index.example/simple", packages: [torch]}
requirements:
  torch: [torch==2.0]
  sglang: [sglang==0.5]
local:
  sglang: [sglang/packages/ours]
patches:
  sglang: sglang/0.5
profile:
  sglang: "0.5"
  environment: {A: "1"}
  server: {mem-fraction-static: 0.5, max-running-requests: 4, enable-metrics: true}
  arms:
    baseline: {}
    eagle3:
      speculative-algorithm: EAGLE3
      speculative-num-steps: 3
      speculative-eagle-topk: 1
      speculative-num-draft-tokens: 4
"""

PATCH = """\
Description: a change
 because of the test
Origin: us
Forwarded: not-needed
Last-Update: 2026-12-01
Concern: change
Targets: cpu
Files: sglang/a.py
Marker: changed
Tested: cpu
---
--- a/sglang/a.py
+++ b/sglang/a.py
@@ -1,3 +1,3 @@
 one = 1
-two = 2
+two = "changed"
 three = 3
"""


def make(root: Path, stack_text: str = STACK) -> Project:
    """Write the project and return it."""
    for name, (manifest, dockerfile) in IMAGES.items():
        folder = root / "images" / name
        folder.mkdir(parents=True)
        (folder / "image.yaml").write_text(manifest)
        (folder / "Dockerfile").write_text(dockerfile)
    scripts = root / "images" / "tools" / "bin" / "wheels"
    scripts.mkdir(parents=True)
    (scripts / "install").write_text("#!/bin/sh\n")
    (scripts / "install").chmod(0o755)
    (root / "images" / "tools" / "bin" / "patches").mkdir()
    package = root / "images" / "sglang" / "packages" / "ours"
    package.mkdir(parents=True)
    (package / "pyproject.toml").write_text('[project]\nname = "ours"\nversion = "1.0"\n')
    series = root / "patches" / "sglang" / "0.5"
    series.mkdir(parents=True)
    (series / "series").write_text("0001-change.patch\n")
    (series / "0001-change.patch").write_text(PATCH)
    (root / "entrypoints").mkdir()
    (root / "entrypoints" / "__init__.py").write_text('"""entry"""\n')
    (root / "images" / "stacks").mkdir()
    (root / "images" / "stacks" / "small.yaml").write_text(textwrap.dedent(stack_text))
    return Project(root)


def wheel(name: str, version: str = "1.0", layer: str = "torch", **rest: object) -> Wheel:
    """A locked wheel with a made-up hash."""
    fields = {"index": locks.PUBLIC, "file": f"{name}-{version}-py3-none-any.whl", "sha256": "ab" * 32, "size": 1000,
              "via": (".",), "requires": (), **rest}
    return Wheel(name=name, version=version, layer=layer, **fields)  # type: ignore[arg-type]


def lock_of(project: Project, loaded: Stack) -> Lock:
    """A lock that fits the stack, as if resolved."""
    series = {package: locks.LockedSeries(folder, "cd" * 32, (("0001-change.patch", "ef" * 32),), "12" * 32)
              for package, folder in loaded.patches.items()}
    return Lock(stack=loaded.name, python=loaded.python, platform=loaded.platform,
                base=LockedBase("bootstrap", suite="bookworm"),
                wheels=(wheel("torch", "2.0+cpu", "torch", index="special"), wheel("needed", layer="torch"),
                        wheel("sglang", "0.5", "sglang"), wheel("helper", "3", "sglang")),
                entrypoint=(wheel("h11", "0.16", ""),), tools=(wheel("uv", "0.9", ""),), patches=series,
                local=locks.local_of(loaded, project), epoch=1_700_000_000, inputs=locks.inputs_of(loaded, project),
                debian=DEBIAN)


#: Debian packages of a lock
DEBIAN = {"base": {"apt": f"2.6.1 sha256:{'a1' * 32}", "libc6": f"2.36-9 sha256:{'a2' * 32}"},
          "cuda": {"python3": f"3.11.2 sha256:{'a3' * 32}"}, "tools": {"tini": f"0.19 sha256:{'a4' * 32}"}}


def ready(root: Path, stack_text: str = STACK) -> tuple[Project, Stack, Lock]:
    """A project with a written lock."""
    project = make(root, stack_text)
    loaded = stack.load(project, "small")
    lock = lock_of(project, loaded)
    locks.path_of(loaded).write_text(locks.dump(lock))
    return project, loaded, lock
