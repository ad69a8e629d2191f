"""Stacks: one set of versions for the whole chain, `images/stacks/NAME.yaml`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from buildctl import image as images_module
from buildctl import manifest, reference
from buildctl.errors import ManifestError, Problem, UsageError
from buildctl.image import RUNTIME, TOOLS, LayerImage, ancestors
from buildctl.manifest import Problems, Scalar, Table
from buildctl.project import NAME, NAME_HELP, Project

#: GPU targets by the name of their compute capability; `cpu` stands for none
TARGETS = {"cpu": "no GPU", "sm80": "8.0", "sm89": "8.9", "sm90": "9.0", "sm100": "10.0", "sm103": "10.3",
           "sm120": "12.0", "sm121": "12.1"}
#: what FlashInfer compiles for, at build time and at run time
ARCH_VARIABLE = "FLASHINFER_CUDA_ARCH_LIST"
_ENV = r"[A-Za-z_][A-Za-z0-9_]*"
_FLAG = r"[a-z0-9][a-z0-9-]*"


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A base made by mmdebstrap from the machine's own Debian mirror."""

    suite: str
    include: tuple[str, ...]
    #: a state of Debian's archive, as 20261201T000000Z; empty: what the mirror has when the lock is made
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Base:
    """What the chain stands on: an image of a registry, a bootstrap, or either."""

    image: str | None
    bootstrap: Bootstrap | None


@dataclass(frozen=True, slots=True)
class Cuda:
    """The CUDA toolkit of a stack: `wheels` of NVIDIA, or part of the `base` image."""

    version: str
    source: str


@dataclass(frozen=True, slots=True)
class Index:
    """A package index; exactly the named packages come from it, and from nowhere else."""

    name: str
    url: str
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """An override, constraint or exclusion, with the reason for it."""

    text: str
    reason: str
    place: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """A finding of a compatibility rule that the stack lives with: about one package, variable or flag, or any."""

    rule: str
    subject: str
    reason: str
    place: str


@dataclass(frozen=True, slots=True)
class Profile:
    """How the stack's server is run: environment and flags of every arm."""

    sglang: str
    environment: Mapping[str, str]
    server: Mapping[str, Scalar]
    arms: Mapping[str, Mapping[str, Scalar]]

    def as_dict(self) -> dict[str, object]:
        """For image.json."""
        return {"sglang": self.sglang, "environment": dict(self.environment), "server": dict(self.server),
                "arms": {name: dict(flags) for name, flags in self.arms.items()}}


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack with the layer images that it uses, in build order."""

    name: str
    path: Path
    place: str
    description: str
    #: what every tag of the stack's images ends with
    tag: str
    python: str
    platform: str
    glibc: str
    base: Base
    cuda: Cuda | None
    targets: tuple[str, ...]
    layers: tuple[LayerImage, ...]
    runtime: LayerImage
    tools: LayerImage
    requirements: Mapping[str, tuple[str, ...]]
    local: Mapping[str, tuple[str, ...]]
    apt: Mapping[str, tuple[str, ...]]
    #: kernels that a layer compiles at build time, for ARCH_VARIABLE of `environment`
    jit: Mapping[str, tuple[str, ...]]
    environment: Mapping[str, str]
    constraints: tuple[Rule, ...]
    overrides: tuple[Rule, ...]
    excludes: tuple[Rule, ...]
    prerelease: tuple[str, ...]
    accept: tuple[Accepted, ...]
    indexes: tuple[Index, ...]
    #: libraries, by pattern, that may lack what they need or be of another CUDA: the guard lets them pass
    optional: tuple[Rule, ...]
    patches: Mapping[str, str]
    profile: Profile

    def layer(self, name: str) -> LayerImage:
        """The layer image of that name.

        :raises ManifestError: the stack has no such layer.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise ManifestError(Problem(f"stack '{self.name}' has no image '{name}'", self.place,
                                    todo=manifest.suggest(name, [layer.name for layer in self.layers])))


def names(project: Project) -> list[str]:
    """The stacks of a project."""
    return sorted(path.stem for path in project.stacks.glob("*.yaml"))


