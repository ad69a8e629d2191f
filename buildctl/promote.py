"""Promotion: other tags, repositories or registries get the very digest that was tested. Nothing is rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from buildctl import results, tagging
from buildctl.errors import NetworkError, Problem, TagExistsError
from buildctl.image_config import identity_of
from buildctl.oci import Manifest
from buildctl.reference import Reference
from buildctl.registry import Registry
from buildctl.results import Requirement, Result

Action = Literal["tag", "move", "keep"]


@dataclass(frozen=True, slots=True)
class Move:
    """One tag: what is to be done, and the digest that it has now (empty: it is new)."""

    action: Action
    target: Reference
    digest: str
    current: str = ""

    def as_dict(self) -> dict[str, str]:
        """For `--json`."""
        return {"action": self.action, "target": str(self.target), "digest": self.digest, "current": self.current}


@dataclass(frozen=True, slots=True)
class Copied:
    """Blobs of one copy: already there, mounted, sent, and the bytes sent."""

    present: int = 0
    mounted: int = 0
    sent: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Copied) -> Copied:
        return Copied(self.present + other.present, self.mounted + other.mounted, self.sent + other.sent,
                      self.sent_bytes + other.sent_bytes)


@dataclass(frozen=True, slots=True)
class Promotion:
    """A promotion that may take place: the image, where it goes, and the result that speaks for it."""

    source: Reference
    manifest: Manifest
    moves: tuple[Move, ...]
    result: Result | None
    #: whether the tags may point at something else until then
    move: bool = False


class Promoter:
    """Copies images by digest. `registry` gives the client for a host."""

    def __init__(self, registry: Callable[[str], Registry]) -> None:
        self._registry = registry

    def plan(self, source: Reference, targets: Iterable[Reference], *, move: bool = False,
             require: Requirement | None = None, result: Result | None = None) -> Promotion:
        """Resolve the source once, look at every target, check the verdict.

        `move` lets a target point at something else today. Raises `UsageError` without a source, `AuditError` where
        the result is missing, foreign or not good enough, `TagExistsError` with all targets that may not move.
        """
        registry = self._registry(source.registry)
        manifest = registry.existing(source)
        if result is not None or require is not None:
            identity = identity_of(registry, source.repository, manifest)
            if result is None:
                known = results.attached(registry, source.repository, manifest.digest)
                results.check(known[-1] if known else None, require, identity, str(source))
            else:
                results.check(result, require, identity, str(source))
        moves, conflicts = [], []
        for target in targets:
            found = self._registry(target.registry).head(target.repository, target.tag)
            current = found.digest if found else ""
            if current and current != manifest.digest and not move:
                conflicts.append(tagging.exists(target, current, manifest.digest))
            action: Action = "keep" if current == manifest.digest else "move" if current else "tag"
            moves.append(Move(action, target, manifest.digest, current))
        if conflicts:
            raise TagExistsError(conflicts)
        return Promotion(source, manifest, tuple(moves), result, move)

    def carry_out(self, promotion: Promotion) -> Copied:
        """Rights first, then blobs, then the result, then the tags, each read back; fixed ones looked at before and
        again after. Raises `TagExistsError` for a tag that another job has set meanwhile, `NetworkError`.
        """
        source, manifest = promotion.source, promotion.manifest
        places = dict.fromkeys((move.target.registry, move.target.repository) for move in promotion.moves
                               if move.action != "keep")
        home = (source.registry, source.repository)
        asked = [*places, home] if promotion.result else list(places)
        for host, repository in dict.fromkeys(asked):
            self._registry(host).check_push(repository)
        if promotion.result is not None:
            results.attach(self._registry(source.registry), source.repository, manifest.descriptor, promotion.result)
        copied = Copied()
        for host, repository in places:
            if (host, repository) != home:
                copied += self._with_referrers(source, manifest, Reference(host, repository))
        fixed = not promotion.move
        set_now = [(self._registry(move.target.registry), move.target) for move in promotion.moves
                   if move.action != "keep"]
        for registry, target in set_now:
            tagging.put(registry, target, manifest, fixed=fixed, done="promoted")
        if fixed and set_now:
            tagging.look_again(((registry, target, manifest.digest, None) for registry, target in set_now),
                               set_now[0][0].policy.first, done="promoted")
        return copied

    def copy(self, source: Reference, target: Reference) -> Copied:
        """An image and what is attached to it, by digest, into the repository of `target`; no tag is set."""
        self._registry(target.registry).check_push(target.repository)
        return self._with_referrers(source, self._registry(source.registry).existing(source),
                                    Reference(target.registry, target.repository))

    def _with_referrers(self, source: Reference, manifest: Manifest, target: Reference) -> Copied:
        return self._copy(source, manifest, target) + self._copy_referrers(source, manifest, target)

    def _copy(self, source: Reference, manifest: Manifest, target: Reference) -> Copied:
        """Blobs and manifests below and including this one, by digest; what is there is passed over."""
        origin, registry = self._registry(source.registry), self._registry(target.registry)
        copied = Copied()
        for child in manifest.children:
            below = origin.manifest(source.repository, child.digest)
            if below is None or below.digest != child.digest:
                raise NetworkError(Problem("the index names a manifest that the registry does not have", str(source),
                                           below.digest if below else "nothing", child.digest,
                                           "push the image again"))
            copied += self._copy(source, below, target)
        for blob in dict.fromkeys(manifest.blobs):
            if registry.has_blob(target.repository, blob.digest):
                copied += Copied(present=1)
            elif source.registry == target.registry and registry.mount(target.repository, blob.digest,
                                                                       source.repository):
                copied += Copied(mounted=1)
            else:
                sent = registry.upload(target.repository, blob.digest, blob.size,
                                       partial(origin.stream, source.repository, blob.digest))
                copied += Copied(sent=1, sent_bytes=sent)
        registry.put_manifest(target.repository, manifest.digest, manifest)
        return copied

    def _copy_referrers(self, source: Reference, manifest: Manifest, target: Reference) -> Copied:
        """What is attached goes where its image goes: benchmark results, provenance, bills of materials, signatures."""
        origin, copied = self._registry(source.registry), Copied()
        for entry in origin.referrers(source.repository, manifest.digest):
            referrer = origin.manifest(source.repository, str(entry["digest"]))
            if referrer is not None:
                copied += self._copy(source, referrer, target)
                self._registry(target.registry).put_referrer(target.repository, referrer)
        return copied
