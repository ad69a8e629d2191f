"""Which image made a benchmark run: binding.json in the run's folder, written by `bench`, checked before a promotion.

The entrypoint knows the content key of its image; only the host knows the digest under which the engine had it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildctl.engine import LocalImage
from buildctl.errors import AuditError, Problem
from buildctl.image_config import KEY_LABEL

NAME = "binding.json"
SCHEMA = 1
#: the files that a result follows from, in the order in which they are hashed (entrypoints/result.schema.json)
RAW = ("plan.json", "context.json", "blocks.jsonl", "requests.jsonl")


@dataclass(frozen=True, slots=True)
class Binding:
    """A run and its image: digests by which a registry or an engine knows the image, and the hash of the raw files."""

    run_id: str
    raw_sha256: str
    digests: frozenset[str]


def raw_digest(files: Mapping[str, bytes]) -> str:
    """The hash that result.json has as `raw_sha256`."""
    def one(name: str) -> str | None:
        return hashlib.sha256(files[name]).hexdigest() if name in files else None

    return hashlib.sha256("".join(f"{name} {one(name)}\n" for name in RAW).encode()).hexdigest()


def write(folder: Path, reference: str, image: LocalImage, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Bind a run to the image that was started; the document.

    :param engine: the engine's own words (`docker info`).
    :raises AuditError: the run says that it was made by another image.
    """
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    key = image.labels.get(KEY_LABEL, "")
    if plan["image"]["key"] != key:
        raise AuditError(Problem("the run was made by another image than the one that was started", str(folder),
                                 f"content key {plan['image']['key']}", key, "look at /etc/buildctl in the image"))
    files = {name: (folder / name).read_bytes() for name in RAW if (folder / name).is_file()}
    document = {
        "schema": SCHEMA, "run_id": plan["run_id"], "raw_sha256": raw_digest(files),
        "image": {"reference": reference, "digest": image.digest or None, "id": image.id, "key": key,
                  "stack": image.labels.get("buildctl.stack", ""), "lock_sha256": plan["image"].get("lock_sha256")},
        "engine": {"version": engine.get("ServerVersion"), "system": engine.get("OperatingSystem"),
                   "kernel": engine.get("KernelVersion"), "architecture": engine.get("Architecture"),
                   "cpus": engine.get("NCPU"), "memory_bytes": engine.get("MemTotal"),
                   "runtimes": sorted(engine.get("Runtimes") or ())}}
    spare = folder / f".{NAME}.{os.getpid()}"
    spare.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    spare.replace(folder / NAME)
    return document


def parse(text: bytes) -> Binding:
    """A binding from its file. Raises `ValueError` or `KeyError` for one that is none."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content["image"], dict):
        raise ValueError(f"{NAME} is not of schema {SCHEMA}")
    image = content["image"]
    return Binding(str(content["run_id"]), str(content["raw_sha256"]),
                   frozenset(str(image[name]) for name in ("digest", "id") if image.get(name)))


def problems(bound: Binding | None, result: Mapping[str, Any], files: Mapping[str, bytes], digests: Iterable[str],
             where: str) -> list[Problem]:
    """What speaks against a result being about an image that a registry knows by `digests`.

    A result without a binding (plain `docker run`) is held to what its own files say; a raw file that is missing counts
    as another one. A lone result.json has nothing to be held to.
    """
    said = str(result.get("raw_sha256", ""))
    found = []
    if any(name in files for name in RAW) and (computed := raw_digest(files)) != said:
        found.append(Problem("the run's raw files are not those that the result was computed from", where, computed,
                             said or "a hash", "`entrypoint analyze` computes the result again"))
    if bound is None:
        return found
    if (bound.run_id, bound.raw_sha256) != (str(result.get("run_id", "")), said):
        found.append(Problem(f"{NAME} belongs to another run", where, f"{bound.run_id} {bound.raw_sha256[:16]}",
                             f"{result.get('run_id', '')} {said[:16]}", "benchmark again with `buildctl bench`"))
    known = frozenset(digests)
    if not bound.digests & known:
        found.append(Problem("the result is of another image", where, ", ".join(sorted(bound.digests)) or "no digest",
                             " or ".join(sorted(known)), "benchmark this very image"))
    return found
