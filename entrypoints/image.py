"""What this image is: `/etc/buildctl/image.json` as a frozen object (format: docs/architecture.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from entrypoints.errors import BadConfig, Problem, Unusable

IMAGE_FILE = Path("/etc/buildctl/image.json")
#: names another image.json, for tests and for a server that is not in a container
IMAGE_VARIABLE = "ENTRYPOINT_IMAGE_FILE"
SCHEMA = 1

Scalar = str | int | float | bool
Flags = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch of the image; `marker` is a text that the patched branch writes to the log, or ""."""

    package: str
    name: str
    sha256: str
    concern: str
    marker: str


@dataclass(frozen=True, slots=True)
class Profile:
    """How the stack wants its server run: flags without dashes to scalars (`true`: no value, `false`: left out)."""

    sglang: str
    environment: Mapping[str, str]
    server: Flags
    arms: Mapping[str, Flags]


@dataclass(frozen=True, slots=True)
class Image:
    """Identity and content of the image; `python` is the server's interpreter."""

    image: str
    version: str
    stack: str
    key: str
    lock_sha256: str
    targets: tuple[str, ...]
    cuda: str | None
    python: Path
    packages: Mapping[str, str]
    patches: tuple[Patch, ...]
    trees: Mapping[str, str]
    profile: Profile

    @property
    def short_key(self) -> str:
        """First 16 hex digits of the content key: names the cache folder."""
        return self.key[:16]


def load(path: Path | None = None) -> Image:
    """Read image.json; `path` overrides the variable ENTRYPOINT_IMAGE_FILE, which overrides the usual place.

    Raises `Unusable` outside an image and `BadConfig` for a damaged file, with all its problems.
    """
    path = path or Path(os.environ.get(IMAGE_VARIABLE) or IMAGE_FILE)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Unusable(Problem(
            what="this is not an image built by buildctl", where=str(path), found=error.strerror or str(error),
            expected="a readable image.json",
            todo=f"run inside the image, or set {IMAGE_VARIABLE} to an image.json")) from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BadConfig(Problem(what="image.json is not JSON", where=str(path), found=str(error),
                                todo="rebuild the image")) from error
    return parse(document, str(path))


def parse(document: object, where: str) -> Image:
    """Check and freeze the content of image.json. Raises `BadConfig` with every problem found."""
    reader = _Reader(where)
    top = reader.mapping(document, "")
    if top.get("schema") != SCHEMA:
        reader.wrong("schema", top.get("schema"), f"{SCHEMA}", "use the entrypoint that was built with this image")
    profile = reader.mapping(top.get("profile", {}), "profile")
    image = Image(
        image=reader.text(top, "image"), version=reader.text(top, "version"), stack=reader.text(top, "stack"),
        key=reader.text(top, "key"), lock_sha256=reader.text(top, "lock_sha256"),
        targets=tuple(str(one) for one in reader.items(top.get("targets", []), "targets")),
        cuda=None if top.get("cuda") is None else str(top["cuda"]),
        python=Path(reader.text(top, "python")),
        packages=reader.texts(top.get("packages", {}), "packages"),
        patches=tuple(
            Patch(**{key: str(reader.mapping(one, f"patches[{index}]").get(key) or "") for key in Patch.__slots__})
            for index, one in enumerate(reader.items(top.get("patches", []), "patches"))),
        trees=reader.texts(top.get("trees", {}), "trees"),
        profile=Profile(
            sglang=str(profile.get("sglang", "")),
            environment=reader.texts(profile.get("environment", {}), "profile.environment"),
            server=reader.flags(profile.get("server", {}), "profile.server"),
            arms=MappingProxyType({
                name: reader.flags(flags, f"profile.arms.{name}")
                for name, flags in reader.mapping(profile.get("arms", {}), "profile.arms").items()})))
    if reader.problems:
        raise BadConfig(reader.problems)
    return image


class _Reader:
    """Collects what is wrong instead of stopping at the first thing."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []

    def wrong(self, key: str, found: object, expected: str, todo: str = "rebuild the image") -> None:
        self.problems.append(Problem(what=f"image.json: {key or 'top level'}", where=self.where,
                                     found=repr(found), expected=expected, todo=todo))

    def mapping(self, value: object, key: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.wrong(key, value, "an object")
        return {}

    def items(self, value: object, key: str) -> list[Any]:
        if isinstance(value, list):
            return value
        self.wrong(key, value, "a list")
        return []

    def text(self, table: Mapping[str, Any], key: str) -> str:
        value = table.get(key)
        if isinstance(value, str) and value:
            return value
        self.wrong(key, value, "a text")
        return ""

    def texts(self, value: object, key: str) -> Mapping[str, str]:
        return MappingProxyType({name: str(one) for name, one in self.mapping(value, key).items()})

    def flags(self, value: object, key: str) -> Flags:
        table = self.mapping(value, key)
        for name, one in table.items():
            if not isinstance(one, str | int | float | bool):
                self.wrong(f"{key}.{name}", one, "a text, a number, true or false")
        return MappingProxyType(table)
