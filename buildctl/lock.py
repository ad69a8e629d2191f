"""Locks: what a stack resolved to, `images/stacks/NAME.lock`. Generated, committed, enforced.

The file is JSON, sorted, without times or URLs: the same inputs give the same bytes, and a mirror may serve the
wheels. It carries a digest of itself, so that an edit by hand is noticed, and a digest per section
of what it was made from, so that a stale lock says which part of the stack moved on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from buildctl.errors import ManifestError, Problem
from buildctl.image import LayerImage
from buildctl.project import Project
from buildctl.stack import Stack

SCHEMA = 1
#: the index that uv and pip use when nothing else is said
PUBLIC = "public"
#: environments of a lock: the server's is partitioned over the layers
SERVER, ENTRYPOINT, TOOLS = "server", "entrypoint", "tools"


@dataclass(frozen=True, slots=True)
class Wheel:
    """One locked file. `size` in bytes, None where the index does not tell it."""

    name: str
    version: str
    layer: str
    index: str
    file: str
    sha256: str
    size: int | None
    #: locked packages that need this one; `.` is the stack itself
    via: tuple[str, ...]
    #: what its METADATA requires with a version, or of packages that the lock lacks; None where it could not be read
    requires: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Unlocked:
    """A package whose only index was out of reach when the lock was made: no file, no hash."""

    name: str
    requirement: str
    layer: str
    index: str

    @property
    def version(self) -> str | None:
        """The version, where exactly one is asked for."""
        pins = [item.version for item in Requirement(self.requirement).specifier if item.operator == "=="]
        return pins[0] if len(pins) == 1 and not pins[0].endswith("*") else None


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two packages that install files of the same path with different content: how many, and the first few."""

    first: str
    second: str
    files: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LockedBase:
    """The base that builds start from: an image by digest, or a bootstrap by its specification."""

    source: str
    image: str = ""
    digest: str = ""
    suite: str = ""
    include: tuple[str, ...] = ()
    #: the state of Debian's archive that packages come from, as 20261201T000000Z; empty: what a mirror has
    snapshot: str = ""

    @property
    def pinned(self) -> str:
        """The image as FROM takes it, its digest once. Older locks have the digest in `image`, too."""
        name = self.image.partition("@")[0]
        return f"{name}@{self.digest}" if self.digest else name


@dataclass(frozen=True, slots=True)
class LockedSeries:
    """The patch series of one package: what it is applied to, its patches in order, and what must come out."""

    folder: str
    wheel_sha256: str
    patches: tuple[tuple[str, str], ...]
    tree: str


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock as read or made."""

    stack: str
    python: str
    platform: str
    base: LockedBase
    wheels: tuple[Wheel, ...]
    entrypoint: tuple[Wheel, ...]
    tools: tuple[Wheel, ...]
    patches: Mapping[str, LockedSeries]
    #: packages of ours, path under images/ -> digest of the folder
    local: Mapping[str, str]
    #: seconds since 1970 of the youngest wheel; the time that goes into images
    epoch: int
    #: section -> digest of the part of the stack that it was made from
    inputs: Mapping[str, str] = field(default_factory=dict)
    unlocked: tuple[Unlocked, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    #: Debian packages of the base, of what each layer adds, and of the tools: name -> `version sha256:HEX`.
    #: Empty for a base from a registry, whose digest stands for them, and for a lock made where there is no apt
    debian: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def share(self, layer: str) -> tuple[Wheel, ...]:
        """The wheels that a layer installs."""
        return tuple(wheel for wheel in self.wheels if wheel.layer == layer)

    @property
    def open_ends(self) -> tuple[str, ...]:
        """What the lock does not pin, as messages name it: packages of indexes that were out of reach, the base."""
        base = (f"base {self.base.image}",) if self.base.source == "registry" and not self.base.digest else ()
        return (*base, *(f"{entry.requirement} of index '{entry.index}'" for entry in self.unlocked))

    def version(self, package: str) -> str | None:
        """The version of a package of the server's environment: locked, or asked for where that is all there is."""
        wanted = canonicalize_name(package)
        locked = next((wheel.version for wheel in self.wheels if wheel.name == wanted), None)
        return locked or next((entry.version for entry in self.unlocked if entry.name == wanted), None)

    def wheel(self, package: str) -> Wheel | None:
        """The locked wheel of a package of the server's environment."""
        wanted = canonicalize_name(package)
        return next((wheel for wheel in self.wheels if wheel.name == wanted), None)


