"""Going on from what a registry has: images under their content keys, and the deepest stages of their chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from buildctl import reference
from buildctl.compose import Composition, ImagePlan
from buildctl.reference import Target
from buildctl.registry import Registry


@dataclass(frozen=True, slots=True)
class Found:
    """What a registry has of a composition; references by digest.

    `images`: image -> reference, for images that need no build. `stages`: stage -> reference, for stages that builds of
    the others can go on from.
    """

    images: Mapping[str, str]
    stages: Mapping[str, str]


def look(composition: Composition, images: Iterable[ImagePlan], target: Target,
         registry: Callable[[str], Registry]) -> Found:
    """Ask a registry, once per image and, for what is missing, once per stage from the top down.

    :raises AuthError, NetworkError: the registry does not answer.
    """
    def ask(tag: str) -> str | None:
        placed = target.place(reference.parse(tag))
        found = registry(placed.registry).head(placed.repository, placed.tag)
        return str(placed.at(found.digest)) if found else None

    present: dict[str, str] = {}
    missing: list[str] = []
    for image in images:
        there = ask(image.tags[1])
        if there is not None:
            present[image.name] = there
        else:
            missing.append(image.stage)
    stages: dict[str, str] = {}
    needed = composition.reached(missing)
    for stage in reversed(composition.chain):
        # a stage below one that was found is no longer needed
        if stage.stage not in needed:
            continue
        there = ask(stage.tag)
        if there is not None:
            stages[stage.stage] = there
            needed = composition.resumed(stages).reached(missing)
    return Found(present, stages)