def load(project: Project, name: str) -> Stack:
    """Read a stack and the images that it names.

    :raises ManifestError: with every problem of the stack and its images.
    """
    if name not in names(project):
        raise ManifestError(Problem(f"there is no stack '{name}'", project.shown(project.stacks),
                                    todo=manifest.suggest(name, names(project))))
    problems = Problems()
    images = images_module.load_all(project, problems)
    stack = _load(project, name, images, problems)
    problems.raise_any()
    assert stack is not None  # no problems means a stack
    return stack


def _load(project: Project, name: str, images: Mapping[str, LayerImage], problems: Problems) -> Stack | None:
    path = project.stacks / f"{name}.yaml"
    table = manifest.load(path, project.shown(path), problems, f"stack '{name}'")
    if table is None:
        return None
    if not re.fullmatch(NAME, name):
        problems.add(f"'{name}' cannot be the name of a stack", table.path, expected=NAME_HELP)
    layers = _layers(table, images, problems)
    words = [layer.name for layer in layers]
    special = {word: images[word] for word in (RUNTIME, TOOLS) if word in images}
    for word in (RUNTIME, TOOLS):
        if word not in special:
            problems.add(f"the project has no image '{word}'", "images", todo=f"restore images/{word}")
    stack = Stack(
        name=name,
        path=path,
        place=f"{table.path}:1",
        description=table.string("description"),
        tag=table.string("tag", pattern=NAME, expected=NAME_HELP),
        python=table.string("python", pattern=r"3\.\d+", expected='a minor version of Python, as "3.11"'),
        platform=table.choice("platform", ("linux/amd64", "linux/arm64"), "linux/amd64"),
        glibc=table.string("glibc", pattern=r"2\.\d+", expected='a version of glibc, as "2.36"'),
        base=_base(table, problems),
        cuda=_cuda(table),
        targets=_targets(table, problems),
        layers=layers,
        runtime=special.get(RUNTIME, _NOTHING),
        tools=special.get(TOOLS, _NOTHING),
        requirements=_per_layer(table, "requirements", words, problems, _requirement),
        local=_per_layer(table, "local", words, problems, _local(project)),
        apt=_per_layer(table, "apt", words, problems, _apt),
        jit=_per_layer(table, "jit", words, problems, _module),
        environment=_environment(table, "environment", problems),
        constraints=_rules(table, "constraints", "requirement", problems),
        overrides=_rules(table, "overrides", "requirement", problems),
        excludes=_rules(table, "excludes", "package", problems),
        prerelease=tuple(canonicalize_name(word) for word in table.strings("prerelease", pattern=NAME)),
        accept=_accept(table),
        indexes=_indexes(table, problems),
        optional=_optional(table),
        patches=_patches(table, project, layers, problems),
        profile=_profile(table, problems),
    )
    for layer in layers:
        if stack.apt.get(layer.name) and not layer.apt:
            problems.add(f"image '{layer.name}' has no step that installs Debian packages", table.place("apt"),
                         found=f"apt: {{{layer.name}: ...}}",
                         expected=f"one of {', '.join(one.name for one in layers if one.apt) or 'none here'}",
                         todo="name the packages under a layer that installs some; the ones above have them too")
    if stack.jit and ARCH_VARIABLE not in stack.environment:
        problems.add("'jit' without the targets to compile for", table.place("jit"),
                     expected=f'environment: {{{ARCH_VARIABLE}: "12.0f"}} or the like')
    table.close()
    return stack


_NOTHING = LayerImage("", Path(), "", None, None, (), (), (), "", "")


def _layers(table: Table, images: Mapping[str, LayerImage], problems: Problems) -> tuple[LayerImage, ...]:
    named = table.placed_strings("layers")
    if not named:
        problems.add("a stack needs layers", table.place("layers"), expected="layers: [cuda, torch, ...]")
    chosen: list[str] = []
    for word, where in named:
        if word in chosen:
            problems.add(f"layer '{word}' stands twice", where, todo="keep one")
        elif word in (RUNTIME, TOOLS):
            problems.add(f"'{word}' is part of every image", where, todo="leave it out of layers")
        elif word not in images:
            problems.add(f"there is no image '{word}'", where,
                         todo=manifest.suggest(word, images.keys() - {RUNTIME, TOOLS}))
        else:
            chosen.append(word)
    depth = {word: len(ancestors(images, word)) for word in chosen}
    ordered = sorted(chosen, key=lambda word: (depth[word], word))
    for lower, upper in itertools.pairwise(ordered):
        if lower not in ancestors(images, upper):
            problems.add(f"'{upper}' does not stand on '{lower}'", table.place("layers"),
                         found=f"parents of '{upper}': {', '.join(ancestors(images, upper)) or 'none'}",
                         expected="layers that form one chain")
    return tuple(images[word] for word in ordered)


