"""A build from composition to proof: what is there already, disk, rendering, engine, and what came out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buildctl import plan, rendering
from buildctl.compose import INDEX_VARIABLE, ChainStage, Composition, ImagePlan
from buildctl.engine import Baked, Engine
from buildctl.errors import AuditError, Problem, ResourceError
from buildctl.host import Host
from buildctl.image_config import KEY_LABEL
from buildctl.progress import Mode
from buildctl.project import Project
from buildctl.resume import Found

#: free bytes of a builder whose disk cannot be seen from here, as its owner states them
FREE_DISK = "BUILDCTL_FREE_DISK"
_NOTHING = Found({}, {})


@dataclass(frozen=True, slots=True)
class Built:
    """An image that is proved to be there."""

    image: ImagePlan
    digest: str
    #: bytes as the engine counts; 0 for an image that only a registry has
    size: int
    #: `built` by this run, `present` in the engine, or `published` in the registry
    state: str

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"image": self.image.name, "tags": list(self.image.tags), "digest": self.digest, "bytes": self.size,
                "key": self.image.key.value, "state": self.state}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a build did."""

    images: tuple[Built, ...]
    #: chain stages that the engine now has under their tags, for publishing
    chain: tuple[ChainStage, ...]
    baked: Baked | None
    seconds: float
    log: Path | None
    #: stages that were taken from a registry
    resumed: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"images": [built.as_dict() for built in self.images], "seconds": round(self.seconds, 3),
                "resumed": dict(self.resumed), "log": str(self.log) if self.log else None,
                "build": self.baked.record.as_dict() if self.baked else None}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a build."""

    images: tuple[str, ...] = ()
    builder: str | None = None
    no_cache: bool = False
    show: Mode = "auto"
    #: also make the chain's stages under their keys, for publishing
    chain: bool = False
    #: what a registry has already
    found: Found = _NOTHING


def build(project: Project, composition: Composition, host: Host, engine: Engine, request: Request, cache: Path,
          say: Callable[[str], None]) -> Outcome:
    """Build images and prove that they are there.

    Images whose content key the registry or the engine already has are not built again.

    :raises BuildctlError: of the class that fits; what was built stays in the engine's cache.
    """
    began = time.monotonic()
    wanted = [composition.image(name) for name in request.images] or list(composition.images)
    present = {} if request.no_cache else {
        image.name: Built(image, there.partition("@")[2], 0, "published") for image in wanted
        if (there := request.found.images.get(image.name))}
    if not request.no_cache:
        present.update({image.name: found for image in wanted
                        if image.name not in present and (found := _present(engine, image))})
    todo = [image for image in wanted if image.name not in present]
    stages = {} if request.no_cache else request.found.stages
    resumed = composition.resumed(stages)
    chain = _unpublished(resumed, request, [image for image in wanted if image.name not in request.found.images])
    if not todo and not chain:
        return Outcome(tuple(present[image.name] for image in wanted), (), None, time.monotonic() - began, None)

    record_path = project.work / composition.stack.name / "record.json"
    facts = engine.facts()
    _check_disk(plan.make(composition, [image.name for image in todo], plan.read_record(record_path)).disk, facts.free,
                facts.root)
    targets = [*(image.stage for image in todo), *(stage.target for stage in chain)]
    needed = resumed.reached([*(image.stage for image in todo), *(stage.stage for stage in chain)])
    folder = rendering.folder_of(project, composition.stack.name)
    rendering.render(resumed, folder, cache, say, needed)
    log = project.work / composition.stack.name / "logs" / f"build-{time.strftime('%Y%m%d-%H%M%S')}.log"
    loads = engine.driver(request.builder) != "docker" if request.builder else not facts.containerd_store
    settings = ["*.output=type=docker"] if loads else []
    secrets = {INDEX_VARIABLE: config} if (config := host.uv_config()) is not None else {}
    baked = engine.bake(folder, targets, log, show=request.show, builder=request.builder, no_cache=request.no_cache,
                        settings=settings, environment=secrets)
    made = prove(engine, todo, baked.digests)
    plan.write_record(record_path, todo)
    return Outcome(tuple(present.get(image.name) or made[image.name] for image in wanted), chain, baked,
                   time.monotonic() - began, log, {name: there for name, there in stages.items() if name in needed})


def _unpublished(resumed: Composition, request: Request, images: Sequence[ImagePlan]) -> tuple[ChainStage, ...]:
    """The chain's stages that a registry lacks and that someone could go on from."""
    if not request.chain:
        return ()
    needed = resumed.reached(image.stage for image in images)
    return tuple(stage for stage in resumed.chain if stage.stage in needed and stage.stage not in request.found.stages)


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
            key = there.labels.get(KEY_LABEL, "none")
            if key != image.key.value:
                problems.append(Problem("the image is not the one that was planned", tag, found=f"key {key[:16]}",
                                        expected=f"key {image.key.value[:16]}",
                                        todo="was it built by two runs at once? build again"))
            digest = digests.get(image.stage, "")
            if digest and there.digest and there.digest != digest:
                problems.append(Problem("the tag holds another image than the build made", tag, found=there.digest,
                                        expected=digest, todo="was it built by two runs at once? build again"))
            found[image.name] = Built(image, there.digest or there.id, there.size, "built")
    if problems:
        raise AuditError(problems)
    return found


def _present(engine: Engine, image: ImagePlan) -> Built | None:
    found = None
    for tag in image.tags:
        found = engine.image(tag)
        if found is None or found.labels.get(KEY_LABEL) != image.key.value:
            return None
    return Built(image, found.digest or found.id, found.size, "present") if found else None


def _check_disk(needed: int, free: int | None, where: str) -> None:
    stated = os.environ.get(FREE_DISK, "")
    if stated.isdigit():
        free, where = int(stated), f"{where} ({FREE_DISK})"
    if free is not None and free < needed:
        raise ResourceError(Problem("not enough disk for this build", where, found=f"{free / 1e9:.1f} GB free",
                                    expected=f"about {needed / 1e9:.1f} GB",
                                    todo="`docker buildx prune` and `docker image prune` free space that nothing uses"))
