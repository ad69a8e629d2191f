"""Publishing what a build made: images and chain stages under their keys, then the version tags, by digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from buildctl.building import Outcome
from buildctl.promote import Move, Promoter
from buildctl.push import Job, Publisher, Result
from buildctl.reference import Reference, Target, parse


def publish(outcome: Outcome, places: Sequence[Target], publisher: Publisher) -> list[dict[str, Any]]:
    """Publish to every place; what is there already is not sent again.

    Key tags never change their content. Version tags move, last and by digest. What the first place has without the
    engine - from before the build, or pushed by the builder - is copied from there to the others.

    :raises BuildctlError: of the class that fits; running it again does what is missing.
    """
    first, others = places[0], places[1:]
    jobs: list[Job] = []
    there: list[tuple[Reference, str, str]] = []  # fixed tag, digest in the first place, content key
    moving: list[tuple[Reference, Reference]] = []  # fixed tag, version tag
    named: list[Result] = []

    def settle(tag: Reference, digest: str, key: str) -> None:
        named.append(publisher.name(first.place(tag), digest, key))
        publisher.watcher.done(named[-1])
        there.append((tag, named[-1].digest, key))

    for stage in outcome.chain:
        if outcome.straight_to is None or outcome.baked is None:
            jobs += [Job(outcome.names[stage.tag], place.place(parse(stage.tag))) for place in places]
        else:
            settle(parse(stage.tag), outcome.baked.digests[stage.target], stage.key)
    for built in outcome.images:
        version, key = (parse(tag) for tag in built.image.tags)
        if built.state == "pushed":
            settle(key, built.digest, built.image.key.value)
            moving.append((key, version))
        elif built.state == "published":
            there.append((key, built.digest, built.image.key.value))
            moving.append((key, version))
        else:
            jobs += [Job(str(key), place.place(key), moving=(version.tag,)) for place in places]
    told = [result.as_dict() for result in [*named, *(publisher.publish(jobs) if jobs else ())]]

    promoter = Promoter(publisher.registry)
    digests = {first.place(tag): digest for tag, digest, _ in there}
    for tag, digest, value in there:
        for place in others:
            target = place.place(tag)
            held = publisher.holds(target, digest, value)
            digests[target] = held or digest
            told.append(_keep(target, held) if held else _copy(promoter, first.place(tag).at(digest), target))
    for tag, version in moving:
        for place in places:
            target, digest = place.place(version), digests[place.place(tag)]
            found = publisher.registry(target.registry).head(target.repository, target.tag)
            told.append(_keep(target, digest) if found is not None and found.digest == digest
                        else _copy(promoter, target.at(digest), target, move=True))
    return told


def _keep(target: Reference, digest: str) -> dict[str, Any]:
    return Move("keep", target, digest, digest).as_dict()


def _copy(promoter: Promoter, source: Reference, target: Reference, *, move: bool = False) -> dict[str, Any]:
    promotion = promoter.plan(source, [target], move=move)
    promoter.carry_out(promotion)
    return promotion.moves[0].as_dict()