def _base(table: Table, problems: Problems) -> Base:
    inner = table.table("base", required=True)
    if inner is None:
        return Base(None, None)
    image = _image(inner, problems)
    bootstrap = None
    sub = inner.table("bootstrap")
    if sub is not None:
        bootstrap = Bootstrap(sub.string("suite", pattern=r"[a-z]+"),
                              sub.strings("include", pattern=r"[a-z0-9][a-z0-9+.-]+"),
                              sub.string("snapshot", "", pattern=r"\d{8}T\d{6}Z",
                                         expected="a time as snapshot.debian.org writes it, 20261201T000000Z"))
        sub.close()
    if not image and bootstrap is None:
        problems.add("'base' names neither an image nor a bootstrap", inner.where(),
                     expected="image: REFERENCE, or bootstrap: {suite: SUITE}, or both")
    inner.close()
    return Base(image or None, bootstrap)


def _image(table: Table, problems: Problems) -> str:
    text = table.string("image", "")
    try:
        if text and reference.parse(text).digest.startswith("sha512:"):
            problems.add("builds cannot take a base by such a digest", table.place("image"), found=text,
                         expected="sha256: and 64 hex digits")
    except UsageError as error:
        problems.found += [replace(problem, what=f"'image' of 'base' is no image reference: {problem.what}",
                                   where=table.place("image"), todo="write it as debian:bookworm-slim or "
                                   "REGISTRY/NAME:TAG@sha256:DIGEST") for problem in error.problems]
    return text


def _cuda(table: Table) -> Cuda | None:
    inner = table.table("cuda")
    if inner is None:
        return None
    cuda = Cuda(inner.string("version", pattern=r"\d+\.\d+", expected='"13.0" or the like'),
                inner.choice("from", ("wheels", "base")))
    inner.close()
    return cuda


def _targets(table: Table, problems: Problems) -> tuple[str, ...]:
    targets = table.strings("targets", required=True)
    for target in targets:
        if target not in TARGETS:
            problems.add(f"unknown GPU target '{target}'", table.place("targets"),
                         todo=manifest.suggest(target, TARGETS))
    return targets


