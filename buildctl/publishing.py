"""Publishing what a build made: images and chain stages under their keys, then the version tags, by digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from buildctl.building import Outcome
from buildctl.promote import Promoter
from buildctl.push import Job, Publisher
from buildctl.reference import Target, parse


def publish(outcome: Outcome, places: Sequence[Target], publisher: Publisher) -> list[dict[str, Any]]:
    """Publish to every place; what is there already is not sent again.

    Key tags never change their content. Version tags move, last and by digest. Images that the first place had before
    the build are copied from there to the others, and their version tags set, without the engine.

    :raises BuildctlError: of the class that fits; running it again does what is missing.
    """
    jobs = [Job(stage.tag, place.place(parse(stage.tag))) for stage in outcome.chain for place in places]
    copies = []
    for built in outcome.images:
        version, key = (parse(tag) for tag in built.image.tags)
        if built.state == "published":
            copies.append((version, key))
        else:
            jobs += [Job(str(key), place.place(key), moving=(version.tag,)) for place in places]
    told: list[dict[str, Any]] = [result.as_dict() for result in publisher.publish(jobs)] if jobs else []
    promoter = Promoter(publisher.registry)
    for version, key in copies:
        source = places[0].place(key)
        for targets, move in (([place.place(key) for place in places[1:]], False),
                              ([place.place(version) for place in places], True)):
            if targets:
                promotion = promoter.plan(source, targets, move=move)
                promoter.carry_out(promotion)
                told += [one.as_dict() for one in promotion.moves]
    return told
