"""A stack and its lock as the rules see them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from buildctl import fragment
from buildctl.lock import Lock
from buildctl.manifest import Problems
from buildctl.stack import Stack

#: cu130, cu129, cu12
_LABEL = re.compile(r"cu(\d\d)(\d?)\b")


@dataclass(frozen=True, slots=True)
class Package:
    """One package of the server's environment: locked, or unlocked and asked for in exactly one version."""

    name: str
    version: Version
    index: str
    via: tuple[str, ...]
    requires: tuple[str, ...] | None
    locked: bool

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def label(self) -> str:
        """The local part of the version, as cu130 or cpu."""
        return self.version.local or ""

    @property
    def cuda(self) -> str:
        """CUDA of the local label: `13.0`, `12` where it tells the major alone, else empty."""
        match = _LABEL.search(self.label)
        return "" if match is None else f"{match[1]}.{match[2]}" if match[2] else match[1]

    def fits(self, specifier: str | SpecifierSet) -> bool:
        """Whether the version lies in a specifier; the local label counts only where the specifier has one."""
        wanted = SpecifierSet(specifier) if isinstance(specifier, str) else specifier
        return wanted.contains(self.version, prereleases=True)


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of the image or of the server, and where it is set."""

    name: str
    value: str
    where: str


@dataclass(frozen=True, slots=True)
class View:
    """What rules read."""

    stack: Stack
    lock: Lock
    packages: Mapping[str, Package]
    variables: tuple[Variable, ...]
    #: (where, instruction) of every layer's and the last stage's Dockerfile
    instructions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, stack: Stack, lock: Lock) -> View:
        """Read a stack and its lock."""
        instructions = tuple(_instructions(stack))
        return cls(stack, lock, _packages(lock), tuple(_variables(stack, instructions)), instructions)

    @property
    def cuda(self) -> str:
        """The stack's CUDA version; empty without CUDA."""
        return self.stack.cuda.version if self.stack.cuda else ""

    @property
    def sglang(self) -> Version | None:
        """The locked SGLang."""
        package = self.packages.get("sglang")
        return package.version if package else None

    @property
    def gpus(self) -> tuple[str, ...]:
        """The targets that are GPUs."""
        return tuple(target for target in self.stack.targets if target != "cpu")

    @property
    def words(self) -> dict[str, str]:
        """What advice may name."""
        return {"cuda": self.cuda or "none", "cu": f"cu{self.cuda.replace('.', '')}" if self.cuda else "cpu",
                "sglang": str(self.sglang or self.stack.profile.sglang)}

    def sglang_in(self, specifier: str) -> bool:
        """Whether the locked SGLang lies in a specifier; no when there is none."""
        return self.sglang is not None and SpecifierSet(specifier).contains(self.sglang, prereleases=True)

    def chain(self, name: str) -> str:
        """Who asked for a package: `a <- b <- the stack`; the shortest such chain."""
        chains, seen = [[name]], {name}
        while chains:
            chain = chains.pop(0)
            package = self.packages.get(chain[-1])
            via = package.via if package else (".",)
            if "." in via or not via:
                return " <- ".join((*chain, "the stack"))
            for parent in via:
                if parent not in seen:
                    seen.add(parent)
                    chains.append([*chain, parent])
        return name

    def patched(self, word: str) -> bool:
        """Whether the lock has a patch: `sglang:symm-mem` is `NNNN-symm-mem.patch` of SGLang's series."""
        package, _, concern = word.partition(":")
        series = self.lock.patches.get(package)
        return series is not None and any(re.fullmatch(rf"\d+-{re.escape(concern)}\.patch", name)
                                          for name, _ in series.patches)


def _packages(lock: Lock) -> dict[str, Package]:
    found = {}
    for wheel in lock.wheels:
        version = _version(wheel.version)
        if version is not None:
            found[wheel.name] = Package(wheel.name, version, wheel.index, wheel.via, wheel.requires, True)
    for entry in lock.unlocked:
        version = _version(entry.version or "")
        if version is not None:
            found[entry.name] = Package(entry.name, version, entry.index, (".",), None, False)
    return found


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _instructions(stack: Stack) -> Iterator[tuple[str, str]]:
    for image in (*stack.layers, stack.runtime):
        place = f"images/{image.name}/Dockerfile"
        for stage in fragment.parse(image.dockerfile, place, Problems()):
            for instruction in fragment.instructions(stage.body):
                yield place, instruction


def _variables(stack: Stack, instructions: tuple[tuple[str, str], ...]) -> Iterator[Variable]:
    for where, instruction in instructions:
        word, rest = fragment.split(instruction)
        if word != "ENV":
            continue
        try:
            found = fragment.variables(rest)
        except ValueError:
            continue  # composing refuses it, with its line
        for name, value in found.items():
            yield Variable(name, value, where)
    place = stack.place
    for name, value in stack.environment.items():
        yield Variable(name, value, f"{place}, environment")
    for name, value in stack.profile.environment.items():
        yield Variable(name, value, f"{place}, profile.environment")
