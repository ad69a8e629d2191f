"""A build from composition to proof: what is there already, disk, rendering, engine, and what came out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildctl import plan, rendering
from buildctl.compose import INDEX_VARIABLE, Composition, ImagePlan
from buildctl.engine import Baked, Engine
from buildctl.errors import AuditError, Problem, ResourceError
from buildctl.host import Host
from buildctl.progress import Mode
from buildctl.project import Project

#: free bytes of a builder whose disk cannot be seen from here, as its owner states them
FREE_DISK = "BUILDCTL_FREE_DISK"


@dataclass(frozen=True, slots=True)
class Built:
    """An image that is proved to be there."""

    image: ImagePlan
    digest: str
    size: int
    #: whether this run made it, or it was there already
    fresh: bool

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"image": self.image.name, "tags": list(self.image.tags), "digest": self.digest, "bytes": self.size,
                "key": self.image.key.value, "fresh": self.fresh}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a build did."""

    images: tuple[Built, ...]
    baked: Baked | None
    seconds: float
    log: Path | None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"images": [built.as_dict() for built in self.images], "seconds": round(self.seconds, 3),
                "log": str(self.log) if self.log else None,
                "build": self.baked.record.as_dict() if self.baked else None}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a build."""

    images: tuple[str, ...] = ()
    builder: str | None = None
    no_cache: bool = False
    show: Mode = "auto"


def build(project: Project, composition: Composition, host: Host, engine: Engine, request: Request, cache: Path,
          say: Callable[[str], None]) -> Outcome:
    """Build images and prove that they are there.

    Images whose content key the engine already has under their tags are not built again.

    :raises BuildctlError: of the class that fits; what was built stays in the engine's cache.
    """
    began = time.monotonic()
    wanted = [composition.image(name) for name in request.images] or list(composition.images)
    present = {} if request.no_cache else {image.name: found for image in wanted if (found := _present(engine, image))}
    todo = [image for image in wanted if image.name not in present]
    record_path = project.work / composition.stack.name / "record.json"
    if not todo:
        return Outcome(tuple(present[image.name] for image in wanted), None, time.monotonic() - began, None)

    facts = engine.facts()
    _check_disk(plan.make(composition, [image.name for image in todo], plan.read_record(record_path)).disk, facts.free,
                facts.root)
    folder = rendering.folder_of(project, composition.stack.name)
    rendering.render(composition, folder, cache, say)
    log = project.work / composition.stack.name / "logs" / f"build-{time.strftime('%Y%m%d-%H%M%S')}.log"
    loads = engine.driver(request.builder) != "docker" if request.builder else not facts.containerd_store
    settings = ["*.output=type=docker"] if loads else []
    secrets = {INDEX_VARIABLE: config} if (config := host.uv_config()) is not None else {}
    baked = engine.bake(folder, [image.stage for image in todo], log, show=request.show,
                        builder=request.builder, no_cache=request.no_cache, settings=settings, environment=secrets)
    made = prove(engine, todo, baked.digests)
    plan.write_record(record_path, todo)
    return Outcome(tuple(present.get(image.name) or made[image.name] for image in wanted), baked,
                   time.monotonic() - began, log)


def prove(engine: Engine, images: Sequence[ImagePlan], digests: Mapping[str, str]) -> dict[str, Built]:
    """Ask the engine for what a build is said to have made.

    :raises AuditError: with everything that is missing or different.
    """
    problems, found = [], {}
    for image in images:
        for tag in image.tags:
            there = engine.image(tag)
            if there is None:
                problems.append(Problem("the build ended well and the image is not there", tag, found="no such image",
                                        expected=f"an image with key {image.key.value[:16]}",
                                        todo="look at the engine's disk and log; build again with --no-cache"))
                continue
            key = there.labels.get("buildctl.key", "none")
            if key != image.key.value:
                problems.append(Problem("the image is not the one that was planned", tag, found=f"key {key[:16]}",
                                        expected=f"key {image.key.value[:16]}",
                                        todo="was it built by two runs at once? build again"))
            digest = digests.get(image.stage, "")
            if digest and there.digest and there.digest != digest:
                problems.append(Problem("the tag holds another image than the build made", tag, found=there.digest,
                                        expected=digest, todo="was it built by two runs at once? build again"))
            found[image.name] = Built(image, there.digest or there.id, there.size, True)
    if problems:
        raise AuditError(problems)
    return found


def _present(engine: Engine, image: ImagePlan) -> Built | None:
    found = None
    for tag in image.tags:
        found = engine.image(tag)
        if found is None or found.labels.get("buildctl.key") != image.key.value:
            return None
    return Built(image, found.digest or found.id, found.size, False) if found else None


def _check_disk(needed: int, free: int | None, where: str) -> None:
    stated = os.environ.get(FREE_DISK, "")
    if stated.isdigit():
        free, where = int(stated), f"{where} ({FREE_DISK})"
    if free is not None and free < needed:
        raise ResourceError(Problem("not enough disk for this build", where, found=f"{free / 1e9:.1f} GB free",
                                    expected=f"about {needed / 1e9:.1f} GB",
                                    todo="`docker buildx prune` and `docker image prune` free space that nothing uses"))
