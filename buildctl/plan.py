"""Plans: what a build would do, and why, computed without the engine."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildctl.compose import Composition, ImagePlan, Key
from buildctl.lock import Wheel

#: what a layer takes on the builder's disk, in bytes per byte of wheels: the download kept in the cache, the installed
#: tree with bytecode, and the compressed copy that the image store keeps (docs/decisions.md has the measurement)
DISK_FACTOR = 6.0
#: the same for a layer that comes from a registry: no download of wheels
PULLED_FACTOR = 3.6
#: the base system, the tools and the entrypoint's environment, whatever the stack
DISK_FLOOR = 1_500_000_000


@dataclass(frozen=True, slots=True)
class ImageChange:
    """One image of a plan: whether it was built from the same content before, and if not, what moved on."""

    image: ImagePlan
    #: `new`, `same` or `changed`
    state: str
    #: parts of the content that differ from the last build
    reasons: tuple[str, ...]
    #: whether the chain below the entrypoint is rebuilt, or the last stage alone
    chain: bool

    @property
    def download(self) -> int:
        """Bytes of wheels that the image's own layer installs."""
        return sum(wheel.size or 0 for wheel in self.image.wheels)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        image = self.image
        return {"image": image.name, "version": image.version, "state": self.state, "reasons": list(self.reasons),
                "rebuilds_chain": self.chain, "key": image.key.value, "chain_key": image.chain.value,
                "tags": list(image.tags), "wheels": len(image.wheels), "wheel_bytes": self.download,
                "largest": [{"name": wheel.name, "version": wheel.version, "bytes": wheel.size}
                            for wheel in largest(image.wheels, 3)],
                "patches": list(image.patches)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a build of some images of a stack would do."""

    stack: str
    targets: tuple[str, ...]
    changes: tuple[ImageChange, ...]
    #: bytes that the builder's disk should have free, if it still has what was built here last
    disk: int

    @property
    def todo(self) -> tuple[ImageChange, ...]:
        """The images that are not known to be built."""
        return tuple(change for change in self.changes if change.state != "same")

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; CI makes its build matrix from it."""
        return {"stack": self.stack, "targets": list(self.targets), "disk_bytes": self.disk,
                "images": [change.as_dict() for change in self.changes]}


def make(composition: Composition, images: Iterable[str], record: Mapping[str, Any]) -> Plan:
    """Compare a composition with the record of the last build.

    :param images: the images asked for; those below them are built along with them anyway.
    :param record: as `read_record` gives it.
    """
    wanted = set(images) or {image.name for image in composition.images}
    changes = tuple(_change(image, record.get(image.name)) for image in composition.images if image.name in wanted)
    todo = [change.image.name for change in changes if change.state != "same"]
    return Plan(composition.stack.name, composition.stack.targets, changes, disk(composition, todo, built(record)))


def disk(composition: Composition, images: Collection[str], there: Collection[str],
         resumed: Iterable[str] = ()) -> int:
    """Bytes that a builder's disk should have free for building images, with what they stand on.

    :param there: keys of chains that the builder has, whatever the image that they belong to.
    :param resumed: stages that come from a registry, with all that is below them.
    """
    if not images:
        return 0
    order = composition.images
    last = max(number for number, image in enumerate(order) if image.name in images)
    # a chain holds those below it
    first = max((number + 1 for number, image in enumerate(order) if image.chain.value in there), default=0)
    # of a stage within a layer it is not known how much of the layer it holds
    pulled = max((number + (stage == image.name) for stage in resumed for number, image in enumerate(order)
                  if stage == image.name or stage.startswith(f"{image.name}-")), default=0)

    def bytes_of(begin: int, end: int) -> int:
        return sum(wheel.size or 0 for image in order[begin:end] for wheel in image.wheels)

    return int(DISK_FLOOR + PULLED_FACTOR * bytes_of(first, min(pulled, last + 1))
               + DISK_FACTOR * bytes_of(max(first, pulled), last + 1))


def built(record: Mapping[str, Any]) -> frozenset[str]:
    """The keys of the chains that the last builds made."""
    return frozenset(str(entry.get("chain")) for entry in record.values() if isinstance(entry, dict))


def _change(image: ImagePlan, before: Mapping[str, Any] | None) -> ImageChange:
    if before is None:
        return ImageChange(image, "new", ("never built here",), True)
    if before.get("key") == image.key.value:
        return ImageChange(image, "same", (), False)
    chain = before.get("chain") != image.chain.value
    reasons = [*_moved(image.chain, before.get("chain_parts", {})), *_moved(image.key, before.get("key_parts", {}))]
    told = tuple(dict.fromkeys(reason for reason in reasons if reason != f"stage {image.name}"))
    return ImageChange(image, "changed", told, chain)


def _moved(key: Key, before: Mapping[str, str]) -> list[str]:
    return [part for part in sorted({*key.parts, *before}) if key.parts.get(part) != before.get(part)]


def largest(wheels: Iterable[Wheel], count: int) -> list[Wheel]:
    """The biggest wheels, biggest first."""
    return sorted(wheels, key=lambda wheel: (-(wheel.size or 0), wheel.name))[:count]


def read_record(path: Path) -> dict[str, Any]:
    """What the last builds on this machine left; empty when there is nothing readable."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def record_of(images: Iterable[ImagePlan]) -> dict[str, Any]:
    """The record that a build of these images leaves."""
    return {image.name: {"key": image.key.value, "chain": image.chain.value, "key_parts": dict(image.key.parts),
                         "chain_parts": dict(image.chain.parts)} for image in images}


def write_record(path: Path, images: Iterable[ImagePlan]) -> None:
    """Add a build to the record, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps({**read_record(path), **record_of(images)}, indent=1, sort_keys=True) + "\n",
                       encoding="utf-8")
    partial.replace(path)