def restrict(lock: Lock, layers: Iterable[LayerImage]) -> Lock:
    """The part of a lock that a chain up to some layer consists of."""
    chain = tuple(layers)
    names = {layer.name for layer in chain}
    patched = {package for layer in chain for package in layer.patches}
    wheels = tuple(wheel for wheel in lock.wheels if wheel.layer in names)
    present = {wheel.name for wheel in wheels}
    return replace(lock, wheels=wheels, unlocked=tuple(entry for entry in lock.unlocked if entry.layer in names),
                   overlaps=tuple(pair for pair in lock.overlaps if {pair.first, pair.second} <= present),
                   patches={package: series for package, series in lock.patches.items() if package in patched},
                   debian={place: packages for place, packages in lock.debian.items() if place in {"base", *names}},
                   inputs={})


def digest(value: object) -> str:
    """sha256 of the canonical JSON of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """sha256 over the names and contents of a folder's files; times, modes and caches do not count."""
    entries = [(str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest())
               for path in sorted(folder.rglob("*")) if path.is_file() and counts(path)]
    return digest(entries)


def counts(path: Path) -> bool:
    """Whether a file belongs to the sources; caches and build products do not."""
    return not any(part in ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache") or part.endswith(".egg-info")
                   for part in path.parts) and path.suffix != ".pyc"


def inputs_of(stack: Stack, project: Project) -> dict[str, str]:
    """Digest per section of everything that a lock is made from."""
    layers = [layer.name for layer in stack.layers]
    resolution = {
        "python": stack.python, "platform": stack.platform, "glibc": stack.glibc, "layers": layers,
        "requirements": {layer: list(stack.requirements.get(layer, ())) for layer in layers},
        "constraints": [rule.text for rule in stack.constraints],
        "overrides": [rule.text for rule in stack.overrides],
        "excludes": [rule.text for rule in stack.excludes],
        "prerelease": list(stack.prerelease),
        "indexes": [asdict(index) for index in stack.indexes],
    }
    bootstrap = stack.base.bootstrap
    return {
        "requirements": digest(resolution),
        "entrypoint": digest([stack.python, stack.platform, stack.glibc, list(stack.runtime.requirements)]),
        "tools": digest([stack.python, stack.platform, stack.glibc, list(stack.tools.requirements)]),
        "base": digest([stack.base.image, asdict(bootstrap) if bootstrap else None]),
        "debian": digest([stack.platform, apt_of(stack)]),
        "patches": digest({package: _series_files(project.patches / folder)
                           for package, folder in stack.patches.items()}),
        "local": digest(local_of(stack, project)),
        # flags are checked against the server's own parser when a lock is made
        "profile": digest(stack.profile.as_dict()),
    }


def apt_of(stack: Stack) -> dict[str, tuple[str, ...]]:
    """The Debian packages that each layer asks for, in build order, and the build's tools."""
    found = {layer.name: tuple(dict.fromkeys((*layer.apt, *stack.apt.get(layer.name, ()))))
             for layer in (*stack.layers, stack.tools)}
    return {layer: names for layer, names in found.items() if names}


def local_of(stack: Stack, project: Project) -> dict[str, str]:
    """Digest per package of ours that the stack installs."""
    return {path: folder_digest(project.images / path) for paths in stack.local.values() for path in paths}


def _series_files(folder: Path) -> list[tuple[str, str]]:
    return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(folder.iterdir()) if path.is_file()] if folder.is_dir() else []


def path_of(stack: Stack) -> Path:
    """Where the lock of a stack lies."""
    return stack.path.with_suffix(".lock")


def dump(lock: Lock) -> str:
    """The text of a lock file."""
    body = _body(lock)
    body["sha256"] = digest(body)
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def text_digest(lock: Lock) -> str:
    """SHA-256 of the lock file, as image.json and the labels name it and `sha256sum` shows it."""
    return hashlib.sha256(dump(lock).encode()).hexdigest()


def _body(lock: Lock) -> dict[str, Any]:
    plain = asdict(lock)
    for key in ("wheels", "entrypoint", "tools"):
        plain[key] = [{name: value for name, value in wheel.items() if value is not None}
                      for wheel in sorted(plain[key], key=lambda wheel: wheel["name"])]
    plain["base"] = {name: value for name, value in plain["base"].items() if value}
    for key in ("unlocked", "overlaps", "debian"):  # absent where there is nothing
        if not plain[key]:
            del plain[key]
    return {"schema": SCHEMA, **json.loads(json.dumps(plain, sort_keys=True))}


