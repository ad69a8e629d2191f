"""Benchmark results beside the image that they are about: read from a folder, attached to a digest, read back.

The format is the entrypoint's (`entrypoints/result.schema.json`); only the few fields that matter here are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from buildctl import binding
from buildctl.binding import Binding
from buildctl.errors import AuditError, Problem, UsageError
from buildctl.image_config import Identity
from buildctl.oci import Descriptor
from buildctl.registry import Registry

ARTIFACT_TYPE = "application/vnd.sgl-buildctl.benchmark.v1+json"
#: files of a results folder that travel with the image, where they are there: enough to compute everything again.
#: Server logs stay behind; nobody knows what is in them.
_FILES = {"result.json": "application/json", "report.md": "text/markdown", "report.html": "text/html",
          "plan.json": "application/json", "context.json": "application/json", "blocks.jsonl": "application/x-ndjson",
          "requests.jsonl": "application/x-ndjson", binding.NAME: "application/json"}
_TITLE = "org.opencontainers.image.title"
_CREATED = "org.opencontainers.image.created"

Requirement = Literal["win", "equivalent"]
#: what a requirement accepts: an image that is not worse may go where `equivalent` is asked for
ACCEPTS: Mapping[str, frozenset[str]] = {"win": frozenset({"win"}), "equivalent": frozenset({"win", "equivalent"})}


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark result: its verdict, the content key of the image that ran, and its files."""

    verdict: str
    headline: str
    key: str
    created: str
    files: Mapping[str, bytes] = field(repr=False)
    #: the image's digests, where `buildctl bench` made the run
    bound: Binding | None = None
    #: where it lies in a registry; empty for a folder
    digest: str = ""

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {"verdict": self.verdict, "headline": self.headline, "key": self.key, "created": self.created,
                "digest": self.digest, "files": sorted(self.files)}


def read(folder: Path) -> Result:
    """The result in a folder that `benchmark` wrote. Raises `UsageError`."""
    path = folder / "result.json"
    try:
        files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
        return _parse(files["result.json"], files)
    except (KeyError, OSError, ValueError) as error:
        raise UsageError(Problem("no benchmark result in this folder", str(path), _reason(error),
                                 "the result.json of a finished benchmark",
                                 "name the run's own folder, as `benchmark` printed it")) from None


def check(result: Result | None, required: Requirement | None, identity: Identity, where: str) -> None:
    """Let an image pass only with a result of its own, and a good one where a verdict is required.

    Raises `AuditError` with everything that is wrong.
    """
    if result is None:
        raise AuditError(Problem("the image has no benchmark result", where, "", f"a verdict: {required}",
                                 "run its `benchmark`, then give --result DIR"))
    problems = binding.problems(result.bound, json.loads(result.files["result.json"]), result.files, identity.digests,
                                where)
    if result.key != identity.key or not identity.key:
        problems.append(Problem("the result is of another image", where, f"content key {result.key or '(none)'}",
                                identity.key or "an image with a content key", "benchmark this very image"))
    if required is not None and result.verdict not in ACCEPTS[required]:
        problems.append(Problem("the verdict is not good enough", where, f"{result.verdict}: {result.headline}",
                                " or ".join(sorted(ACCEPTS[required])), "see report.md of the run for the reasons"))
    if problems:
        raise AuditError(problems)


def attach(registry: Registry, repository: str, subject: Descriptor, result: Result) -> Descriptor:
    """Attach a result to an image; the same result is attached once."""
    annotations = {_CREATED: result.created, "buildctl.verdict": result.verdict, "buildctl.key": result.key}
    return registry.attach(repository, subject, ARTIFACT_TYPE,
                           {name: (_FILES[name], data) for name, data in result.files.items()},
                           {name: value for name, value in annotations.items() if value})


def attached(registry: Registry, repository: str, digest: str) -> tuple[Result, ...]:
    """The results attached to a digest, the newest last. One that cannot be read is left out."""
    found = []
    for entry in registry.referrers(repository, digest, ARTIFACT_TYPE):
        manifest = registry.manifest(repository, str(entry["digest"]))
        if manifest is None:
            continue
        files = {str(layer.get("annotations", {}).get(_TITLE, "")): registry.blob(repository, layer["digest"])
                 for layer in manifest.content.get("layers", [])}
        try:
            found.append(_parse(files["result.json"], {name: data for name, data in files.items() if name in _FILES},
                                manifest.digest))
        except (KeyError, ValueError):
            continue
    return tuple(sorted(found, key=lambda result: (result.created, result.digest)))


def _parse(text: bytes, files: Mapping[str, bytes], digest: str = "") -> Result:
    content: Any = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    verdict = content["verdict"]
    if not isinstance(verdict, dict):
        raise ValueError("its verdict is not an object")
    image = (content.get("plan") or {}).get("image") or {}
    bound = binding.parse(files[binding.NAME]) if binding.NAME in files else None
    return Result(str(verdict["class"]), str(verdict.get("headline", "")), str(image.get("key", "")),
                  str(content.get("ended_at") or content.get("started_at") or ""), files, bound, digest)


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
