"""A build from composition to proof: what is there already, disk, rendering, engine, and what came out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buildctl import plan, rendering, runs
from buildctl.compose import INDEX_VARIABLE, ChainStage, Composition, ImagePlan
from buildctl.engine import Baked, Builder, Collision, Engine
from buildctl.errors import AuditError, EngineError, Problem, ResourceError
from buildctl.host import Host
from buildctl.image_config import CHAIN_LABEL, KEY_LABEL
from buildctl.progress import Mode
from buildctl.project import Project
from buildctl.reference import Target, parse
from buildctl.resume import Found

#: free bytes of a builder whose disk cannot be seen from here, as its owner states them
FREE_DISK = "BUILDCTL_FREE_DISK"
_NOTHING = Found({}, {})
#: how often a build is done again because another one gave the same names at the same moment
_COLLISIONS = 3


@dataclass(frozen=True, slots=True)
class Built:
    """An image that is proved to be there."""

    image: ImagePlan
    digest: str
    #: bytes as the engine counts; 0 for an image that only a registry has
    size: int
    #: `built` by this run, `present` in the engine, `published` in the registry before, or `pushed` by the builder
    state: str

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"image": self.image.name, "tags": list(self.image.tags), "digest": self.digest, "bytes": self.size,
                "key": self.image.key.value, "state": self.state}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a build did."""

    images: tuple[Built, ...]
    #: chain stages that the engine now has under their tags, for publishing; or that the builder pushed by digest
    chain: tuple[ChainStage, ...]
    baked: Baked | None
    seconds: float
    log: Path | None
    #: stages that were taken from a registry
    resumed: Mapping[str, str] = field(default_factory=dict)
    #: where the builder pushed images and chain stages, by digest; None: the engine has them
    straight_to: Target | None = None
    #: chain tag -> what the engine calls that stage for this run alone; another run takes only its own names away
    names: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"images": [built.as_dict() for built in self.images], "seconds": round(self.seconds, 3),
                "resumed": dict(self.resumed), "log": str(self.log) if self.log else None,
                "build": self.baked.record.as_dict() if self.baked else None}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a build."""

    images: tuple[str, ...] = ()
    #: None: the engine's own
    builder: Builder | None = None
    #: where the builder pushes by itself, by digest; None: what it builds comes to the engine
    straight_to: Target | None = None
    #: whether that registry speaks plain HTTP
    plain_http: bool = False
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

    :raises BuildctlError: of the class that fits; what was built stays in the engine's cache, without names of chain
        stages. After success the caller takes those away (`release`) when they are published.
    """
    began = time.monotonic()
    wanted = [composition.image(name) for name in request.images] or list(composition.images)
    present = {} if request.no_cache else {
        image.name: Built(image, there.partition("@")[2], 0, "published") for image in wanted
        if (there := request.found.images.get(image.name))}
    if not request.no_cache and request.straight_to is None:
        present.update({image.name: found for image in wanted
                        if image.name not in present and (found := _present(engine, image))})
    todo = [image for image in wanted if image.name not in present]
    stages = {} if request.no_cache else request.found.stages
    resumed = composition.resumed(stages)
    chain = _unpublished(resumed, request, [image for image in wanted if image.name not in request.found.images])
    if not todo and not chain:
        return Outcome(tuple(present[image.name] for image in wanted), (), None, time.monotonic() - began, None)

    record_path = project.work / composition.stack.name / "record.json"
    kept = _chains(engine, request, plan.read_record(record_path))
    disk = plan.disk(composition, [image.name for image in todo], kept, stages)
    settings = _check_disks(engine, request, disk, say)
    targets = [*(image.stage for image in todo), *(stage.target for stage in chain)]
    needed = resumed.reached([*(image.stage for image in todo), *(stage.stage for stage in chain)])
    folder = rendering.folder_of(project, composition.stack.name)
    rendering.render(resumed, folder, cache, say, needed)
    log = project.work / composition.stack.name / "logs" / f"build-{time.strftime('%Y%m%d-%H%M%S')}.log"
    local: dict[str, str] = {}
    if request.straight_to is None:
        local = {stage.tag: runs.name(stage.tag) for stage in chain}
        settings += [f"{stage.target}.tags={local[stage.tag]}" for stage in chain]
    else:
        names = {image.stage: image.tags[1] for image in todo} | {stage.target: stage.tag for stage in chain}
        settings = [setting for target, tag in names.items()
                    for setting in _straight(target, request.straight_to.place(parse(tag)).name, request.plain_http)]
    secrets = {INDEX_VARIABLE: config} if (config := host.uv_config()) is not None else {}
    try:
        baked = _bake(engine, request, folder, targets, log, settings, secrets, say)
        made = prove(engine, todo) if request.straight_to is None else _pushed(todo, chain, baked.digests)
        plan.write_record(record_path, todo)
    except BaseException:
        release(engine, local.values())
        raise
    return Outcome(tuple(present.get(image.name) or made[image.name] for image in wanted), chain, baked,
                   time.monotonic() - began, log, {name: there for name, there in stages.items() if name in needed},
                   request.straight_to, local)