def load(stack: Stack, project: Project) -> Lock:
    """Read the lock of a stack and refuse it when it is missing, edited or stale.

    :raises ManifestError: with what is wrong and the command that mends it.
    """
    lock = read(path_of(stack), project)
    stale = stale_sections(lock, stack, project)
    if stale:
        hint = " (patches alone need no resolver)" if stale == ["patches"] else ""
        raise ManifestError(Problem(f"the lock of '{stack.name}' is stale", project.shown(path_of(stack)),
                                    found=f"changed since: {', '.join(stale)}", expected="a lock of the stack as it is",
                                    todo=f"run `buildctl lock {stack.name}`{hint}"))
    return lock


def stale_sections(lock: Lock, stack: Stack, project: Project) -> list[str]:
    """The sections whose inputs are not those that the lock was made from."""
    now = inputs_of(stack, project)
    return sorted(section for section in now if lock.inputs.get(section) != now[section])


def read(path: Path, project: Project) -> Lock:
    """Read a lock file, without asking whether it fits a stack.

    :raises ManifestError: missing, not JSON, of another schema, or edited by hand.
    """
    shown = project.shown(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ManifestError(Problem(f"stack '{path.stem}' has no lock", shown,
                                    todo=f"run `buildctl lock {path.stem}`")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(Problem("cannot read the lock", shown, found=str(error))) from None
    return parse(text, shown, path.stem)


def parse(text: str, shown: str, stack: str) -> Lock:
    """Read the text of a lock.

    :param shown: the file's name in messages.
    :raises ManifestError: not JSON, of another schema, or edited by hand.
    """
    remake = f"run `buildctl lock {stack}`"
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ManifestError(Problem("the lock is not valid JSON", f"{shown}:{error.lineno}", found=error.msg,
                                    todo=f"restore it from version control, or {remake}")) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = str(data.get("schema")) if isinstance(data, dict) else type(data).__name__
        raise ManifestError(Problem("the lock has a form that this buildctl does not know", shown,
                                    found=f"schema {found}", expected=f"schema {SCHEMA}", todo=remake))
    stated = data.pop("sha256", None)
    actual = digest(data)
    if stated != actual:
        raise ManifestError(Problem("the lock was changed by hand or damaged", shown, found=f"content {actual[:16]}",
                                    expected=f"content {str(stated)[:16]}",
                                    todo=f"restore it from version control, or {remake}"))
    try:
        return _from_dict(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(Problem("the lock lacks a part", shown, found=repr(error), todo=remake)) from None


def _from_dict(data: dict[str, Any]) -> Lock:
    def wheels(key: str) -> tuple[Wheel, ...]:
        return tuple(Wheel(**{"size": None, **wheel, "via": tuple(wheel["via"]),
                              "requires": tuple(wheel["requires"]) if "requires" in wheel else None})
                     for wheel in data[key])

    base = data["base"]
    return Lock(
        stack=data["stack"], python=data["python"], platform=data["platform"],
        base=LockedBase(**{**base, "include": tuple(base.get("include", ()))}),
        wheels=wheels("wheels"), entrypoint=wheels("entrypoint"), tools=wheels("tools"),
        patches={package: LockedSeries(series["folder"], series["wheel_sha256"],
                                       tuple((name, sha) for name, sha in series["patches"]), series["tree"])
                 for package, series in data["patches"].items()},
        local=data["local"], epoch=data["epoch"], inputs=data["inputs"],
        unlocked=tuple(Unlocked(**entry) for entry in data.get("unlocked", ())),
        debian=data.get("debian", {}),
        overlaps=tuple(Overlap(**{**entry, "paths": tuple(entry["paths"])}) for entry in data.get("overlaps", ())))


def partition(layers: Mapping[str, tuple[str, ...]], via: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Assign every package to the first layer whose requirements need it, directly or through others.

    :param layers: layer -> requirements, in build order.
    :param via: package -> the packages that need it.
    :returns: package -> layer; packages that no layer needs go to the last one.
    """
    needs: dict[str, set[str]] = {}
    for package, parents in via.items():
        for parent in parents:
            needs.setdefault(parent, set()).add(package)
    owner: dict[str, str] = {}
    for layer, requirements in layers.items():
        open_ends: list[str] = [canonicalize_name(Requirement(text).name) for text in requirements]
        while open_ends:
            package = open_ends.pop()
            if package in via and package not in owner:
                owner[package] = layer
                open_ends.extend(needs.get(package, ()))
    last = list(layers)[-1]
    return {package: owner.get(package, last) for package in via}
