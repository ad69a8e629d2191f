"""Cleaning up: images that buildctl made and that no stack of the checkout makes any more, and what dead runs left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from buildctl import runs
from buildctl.engine import Engine, LocalImage
from buildctl.image_config import KEY_LABEL, STACK_LABEL


@dataclass(frozen=True, slots=True)
class Stale:
    """An image that nothing needs under these tags, and its size in bytes as the engine counts."""

    image: LocalImage

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {"id": self.image.id, "tags": list(self.image.tags), "bytes": self.image.size}


def stale(images: Iterable[LocalImage], keys: Iterable[str], stacks: Iterable[str],
          dead: Callable[[str], bool] = runs.dead) -> list[Stale]:
    """Images of these stacks whose content key is not among `keys`, and names of chain stages of runs that are `dead`.

    Images without our labels, of other projects' stacks, or tagged for a registry are not ours to remove. A run that
    lives keeps its names, whatever they hold.
    """
    known, ours = set(keys), set(stacks)
    found = []
    for image in images:
        if image.labels.get(STACK_LABEL) not in ours or any("/" in tag for tag in image.tags):
            continue
        gone = tuple(tag for tag in image.tags
                     if (dead(tag) if runs.owned(tag) else image.labels.get(KEY_LABEL) not in known))
        if gone:
            found.append(Stale(replace(image, tags=gone)))
    return found


def remove(engine: Engine, found: Iterable[Stale]) -> None:
    """Take the tags away; the engine frees what no other image uses."""
    for one in found:
        for tag in one.image.tags:
            engine.untag(tag)
