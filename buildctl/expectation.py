"""What an image has to be, by its stack and lock: the side of a comparison that does not come from the image."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from buildctl import compose, context, fragment
from buildctl import lock as locks
from buildctl.compose import Composition
from buildctl.fragment import Stage
from buildctl.lock import Lock

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a container starts with, in the form of an image's config; durations in seconds."""

    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    volumes: frozenset[str] = frozenset()
    ports: frozenset[str] = frozenset()
    healthcheck: tuple[str, ...] = ()
    #: interval, timeout, start period
    times: Mapping[str, float] = field(default_factory=dict)
    #: layers that the instructions make; those of a base image come on top of it
    layers: int = 0


@dataclass(frozen=True, slots=True)
class Expectation:
    """An image as stack and lock want it."""

    image: str
    #: the lock, and the part of it that this image consists of
    stack: str
    part: Lock
    settings: Settings
    labels: Mapping[str, str]
    #: packages that Debian's installer was asked for
    apt: frozenset[str]
    #: packages of ours, name -> version
    own: Mapping[str, str]
    #: patch file -> content, of the series in the checkout
    patches: Mapping[str, bytes]
    #: content key of the image as this checkout makes it, and the entrypoint's files in it: path -> SHA-256 in hex
    key: str = ""
    entrypoint: Mapping[str, str] = field(default_factory=dict)
    #: packages that are installed after Debian's, so that their layers lie above
    above: frozenset[str] = frozenset()

    @property
    def packages(self) -> dict[str, str | None]:
        """What the server's environment holds: name -> version, None where the lock leaves it open."""
        return {**{wheel.name: wheel.version for wheel in self.part.wheels},
                **{entry.name: entry.version for entry in self.part.unlocked}, **self.own}

    @property
    def helpers(self) -> dict[str, str | None]:
        """What the entrypoint's environment holds."""
        return {wheel.name: wheel.version for wheel in self.part.entrypoint}


def of(composition: Composition, name: str) -> Expectation:
    """What the image `name` of a composition has to be.

    :raises ManifestError: the stack has no such image.
    """
    stack, lock = composition.stack, composition.lock
    layer = stack.layer(name)
    below = stack.layers[: stack.layers.index(layer) + 1]
    own: dict[str, str] = {}
    for one in below:
        for path in stack.local.get(one.name, ()):
            package, _, version = context.local_version(stack.path.parent.parent / path).partition("==")
            own[re.sub(r"[-_.]+", "-", package).lower()] = version
    part = locks.restrict(lock, below)
    prefix = f"image/{name}/patches/"
    last = max((number for number, one in enumerate(below) if one.apt), default=0)
    late = {one.name for one in below[last:]}
    return Expectation(
        image=name, stack=stack.name, part=part,
        settings=settings_of(composition.stages, composition.image(name).stage),
        labels=compose.labels_of(stack, lock, layer),
        apt=frozenset(package for one in below if one.apt for package in (*one.apt, *stack.apt.get(one.name, ()))),
        own=own, patches={path.removeprefix(prefix): file.content() for path, file in composition.files.items()
                          if path.startswith(prefix)},
        key=composition.image(name).key.value,
        entrypoint={path: file.digest() for path, file in composition.files.items() if path.startswith("entrypoints/")},
        above=frozenset(wheel.name for wheel in part.wheels if wheel.layer in late))


def settings_of(stages: Iterable[Stage], target: str) -> Settings:
    """What the instructions of a stage and of those that it stands on leave in the config, variables unexpanded."""
    known = tuple(stages)
    values: dict[str, Any] = {"environment": {}, "volumes": set(), "ports": set(),
                              "layers": fragment.layers(known, target)}
    for stage in fragment.below(known, target):
        for instruction in fragment.instructions(stage.body):
            _instruct(values, *fragment.split(instruction))
    return Settings(**{**values, "volumes": frozenset(values["volumes"]), "ports": frozenset(values["ports"])})


def _instruct(values: dict[str, Any], word: str, rest: str) -> None:
    if word == "ENV":
        values["environment"] |= fragment.variables(rest)
    elif word == "USER":
        values["user"] = rest
    elif word == "WORKDIR":
        values["folder"] = rest
    elif word in ("ENTRYPOINT", "CMD"):
        values[word.lower()] = _words(rest)
    elif word == "VOLUME":
        values["volumes"] |= set(_words(rest))
    elif word == "EXPOSE":
        values["ports"] |= {port if "/" in port else f"{port}/tcp" for port in rest.split()}
    elif word == "HEALTHCHECK":
        options, _, command = rest.partition("CMD ")
        values["healthcheck"] = ("CMD", *_words(command)) if command else ("NONE",)
        values["times"] = {name.removeprefix("--"): seconds(value) for name, equals, value in
                           (option.partition("=") for option in options.split()) if equals and name != "--retries"}


def _words(text: str) -> tuple[str, ...]:
    """The words of an instruction, in exec form or as a shell would get them."""
    if text.startswith("["):
        return tuple(json.loads(text))
    return ("/bin/sh", "-c", text)


def seconds(text: str) -> float:
    """A duration as Dockerfiles write it, such as `1m30s`, in seconds."""
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([\d.]+)(ns|us|ms|s|m|h)", text))