def _per_layer(table: Table, key: str, layers: list[str], problems: Problems,
               check: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    inner = table.table(key)
    if inner is None:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for layer in inner.keys():  # noqa: SIM118 - marks known
        if layer not in layers:
            problems.add(f"'{key}' names a layer that the stack does not have", inner.place(layer), found=layer,
                         todo=manifest.suggest(layer, layers))
        values = inner.placed_strings(layer)
        for value, where in values:
            problem = check(value)
            if problem:
                problems.add(f"'{value}' in '{key}' {problem}", where)
        found[layer] = tuple(value for value, _ in values)
    return found


def _requirement(text: str) -> str:
    try:
        parsed = Requirement(text)
    except InvalidRequirement as error:
        return f"is not a requirement: {str(error).splitlines()[0]}"
    return "names a URL; a lock needs a version and an index" if parsed.url else ""


def _apt(text: str) -> str:
    return "" if re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", text) else "is not the name of a Debian package"


def _module(text: str) -> str:
    return "" if re.fullmatch(r"[A-Za-z0-9_*?\[\]-]+", text) else "is not the name or pattern of a module"


def _local(project: Project) -> Callable[[str], str]:
    def check(text: str) -> str:
        folder = (project.images / text).resolve()
        if not folder.is_relative_to(project.images.resolve()):
            return "lies outside images/"
        return "" if (folder / "pyproject.toml").is_file() else "is not a folder under images/ with a pyproject.toml"
    return check


def _rules(table: Table, key: str, field: str, problems: Problems) -> tuple[Rule, ...]:
    rules = []
    for inner in table.tables(key):
        text = inner.string(field)
        if text:
            problem = _requirement(text)
            if problem:
                problems.add(f"'{text}' in '{key}' {problem}", inner.place(field))
        rules.append(Rule(text, inner.string("reason"), inner.where()))
        inner.close()
    return tuple(rules)


def _optional(table: Table) -> tuple[Rule, ...]:
    rules = []
    for inner in table.tables("optional"):
        rules.append(Rule(inner.string("library"), inner.string("reason"), inner.where()))
        inner.close()
    return tuple(rules)


def _accept(table: Table) -> tuple[Accepted, ...]:
    found = []
    for inner in table.tables("accept"):
        found.append(Accepted(inner.string("rule", pattern=r"[a-z0-9-]+", expected="the id of a rule"),
                              canonicalize_name(inner.string("of", "")), inner.string("reason"), inner.where()))
        inner.close()
    return tuple(found)


def _indexes(table: Table, problems: Problems) -> tuple[Index, ...]:
    indexes: list[Index] = []
    owners: dict[str, str] = {}
    for inner in table.tables("indexes"):
        index = Index(inner.string("name", pattern=NAME, expected=NAME_HELP),
                      inner.string("url", pattern=r"https?://[^\s@]+", expected="an http(s) URL without credentials"),
                      tuple(canonicalize_name(word) for word in inner.strings("packages", required=True)))
        inner.close()
        for package in index.packages:
            if package in owners:
                problems.add(f"'{package}' comes from two indexes", inner.place("packages"),
                             found=f"{owners[package]}, {index.name}", expected="exactly one")
            owners[package] = index.name
        indexes.append(index)
    return tuple(indexes)


def _patches(table: Table, project: Project, layers: tuple[LayerImage, ...], problems: Problems) -> dict[str, str]:
    patchable = {package for layer in layers for package in layer.patches}
    found: dict[str, str] = {}
    inner = table.table("patches")
    if inner is None:
        return found
    for package in inner.keys():  # noqa: SIM118 - marks known
        folder = inner.string(package, pattern=rf"{NAME}/[a-z0-9][a-z0-9.+_-]*",
                              expected="PACKAGE/VERSION under patches/")
        if package not in patchable:
            problems.add(f"no layer of the stack applies patches to '{package}'", inner.place(package),
                         todo=manifest.suggest(package, patchable))
        if folder and not (project.patches / folder / "series").is_file():
            problems.add(f"there is no series at patches/{folder}", inner.place(package),
                         expected=f"patches/{folder}/series")
        found[package] = folder
    return found


def _environment(table: Table, key: str, problems: Problems) -> dict[str, str]:
    found: dict[str, str] = {}
    inner = table.table(key)
    if inner is None:
        return found
    for name in inner.keys():  # noqa: SIM118 - marks known
        if not re.fullmatch(_ENV, name):
            problems.add(f"'{name}' cannot be the name of an environment variable", inner.place(name))
        found[name] = inner.string(name)
        if not found[name].isprintable():
            problems.add(f"'{name}' in '{key}' cannot be the value of an environment variable", inner.place(name),
                         found=repr(found[name]), expected="one line of text")
    return found


def _profile(table: Table, problems: Problems) -> Profile:
    inner = table.table("profile", required=True)
    if inner is None:
        return Profile("", {}, {}, {})
    profile = Profile(
        sglang=inner.string("sglang"),
        environment=_environment(inner, "environment", problems),
        server=inner.scalars("server"),
        arms=inner.mapping("arms", lambda arms, arm: {} if (one := arms.table(arm)) is None
                           else {flag: one.scalar(flag) for flag in one.keys()}),  # noqa: SIM118 - marks known
    )
    flags = {flag for group in (profile.server, *profile.arms.values()) for flag in group}
    for flag in sorted(flags):
        if not re.fullmatch(_FLAG, flag):
            problems.add(f"'{flag}' cannot be a server flag", inner.where(),
                         expected="the flag's name without its dashes, as mem-fraction-static")
    if "baseline" not in profile.arms:
        problems.add("the profile has no arm 'baseline'", inner.place("arms"), todo="add 'baseline: {}' under arms")
    inner.close()
    return profile
