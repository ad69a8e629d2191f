"""Publishing images: what has to move where, then moving it, then proof.

The engine uploads (it has the bytes, sends several layers at once, and mounts what a neighbour repository has). Our own
registry client asks for the right to push first, reads digests back, and moves further tags by digest. All conflicts
are found before the first byte moves; fixed tags go first, moving ones last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from buildctl import budget, tagging
from buildctl import fault as faults
from buildctl.credentials import Source, lookup
from buildctl.engine import Engine
from buildctl.errors import AuditError, AuthError, Problem, TagExistsError, UsageError
from buildctl.fault import Fault, Kind
from buildctl.image_config import KEY_LABEL, config_of, key_of
from buildctl.oci import Descriptor, Manifest
from buildctl.reference import Reference
from buildctl.registry import Registry
from buildctl.retry import Failed, Policy, Retry
from buildctl.upload import (
    NOTHING,
    LocalImage,
    Progress,
    Upload,
    exact_layers,
    layers_of,
    local_image,
    name_removed,
    push,
)

Action = Literal["upload", "tag", "move", "keep"]
#: tags that say what they hold: whoever writes one writes the same
CONTENT_TAGS = ("key-", "chain-")


@dataclass(frozen=True, slots=True)
class Job:
    """One image for one repository: fixed tag in `target`, further fixed tags, moving tags."""

    source: str
    target: Reference
    aliases: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()

    @property
    def claims(self) -> tuple[Reference, ...]:
        """All tags that this job wants."""
        return (self.target, *map(self.target.tagged, (*self.aliases, *self.moving)))


@dataclass(frozen=True, slots=True)
class Move:
    """One tag: what is to be done, and the digest that it has now (empty: the tag is new)."""

    action: Action
    job: Job
    target: Reference
    current: str = ""

    def as_dict(self) -> dict[str, str]:
        """For `--json`."""
        return {"action": self.action, "target": str(self.target), "source": self.job.source, "current": self.current}


@dataclass(frozen=True, slots=True)
class Result:
    """One tag as it is in the registry now, with the digest that was read back."""

    action: Action
    target: Reference
    source: str
    digest: str
    layers: Progress = NOTHING
    attempts: int = 1
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {"action": self.action, "target": str(self.target), "source": self.source, "digest": self.digest,
                "layers": {"sent": self.layers.pushed, "present": self.layers.present, "mounted": self.layers.mounted},
                "attempts": self.attempts, "seconds": round(self.seconds, 2)}


class Watcher:
    """Hears what happens during a push; the default says nothing."""

    def note(self, text: str) -> None:
        """Something a user should know."""

    def warn(self, problem: Problem) -> None:
        """Something that may go wrong later."""

    def retry(self, where: str, retry: Retry) -> None:
        """About to wait and repeat."""

    def progress(self, where: str, progress: Progress) -> None:
        """Bytes moved."""

    def done(self, result: Result) -> None:
        """One tag is in place and proved."""


class Publisher:
    """Pushes from one engine to any number of registries. A context manager: it holds connections.

    `patience`: seconds for which an upload may stand still.
    """

    def __init__(self, engine: Engine, *, policy: Policy | None = None, source: Source = lookup,
                 watcher: Watcher | None = None, patience: float = 600.0) -> None:
        self.engine = engine
        self.patience = patience
        self.policy = policy or Policy()
        self.watcher = watcher or Watcher()
        self._source = source
        self._registries: dict[str, Registry] = {}

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        for registry in self._registries.values():
            registry.close()

    def registry(self, host: str) -> Registry:
        """The client for a host; plain HTTP where the engine is told to use it."""
        if host not in self._registries:
            self._registries[host] = Registry(
                host, actions="pull,push", source=self._source, policy=self.policy,
                plain_http=self.engine.insecure(host), announce=lambda retry: self.watcher.retry(host, retry))
        return self._registries[host]

    def plan(self, jobs: Iterable[Job], *, rate: float = 0.0) -> list[Move]:
        """What has to move, in order. Raises all conflicts at once: `TagExistsError`, or `AuthError` for a layer over
        the limit of its registry.
        """
        jobs = tuple(dict.fromkeys(jobs))
        _check_claims(jobs)
        self._check_budgets(jobs, rate)
        moves: list[Move] = []
        conflicts: list[Problem] = []
        for job in jobs:
            image = local_image(self.engine.client, job.source)
            first = self._fixed(job, image, job.target, conflicts)
            moves.append(first)
            moves += [self._fixed(job, image, job.target.tagged(tag), conflicts, first) for tag in job.aliases]
            for tag in job.moving:
                target = job.target.tagged(tag)
                found = self.registry(target.registry).head(target.repository, tag)
                current = found.digest if found else ""
                moves.append(Move("keep" if current and current == first.current else "move", job, target, current))
        if conflicts:
            raise TagExistsError(conflicts)
        return sorted(moves, key=lambda move: move.action == "move")

    def publish(self, jobs: Iterable[Job], *, rate: float = 0.0) -> list[Result]:
        """Plan, ask for the rights, upload, tag by digest, read back. Running it again does only what is missing."""
        moves = self.plan(jobs, rate=rate)
        self.check_rights(move.target for move in moves if move.action != "keep")
        results: list[Result] = []
        digests: dict[Job, str] = {}
        for move in moves:
            if move.action == "keep":
                result = Result("keep", move.target, move.job.source, move.current)
            elif move.action == "upload":
                result = self._upload(move)
            else:
                result = self._tag(move, digests[move.job])
            digests.setdefault(move.job, result.digest)
            results.append(result)
            self.watcher.done(result)
        self._look_again([result for result in results if result.action in {"upload", "tag"}
                          and not result.target.tag.startswith(CONTENT_TAGS)])
        return results

    def _look_again(self, results: Iterable[Result]) -> None:
        tags = []
        for result in results:
            registry, repository = self.registry(result.target.registry), result.target.repository
            image = local_image(self.engine.client, result.source)
            tags.append((registry, result.target, result.digest, partial(self._same_key, image, registry, repository)))
        tagging.look_again(tags, self.policy.first)

    def check_rights(self, targets: Iterable[Reference]) -> None:
        """Ask for the right to push to these repositories; no bytes move. Worth doing before a long build.

        Raises `AuthError`, `NetworkError`.
        """
        for host, repository in sorted({(target.registry, target.repository) for target in targets}):
            self.registry(host).check_push(repository)

    def name(self, target: Reference, digest: str, key: str) -> Result:
        """Give what a builder pushed by digest its fixed tag, once the registry shows that it has this content key.

        Raises `AuditError` for another key, `TagExistsError`, `NetworkError`.
        """
        started = time.monotonic()
        registry, source = self.registry(target.registry), str(target.at(digest))
        manifest = registry.manifest(target.repository, digest)
        if manifest is None:
            raise tagging.lost(target.at(digest), digest, "nothing")
        if (found := key_of(registry, target.repository, manifest)) != key:
            raise AuditError(Problem("the pushed image is not the one that was planned", source,
                                     f"key {found[:16] or '(none)'}", f"key {key[:16]}", "build again"))
        if there := self.holds(target, digest, key):
            return Result("keep", target, source, there)
        registry.put_manifest(target.repository, target.tag, manifest)
        proved = self._prove(target, digest, LocalImage(digest, frozenset(), {KEY_LABEL: key}))
        return Result("upload", target, source, proved, seconds=time.monotonic() - started)

    def move(self, target: Reference, digest: str) -> Result:
        """Point a tag that may move at a digest that its repository has.

        Raises `NetworkError`, and `TagExistsError` where another writer moves it at the same time.
        """
        found = self.registry(target.registry).head(target.repository, target.tag)
        current = found.digest if found else ""
        source = str(target.at(digest))
        if current == digest:
            return Result("keep", target, source, digest)
        result = self._tag(Move("move", Job(source, target), target, current), digest)
        self.watcher.done(result)
        return result

    def holds(self, target: Reference, digest: str, key: str) -> str:
        """The digest of a fixed tag: this one, or another with the same content key; empty when the tag is new.

        Raises `TagExistsError` for other content.
        """
        registry = self.registry(target.registry)
        found = registry.head(target.repository, target.tag)
        if found is None:
            return ""
        if not self._same(LocalImage(digest, frozenset(), {KEY_LABEL: key}), registry, target.repository, found):
            raise TagExistsError(tagging.exists(target, found.digest, digest))
        return found.digest

    # ------------------------------------------------------------------ planning

    def _fixed(self, job: Job, image: LocalImage, target: Reference, conflicts: list[Problem],
               first: Move | None = None) -> Move:
        """A fixed tag: new, already the same content, or a conflict. An alias follows its job's `first` move."""
        registry = self.registry(target.registry)
        found = registry.head(target.repository, target.tag)
        if found is None:
            return Move("tag" if first else "upload", job, target)
        wanted = first.current if first else ""
        if not (found.digest == wanted if wanted else self._same(image, registry, target.repository, found)):
            conflicts.append(tagging.exists(target, found.digest, f"{wanted or image.id} ({job.source})"))
            return Move("upload", job, target)
        return Move("keep", job, target, found.digest)

    def _same(self, image: LocalImage, registry: Registry, repository: str, found: Descriptor) -> bool:
        """Same bytes, same config (graph drivers know no manifest digest), or same content key."""
        if found.digest == image.id or found.digest in image.digests:
            return True
        manifest = registry.manifest(repository, found.digest)
        if manifest is None:
            return False
        config = config_of(registry, repository, manifest)
        if config is not None and config.digest == image.id:
            return True
        return self._same_key(image, registry, repository, manifest)

    def _same_key(self, image: LocalImage, registry: Registry, repository: str, manifest: Manifest) -> bool:
        if not image.key or key_of(registry, repository, manifest) != image.key:
            return False
        self.watcher.note(f"{registry.host}/{repository}: built twice with content key {image.key[:12]}; "
                          f"{manifest.digest} stays")
        return True

    def _check_budgets(self, jobs: Iterable[Job], rate: float) -> None:
        errors: list[Problem] = []
        for source, host in dict.fromkeys((job.source, job.target.registry) for job in jobs):
            count = local_image(self.engine.client, source).layers
            limited = budget.limit_of(host) is not None
            layers = layers_of(self.engine.client, source) if limited else []
            if limited and not (layers and budget.within(layers, host)):
                layers = exact_layers(self.engine.client, source) or layers
            found, warnings = budget.check(layers, host, count=count, rate=rate)
            errors += found
            for warning in warnings:
                self.watcher.warn(warning)
        if errors:
            raise AuthError(errors)

    # ------------------------------------------------------------------ moving

    def _upload(self, move: Move) -> Result:
        """Let the engine push, as often as it takes; then read the digest back."""
        started = time.monotonic()
        where = str(move.target)
        attempts = 0

        def attempt() -> Upload:
            nonlocal attempts
            attempts += 1
            return self._engine_push(move)

        image = local_image(self.engine.client, move.job.source)
        with name_removed(self.engine.client, where, move.job.source):
            try:
                upload = self.policy.run(attempt, lambda retry: self.watcher.retry(where, retry))
            except Failed as failed:
                raise faults.as_error(self._explained(failed.fault, move.target), where, attempts=attempts) from None
        digest = self._prove(move.target, upload.digest or image.id, image)
        self._check_meant(move, image, upload, digest)
        return Result("upload", move.target, move.job.source, digest, upload.progress, attempts,
                      time.monotonic() - started)

    def _check_meant(self, move: Move, image: LocalImage, upload: Upload, digest: str) -> None:
        """Hold what is under the tag against the image that was meant, not against what the engine sent."""
        if digest != (upload.digest or image.id) or (upload.index and upload.index == image.id):
            return  # another writer's, held against the content key already; or the part of an index that there is
        registry, target = self.registry(move.target.registry), move.target
        if not self._same(image, registry, target.repository, Descriptor(digest, "", 0)):
            raise TagExistsError(Problem(
                "another job on this engine pushed its own image under the same tag", str(target), digest,
                f"{image.id} ({move.job.source})", "push under a tag that no other job takes, such as a content key"))

    def _engine_push(self, move: Move) -> Upload:
        """One push; logged in again where the login ends in the middle, as long as layers arrive between."""
        target, where = move.target, str(move.target)
        for number in range(self.policy.attempts):
            arrived = 0

            def watch(progress: Progress) -> None:
                nonlocal arrived
                arrived = progress.pushed
                self.watcher.progress(where, progress)

            try:
                return push(self.engine.client, move.job.source, target, self._source(target.registry).as_auth_config(),
                            watch, patience=self.patience)
            except Failed as failed:
                if failed.fault.kind is not Kind.LOGIN or (number and not arrived):
                    raise
                self.watcher.note(f"{where}: the registry rejects the login, logging in again")
                last = failed
        raise last

    def _explained(self, fault: Fault, target: Reference) -> Fault:
        """The engine hides what the registry said; ask once more for a refusal's own words."""
        if fault.kind not in {Kind.DENIED, Kind.MISSING}:
            return fault
        try:
            self.registry(target.registry).check_push(target.repository)
        except AuthError as error:
            return Fault(fault.kind, f"{fault.text}; {error.problems[0].found}")
        return fault

    def _tag(self, move: Move, digest: str) -> Result:
        """Point a tag at a digest that the repository has."""
        started = time.monotonic()
        registry = self.registry(move.target.registry)
        manifest = registry.manifest(move.target.repository, digest)
        if manifest is None:
            raise tagging.lost(move.target, digest, "nothing")
        tagging.put(registry, move.target, manifest, fixed=move.action == "tag")
        return Result(move.action, move.target, move.job.source, digest, seconds=time.monotonic() - started)

    def _prove(self, target: Reference, digest: str, image: LocalImage) -> str:
        """Read the tag back. Another writer that pushed `image` built again is welcome: the digest that the tag has is
        returned.
        """
        registry = self.registry(target.registry)
        return tagging.prove(registry, target, digest, partial(self._same_key, image, registry, target.repository))


def _check_claims(jobs: Iterable[Job]) -> None:
    """Refuse one tag wanted twice: the later push would win without a word."""
    owners: dict[Reference, str] = {}
    problems = []
    for job in jobs:
        for claim in job.claims:
            if claim in owners:
                problems.append(Problem("two images or options want the same tag", str(claim),
                                        f"{owners[claim]} and {job.source}", "one", "give each its own tag"))
            owners[claim] = job.source
    if problems:
        raise UsageError(problems)
