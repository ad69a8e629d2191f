"""Making locks: what changed is resolved anew, what did not is kept as it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from buildctl import base as bases
from buildctl import debian, manifest, metadata, patch_lint, patches, reference, resolve, serverflags, source
from buildctl import lock as locks
from buildctl.errors import (
    BuildctlError,
    CompatibilityError,
    ManifestError,
    NetworkError,
    PatchError,
    Problem,
    UsageError,
)
from buildctl.host import Host
from buildctl.lock import ENTRYPOINT, SERVER, TOOLS, Lock, LockedBase, LockedSeries, Unlocked, Wheel
from buildctl.patches import Checked
from buildctl.project import Project
from buildctl.registry import Registry
from buildctl.resolve import Request, Resolution
from buildctl.retry import Policy
from buildctl.stack import Stack

#: the input section that belongs to each environment of a lock
_SECTIONS = {SERVER: "requirements", ENTRYPOINT: "entrypoint", TOOLS: "tools"}


@dataclass(frozen=True, slots=True)
class Made:
    """A lock, and which of its sections were made anew."""

    lock: Lock
    sections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a new lock beyond the stack: packages to upgrade, or all, the time after which files do not
    count (RFC 3339), and whether Debian's packages are those that the mirror has now."""

    upgrade: tuple[str, ...] = ()
    upgrade_all: bool = False
    exclude_newer: str = ""
    upgrade_debian: bool = False

    @property
    def anew(self) -> bool:
        """Whether sections are resolved although their inputs did not change."""
        return bool(self.upgrade or self.upgrade_all or self.exclude_newer or self.upgrade_debian)

    def moves(self, wheels: Iterable[Wheel]) -> bool:
        """Whether these wheels are to be resolved although their inputs did not change."""
        return self.upgrade_all or bool(self.exclude_newer) or any(wheel.name in self.upgrade for wheel in wheels)


def names(words: Iterable[str]) -> tuple[str, ...]:
    """Package names as locks spell them."""
    return tuple(canonicalize_name(word) for word in words)


def moment(text: str, now: datetime | None = None) -> str:
    """An age (`7d`, `12h`, `2w`) before now, or a date or time, as RFC 3339; empty for nothing.

    :raises UsageError: it is neither.
    """
    if not text:
        return ""
    age = re.fullmatch(r"(\d+) ?([hdw])", text)
    if age:
        unit = {"h": "hours", "d": "days", "w": "weeks"}[age[2]]
        found = (now or datetime.now(UTC)) - timedelta(**{unit: int(age[1])})
    else:
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(Problem("this is neither an age nor a date", "--exclude-newer", found=text,
                                     expected="7d, 12h, 2w, 2026-11-30 or 2026-11-30T12:00:00Z")) from None
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
    return found.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make(stack: Stack, project: Project, host: Host, cache: Path, *, wish: Wish | None = None,
         base: str = "auto") -> Made:
    """Make the lock of a stack, keeping what its present lock already has.

    A package whose only index is out of reach is left unlocked, unless the present lock has it.

    :param base: `registry`, `bootstrap`, or `auto`: the present choice, else a registry when it answers.
    :raises BuildctlError: of the class that fits; nothing is written.
    """
    wish = wish or Wish()
    before = _previous(stack, project)
    inputs = locks.inputs_of(stack, project)
    _check_upgrade(wish, before)
    requests = resolve.environments(stack)
    changed: list[str] = []
    environments: dict[str, Resolution] = {}
    epoch = before.epoch if before else 0
    for name, request in requests.items():
        section = _SECTIONS[name]
        if before and before.inputs.get(section) == inputs[section] and _complete(before, name) \
                and not wish.moves(_wheels(before, name)):
            environments[name] = Resolution(_wheels(before, name), 0)
            continue
        pins = [wheel for wheel in (_wheels(before, name) if before else ()) if not wish.upgrade_all
                and wheel.name not in wish.upgrade]
        asked = replace(request, preferences=tuple(f"{wheel.name}=={wheel.version}" for wheel in pins),
                        exclude_newer=wish.exclude_newer)
        found = _resolve(asked, before, host)
        environments[name] = found
        epoch = max(epoch, found.epoch)
        changed.append(section)
    server = environments[SERVER]
    wheels = resolve.over_layers(stack, server.wheels)
    unlocked = _unlocked(stack, requests[SERVER], wheels)
    overlaps = before.overlaps if before else ()
    if "requirements" in changed:
        facts = metadata.read(wheels, server.urls, host, cache)
        roots = (*requests[SERVER].requirements, *requests[SERVER].overrides)
        wheels = metadata.annotate(wheels, metadata.applicable(facts, roots, stack.python, requests[SERVER].machine))
        overlaps = metadata.overlaps(facts)
    if before is None or before.inputs.get("profile") != inputs["profile"] or "requirements" in changed:
        _check_profile(stack, wheels, host, cache)
        changed += ["profile"] if before is None or before.inputs.get("profile") != inputs["profile"] else []
    bottom = _base(stack, before, inputs, base)
    lock = Lock(stack=stack.name, python=stack.python, platform=stack.platform, base=bottom, wheels=wheels,
                entrypoint=environments[ENTRYPOINT].wheels,
                tools=environments[TOOLS].wheels, patches=_series(stack, project, wheels, host, cache),
                local=locks.local_of(stack, project), epoch=epoch, inputs=inputs, unlocked=unlocked, overlaps=overlaps,
                debian=_debian(stack, bottom, before, inputs, wish, host))
    changed += [name for name, old, new in (("base", before and before.base, lock.base),
                                            ("debian", before.debian if before else {}, lock.debian),
                                            ("patches", before and before.patches, lock.patches),
                                            ("local", before and before.local, lock.local)) if old != new]
    return Made(lock, tuple(changed))


