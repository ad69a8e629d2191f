"""What known registries take: layer sizes and upload times, checked before the first byte moves. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from buildctl.errors import Problem

GB, MIB = 1000 ** 3, 1024 ** 2
#: overlayfs and the engine stop at this many layers
MOST_LAYERS = 127
#: from this share of a limit on a layer is worth a warning
NEARLY = 0.95


@dataclass(frozen=True, slots=True)
class Limit:
    """Largest layer in bytes and longest upload of one layer in seconds (0: not known)."""

    hosts: str
    layer_bytes: int
    upload_seconds: int
    source: str


#: the registries' own documentation, as of 2026-08
LIMITS = (
    Limit("ghcr.io", 10 * GB, 600, "GitHub: working with the container registry"),
    Limit("*.dkr.ecr.*.amazonaws.com", 52_000 * MIB, 0, "Amazon ECR service quotas"),
    Limit("public.ecr.aws", 10_000 * MIB, 0, "Amazon ECR Public service quotas"),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer to be pushed: bytes as they travel (`exact`) or unpacked (an upper bound), and what made it."""

    size: int
    made_by: str = ""
    exact: bool = True


def limit_of(registry: str) -> Limit | None:
    """What is known about a registry host."""
    return next((limit for limit in LIMITS if fnmatch(registry, limit.hosts)), None)


def within(layers: Iterable[Layer], registry: str) -> bool:
    """Whether no layer comes near the registry's limit, so that the exact sizes need not be known."""
    limit = limit_of(registry)
    return limit is None or all(layer.size < NEARLY * limit.layer_bytes for layer in layers)


def check(layers: Iterable[Layer], registry: str, *, count: int = 0,
          rate: float = 0.0) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings for pushing these layers to a registry.

    `count` is how many there are where empty ones are not among `layers`, `rate` the upload rate in bytes per second
    where it is known. A size that is only an upper bound never is an error.
    """
    layers = tuple(layers)
    count = max(count, len(layers))
    limit = limit_of(registry)
    errors: list[Problem] = []
    warnings: list[Problem] = []
    if count > MOST_LAYERS:
        errors.append(Problem("the image has too many layers", registry, str(count), f"at most {MOST_LAYERS}",
                              "join RUN steps"))
    if limit is None:
        return errors, warnings
    for number, layer in enumerate(layers, 1):
        where = f"layer {number} of {len(layers)}" + (f" ({_short(layer.made_by)})" if layer.made_by else "")
        found = f"{layer.size / GB:.2f} GB" + ("" if layer.exact else " unpacked")
        expected = f"at most {limit.layer_bytes / GB:.2f} GB per layer on {registry} ({limit.source})"
        if layer.size > limit.layer_bytes and layer.exact:
            errors.append(Problem("the layer is over the registry's limit", where, found, expected,
                                  "split the step that made it, so that each layer stays below"))
        elif layer.size > NEARLY * limit.layer_bytes:
            warnings.append(Problem("the layer is near the registry's limit", where, found, expected,
                                    "split the step before it grows"))
        if rate and limit.upload_seconds and layer.size / rate > limit.upload_seconds:
            warnings.append(Problem("the layer's upload may be cut off", where,
                                    f"{layer.size / rate:.0f} s at {rate / 1e6:.1f} MB/s",
                                    f"at most {limit.upload_seconds} s per upload on {registry}",
                                    "split the layer, or push from a faster line"))
    return errors, warnings


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
