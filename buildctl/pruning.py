"""Cleaning up: images that buildctl made and that no stack of the checkout makes any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from buildctl.engine import Engine, LocalImage


@dataclass(frozen=True, slots=True)
class Stale:
    """An image that nothing needs: its tags of ours, and its size in bytes as the engine counts."""

    image: LocalImage

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {"id": self.image.id, "tags": list(self.image.tags), "bytes": self.image.size}


def stale(images: Iterable[LocalImage], keys: Iterable[str], stacks: Iterable[str]) -> list[Stale]:
    """Images of these stacks whose content key is not among `keys`.

    Images without our labels, of other projects' stacks, or tagged for a registry are not ours to remove.
    """
    known, ours = set(keys), set(stacks)
    return [Stale(image) for image in images
            if image.labels.get("buildctl.stack") in ours and image.labels.get("buildctl.key") not in known
            and all("/" not in tag for tag in image.tags)]


def remove(engine: Engine, found: Iterable[Stale]) -> None:
    """Take the tags away; the engine frees what no other image uses."""
    for one in found:
        for tag in one.image.tags:
            engine.untag(tag)