def _check_upgrade(wish: Wish, before: Lock | None) -> None:
    known = {wheel.name for name in _SECTIONS for wheel in _wheels(before, name)} if before else set()
    problems = [Problem(f"the lock has no package '{package}' to upgrade", "command line",
                        todo=manifest.suggest(package, known) if known else "leave --upgrade out: there is no lock yet")
                for package in wish.upgrade if package not in known]
    if problems:
        raise UsageError(problems)


def _complete(lock: Lock, environment: str) -> bool:
    """Whether a section has all that locks have today; an index that was out of reach is tried again."""
    if environment != SERVER:
        return bool(_wheels(lock, environment))
    return bool(lock.wheels) and not lock.unlocked and any(wheel.requires is not None for wheel in lock.wheels)


def _resolve(request: Request, before: Lock | None, host: Host) -> Resolution:
    try:
        return resolve.resolve(request, host)
    except NetworkError:
        gone = resolve.unreachable(request, host)
        packages = {package for index in gone for package in index.packages}
        locked = sorted(packages & {wheel.name for wheel in before.wheels}) if before else []
        if not packages or locked:
            raise  # the public index is down, or a lock that is complete would lose what it has
    return resolve.resolve(resolve.without(request, packages), host)


def _unlocked(stack: Stack, request: Request, wheels: Iterable[Wheel]) -> tuple[Unlocked, ...]:
    """The packages that a layer requires and the resolution had to leave out."""
    present = {wheel.name for wheel in wheels}
    excluded = {canonicalize_name(rule.text) for rule in stack.excludes}
    owners = {package: index.name for index in stack.indexes for package in index.packages}
    found: dict[str, Unlocked] = {}
    for layer in stack.layers:
        for text in stack.requirements.get(layer.name, ()):
            name = canonicalize_name(Requirement(text).name)
            if name in owners and name not in present and name not in excluded:
                found.setdefault(name, Unlocked(name, str(request.requirement_of[name]), layer.name, owners[name]))
    return tuple(found[name] for name in sorted(found))


def _check_profile(stack: Stack, wheels: Iterable[Wheel], host: Host, cache: Path) -> None:
    """Hold the profile's flags against the parser of the locked server."""
    wheel = next((wheel for wheel in wheels if wheel.name == "sglang"), None)
    if wheel is None:
        return
    flags = serverflags.of_source(_reader("sglang", wheel, host, cache)())
    problems = serverflags.check(stack.profile, flags, stack.place.rsplit(":", 1)[0], wheel.version)
    if problems:
        raise CompatibilityError(problems)


def write(made: Made, path: Path) -> None:
    """Write a lock atomically."""
    partial = path.with_suffix(".lock.tmp")
    partial.write_text(locks.dump(made.lock), encoding="utf-8")
    partial.replace(path)


def refuse_unlocked(stack: Stack, project: Project, lock: Lock) -> None:
    """Refuse to build what no hash holds.

    :raises ManifestError: the lock has open ends.
    """
    if lock.open_ends:
        raise ManifestError(Problem(f"the lock of '{stack.name}' is not complete", project.shown(locks.path_of(stack)),
                                    found=f"unlocked: {'; '.join(lock.open_ends)}",
                                    expected="a hash for every file, a digest for the base",
                                    todo=f"run `buildctl lock {stack.name}` where these indexes and registries are "
                                         "reachable; or build with --allow-unlocked, which the image will record"))


def check_patches(stack: Stack, project: Project, lock: Lock, host: Host, cache: Path, *,
                  fetch: bool = True) -> dict[str, Checked | None]:
    """Apply every series of a stack to the locked source, in memory; remembered results cost nothing.

    :param fetch: get sources that are not at hand; else their series are None in the answer.
    :raises PatchError: with everything that does not fit, or another tree than the lock's.
    """
    found: dict[str, Checked | None] = {}
    for package, folder in stack.patches.items():
        locked = lock.patches.get(package)
        wheel = lock.wheel(source.distribution(package))
        if locked is None or wheel is None:
            raise ManifestError(Problem(f"the lock knows no series for '{package}'", stack.place,
                                        todo=f"run `buildctl lock {stack.name}`"))
        series = patches.read_series(project.patches / folder)
        foreign = patch_lint.untargeted(series, stack.targets, f"patches/{folder}")
        if foreign:
            raise PatchError(foreign)
        reader = _reader(package, wheel, host, cache, fetch=fetch)
        try:
            found[package] = patches.check(series, reader, wheel.sha256, tree=locked.tree, cache=cache / "patches")
        except _NotAtHandError:
            found[package] = None
    return found


