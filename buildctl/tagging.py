"""Tags in a registry, which has no compare-and-set: looked at before they are set, read back, and looked at again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from buildctl.errors import NetworkError, Problem, TagExistsError
from buildctl.oci import Manifest
from buildctl.reference import Reference
from buildctl.registry import Registry

#: whether other bytes that a tag has are as good as those that were wanted
Same = Callable[[Manifest], bool]


def put(registry: Registry, target: Reference, manifest: Manifest, *, fixed: bool, done: str = "pushed") -> None:
    """Point a tag at a manifest that its repository has, and read it back.

    :param fixed: the tag must be new or have this content: uploads take long, another job may have set it since it was
        planned.
    :param done: what was done with the content, for messages.
    :raises TagExistsError: it has other content, or got it from another writer at the same moment.
    :raises NetworkError: the registry does not show what was put there.
    """
    if fixed:
        found = registry.head(target.repository, target.tag)
        if found is not None and found.digest != manifest.digest:
            raise TagExistsError(exists(target, found.digest, manifest.digest))
    registry.put_manifest(target.repository, target.tag, manifest)
    prove(registry, target, manifest.digest, done=done)


def prove(registry: Registry, target: Reference, digest: str, same: Same | None = None, *, done: str = "pushed") -> str:
    """Read a tag back and compare. Another digest means another writer, or a broken registry.

    :param same: another writer's content that is welcome: its digest is returned.
    :raises TagExistsError, NetworkError: as `put`.
    """
    found = registry.head(target.repository, target.tag)
    if found is not None and found.digest == digest:
        return digest
    manifest = registry.manifest(target.repository, target.tag)
    stored = registry.manifest(target.repository, digest)
    if manifest is None or manifest.digest == digest or stored is None or stored.digest != digest:
        raise lost(target, digest, found.digest if found else "nothing", done)
    if same is not None and same(manifest):
        return manifest.digest
    raise TagExistsError(Problem("somebody else moved the tag at the same time", str(target), manifest.digest, digest,
                                 f"what was {done} is {target.name}@{digest}; find the other writer"))


def look_again(tags: Iterable[tuple[Registry, Reference, str, Same | None]], wait: float, done: str = "pushed") -> None:
    """Read new fixed tags once more, a moment later. Another job may have found a tag free just before it was set, and
    have set it just after. Its content stands; ours is told.

    :param tags: registry, tag, digest, and what is as good.
    :param wait: seconds; nothing is waited for without tags.
    :raises TagExistsError, NetworkError: as `put`.
    """
    listed = list(tags)
    if listed:
        time.sleep(wait)
    for registry, target, digest, same in listed:
        prove(registry, target, digest, same, done=done)


def exists(target: Reference, found: str, expected: str) -> Problem:
    """A fixed tag has other content."""
    return Problem("the tag exists with other content", str(target), found, expected,
                   "take a new tag; one that is meant to move says so: --moving of push, --move of promote")


def lost(target: Reference, digest: str, found: str, done: str = "pushed") -> NetworkError:
    """A registry does not show what it took."""
    return NetworkError(Problem(f"the registry does not show what was {done}", str(target), found, digest,
                                "repeat it; if it stays so, the registry or a cache in front of it is broken"))