def release(engine: Engine, names: Iterable[str]) -> None:
    """Take this run's names of chain stages away: they are of use for publishing only, the cache keeps the content.

    What cannot be taken away, because the engine is gone, is for `prune`.
    """
    for name in names:
        with suppress(EngineError, OSError):
            engine.untag(name)


def _bake(engine: Engine, request: Request, folder: Path, targets: list[str], log: Path, settings: list[str],
          secrets: dict[str, str], say: Callable[[str], None]) -> Baked:
    """Bake; once more, from the cache, when another build gave the same names at the same moment."""

    def once(no_cache: bool) -> Baked:
        return engine.bake(folder, targets, log, show=request.show,
                           builder=request.builder.name if request.builder else None, no_cache=no_cache,
                           settings=settings, environment=secrets)

    no_cache = request.no_cache
    for _ in range(_COLLISIONS):
        try:
            return once(no_cache)
        except Collision:
            say("another build gave the same name at the same moment; once more, from the cache")
            no_cache = False
    return once(no_cache)


def _straight(target: str, repository: str, plain_http: bool) -> list[str]:
    """Overrides that make a builder push a target by itself. By digest alone: tags are set when it is proved."""
    output = "type=image,push=true,push-by-digest=true,store=false,oci-mediatypes=true,compression=zstd"
    return [f"{target}.tags={repository}",
            f"{target}.output={output}{',registry.insecure=true' if plain_http else ''}"]


def _pushed(images: Sequence[ImagePlan], chain: Sequence[ChainStage], digests: Mapping[str, str]) -> dict[str, Built]:
    """What a builder says that it pushed; publishing holds it against the registry.

    :raises AuditError: it names no digest for some of it.
    """
    silent = [target for target in [*(image.stage for image in images), *(stage.target for stage in chain)]
              if not digests.get(target)]
    if silent:
        raise AuditError([Problem("the build ended well and the builder names no digest", target, found="nothing",
                                  expected="the digest that it pushed", todo="a newer buildx, or build again")
                          for target in silent])
    return {image.name: Built(image, digests[image.stage], 0, "pushed") for image in images}


def _unpublished(resumed: Composition, request: Request, images: Sequence[ImagePlan]) -> tuple[ChainStage, ...]:
    """The chain's stages that a registry lacks and that someone could go on from."""
    if not request.chain:
        return ()
    needed = resumed.reached(image.stage for image in images)
    return tuple(stage for stage in resumed.chain if stage.stage in needed and stage.stage not in request.found.stages)


def prove(engine: Engine, images: Sequence[ImagePlan]) -> dict[str, Built]:
    """Ask the engine for what a build is said to have made, by its content key: another run on this engine that built
    the same at the same time may have set the tag to its own digest.

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


def _chains(engine: Engine, request: Request, record: Mapping[str, Any]) -> frozenset[str]:
    """The chains that need not be built again: those of the last builds here, as far as this engine still has an image
    of them. An image that was pulled, or the record of another engine, is no cache."""
    # another builder's cache cannot be seen, and without the cache all is made anew
    if request.no_cache or (request.builder is not None and not request.builder.keeps_images):
        return frozenset()
    return plan.built(record) & {image.labels.get(CHAIN_LABEL, "") for image in engine.images(CHAIN_LABEL)}


def _check_disks(engine: Engine, request: Request, needed: int, say: Callable[[str], None]) -> list[str]:
    """Check the disk where the build runs, and that of the engine where the images go. Returns the settings of the
    output that fits: builders that keep no images load them into the engine, and so do stores without zstd.

    :raises ResourceError: with every disk that is too small.
    """
    builder, stated = request.builder, os.environ.get(FREE_DISK, "")
    away = builder is not None and not builder.keeps_images
    disks: list[tuple[str, int | None]] = []
    settings: list[str] = []
    if away and builder is not None:
        disks.append((f"builder {builder.name}", None))
    if request.straight_to is None:
        facts = engine.facts()
        disks.append((facts.root, facts.free))
        if away or not facts.containerd_store:
            settings = ["*.output=type=docker"]
    if stated.isdigit():
        disks[0] = (f"{disks[0][0]} ({FREE_DISK})", int(stated))
    problems = []
    for where, free in disks:
        if free is None:
            say(f"disk: {where}: cannot be seen from here; about {needed / 1e9:.1f} GB should be free "
                f"({FREE_DISK}=BYTES states it)")
        elif free < needed:
            problems.append(Problem("not enough disk for this build", where, found=f"{free / 1e9:.1f} GB free",
                                    expected=f"about {needed / 1e9:.1f} GB",
                                    todo="`docker buildx prune` and `docker image prune` free space that nothing uses"))
    if problems:
        raise ResourceError(problems)
    return settings