class _NotAtHandError(Exception):
    """A source would have to be fetched."""


def _previous(stack: Stack, project: Project) -> Lock | None:
    try:
        return locks.read(locks.path_of(stack), project)
    except ManifestError:
        return None


def _wheels(lock: Lock, environment: str) -> tuple[Wheel, ...]:
    return {SERVER: lock.wheels, ENTRYPOINT: lock.entrypoint, TOOLS: lock.tools}[environment]


def _series(stack: Stack, project: Project, wheels: Iterable[Wheel], host: Host,
            cache: Path) -> dict[str, LockedSeries]:
    by_name = {wheel.name: wheel for wheel in wheels}
    found = {}
    for package, folder in stack.patches.items():
        wheel = by_name.get(source.distribution(package))
        if wheel is None:
            raise ManifestError(Problem(f"the stack patches '{package}' but does not install it", stack.place,
                                        todo="require it in a layer, or drop its patches"))
        series = patches.read_series(project.patches / folder)
        checked = patches.check(series, _reader(package, wheel, host, cache), wheel.sha256, cache=cache / "patches")
        found[package] = LockedSeries(folder, wheel.sha256,
                                      tuple((patch.name, patch.sha256) for patch in series.patches),
                                      checked.tree_sha256)
    return found


def _reader(package: str, wheel: Wheel, host: Host, cache: Path, *,
            fetch: bool = True) -> Callable[[], Callable[[str], bytes | None]]:
    def read() -> Callable[[str], bytes | None]:
        local = host.local_wheels().get(wheel.file)
        if local is not None and hashlib.sha256(local.read_bytes()).hexdigest() == wheel.sha256:
            return source.Wheel(local).read
        if fetch:
            return source.wheel(package, wheel.version, sha256=wheel.sha256, cache=cache).read
        kept = source.at_hand(package, wheel.version, sha256=wheel.sha256, cache=cache)
        if kept is None:
            raise _NotAtHandError
        return kept.read
    return read


def _base(stack: Stack, before: Lock | None, inputs: dict[str, str], wanted: str) -> LockedBase:
    if before and before.inputs.get("base") == inputs["base"] and wanted in ("auto", before.base.source):
        return before.base
    image, bootstrap = stack.base.image, stack.base.bootstrap
    if wanted != "bootstrap" and image is not None:
        try:
            return LockedBase("registry", image=image.partition("@")[0], digest=_digest(image))
        except BuildctlError:
            if wanted == "registry":
                raise
            if bootstrap is None:
                return LockedBase("registry", image=image)
    if bootstrap is None or wanted == "registry":
        raise ManifestError(Problem(f"the base of '{stack.name}' cannot come from a {wanted}", stack.place,
                                    expected="base: with 'image' for a registry, with 'bootstrap' for mmdebstrap"))
    return LockedBase("bootstrap", suite=bootstrap.suite, include=bootstrap.include, snapshot=bootstrap.snapshot)


def _debian(stack: Stack, base: LockedBase, before: Lock | None, inputs: dict[str, str], wish: Wish,
            host: Host) -> Mapping[str, Mapping[str, str]]:
    """What apt installs in a bootstrapped base and in the layers; nothing where this host has no apt or no mirror."""
    if base.source != "bootstrap":
        return {}
    if before and before.debian and before.base == base and before.inputs.get("debian") == inputs["debian"] \
            and not wish.upgrade_debian and not wish.upgrade_all:
        return before.debian
    lines = bases.sources(base)
    if not lines or not debian.available():
        return {}
    lists = locks.apt_of(stack)
    tools = {name: wanted for name, wanted in lists.items() if name == stack.tools.name}
    return debian.resolve(lines, bases.architecture(stack.platform), base.include,
                          {name: wanted for name, wanted in lists.items() if name not in tools}, tools, host.ca)


def _digest(image: str) -> str:
    """The digest of the base, as the stack names it or its registry tells it."""
    parsed = reference.base(image)
    if parsed.digest:
        return parsed.digest
    host = parsed.registry
    try:
        with Registry(host, policy=Policy(attempts=2), timeout=20) as registry:
            found = registry.head(parsed.repository, parsed.tag or "latest")
    except BuildctlError as error:
        todo = (f"log in (`docker login {host}`), name a mirror of it as 'base' in the stack, or take one that "
                "needs no registry: `--base bootstrap`")
        raise type(error)(replace(problem, where=image, todo=todo) for problem in error.problems) from None
    if found is None:
        raise ManifestError(Problem("the registry does not have the base", image, "404 from " + host,
                                    "a tag that is still there", "name another one as 'base' in the stack"))
    return found.digest


__all__ = ["Made", "Wish", "check_patches", "make", "moment", "names", "refuse_unlocked",
           "write"]
