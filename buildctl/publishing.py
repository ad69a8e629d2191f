"""Publishing what a build made: images and chain stages under their keys, what is attached to them, then the version
tags, by digest. A version tag never names an image that still lacks what belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from buildctl.building import Built, Outcome
from buildctl.promote import Promoter
from buildctl.push import Job, Publisher, Result
from buildctl.reference import Reference, Target, parse


@dataclass(frozen=True, slots=True)
class Placed:
    """An image under its key tag in one place: its digest there, and whether this run put it there."""

    built: Built
    target: Reference
    digest: str
    new: bool

    @property
    def foreign(self) -> bool:
        """Whether the tag names other bytes with the same key: built elsewhere, and there first."""
        return not self.new and self.digest != self.built.digest


#: does what has to be done before version tags name these images, and tells what it made
Finish = Callable[[Sequence[Placed]], Sequence[dict[str, Any]]]


def publish(outcome: Outcome, places: Sequence[Target], publisher: Publisher,
            finish: Finish | None = None) -> list[dict[str, Any]]:
    """Publish to every place; what is there already is not sent again.

    Key tags never change their content. Version tags move, last and by digest, after `finish`. What the first place
    has without the engine - from before the build, or pushed by the builder - is copied from there to the others.

    :raises BuildctlError: of the class that fits; running it again does what is missing.
    """
    first, others = places[0], places[1:]
    jobs: list[Job] = []
    there: list[tuple[Reference, str, str]] = []  # fixed tag, digest in the first place, content key
    results: dict[Reference, Result] = {}
    digests: dict[Reference, str] = {}

    def done(result: Result) -> None:
        results[result.target], digests[result.target] = result, result.digest

    def settle(tag: Reference, digest: str, key: str) -> None:
        result = publisher.name(first.place(tag), digest, key)
        publisher.watcher.done(result)
        done(result)
        there.append((tag, result.digest, key))

    for stage in outcome.chain:
        if outcome.straight_to is None or outcome.baked is None:
            jobs += [Job(outcome.names[stage.tag], place.place(parse(stage.tag))) for place in places]
        else:
            settle(parse(stage.tag), outcome.baked.digests[stage.target], stage.key)
    for built in outcome.images:
        key = parse(built.image.tags[1])
        if built.state == "pushed":
            settle(key, built.digest, built.image.key.value)
        elif built.state == "published":
            digests[first.place(key)] = built.digest
            there.append((key, built.digest, built.image.key.value))
        else:
            jobs += [Job(str(key), place.place(key)) for place in places]
    for result in publisher.publish(jobs) if jobs else ():
        done(result)
    promoter = Promoter(publisher.registry)
    for tag, digest, value in there:
        for place in others:
            done(_mirrored(publisher, promoter, first.place(tag).at(digest), place.place(tag), value))

    told = [result.as_dict() for result in results.values()]
    if finish is not None:
        keyed = [(built, place.place(parse(built.image.tags[1]))) for built in outcome.images for place in places]
        told += finish([Placed(built, target, digests[target], target in results
                               and results[target].action == "upload") for built, target in keyed])
    for built in outcome.images:
        version, key = (parse(tag) for tag in built.image.tags)
        told += [publisher.move(place.place(version), digests[place.place(key)]).as_dict() for place in places]
    return told


def _mirrored(publisher: Publisher, promoter: Promoter, source: Reference, target: Reference, key: str) -> Result:
    """A fixed tag as the first place has it, in another place; what that holds under the same key stays."""
    if held := publisher.holds(target, source.digest, key):
        return Result("keep", target, str(source), held)
    promoter.copy(source, target)
    named = publisher.name(target, source.digest, key)
    # what is attached came along with the image: it is looked at before more is attached
    return replace(named, action="tag" if named.action == "upload" else "keep")
