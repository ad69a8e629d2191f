"""Making locks: what changed is resolved anew, what did not is kept as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from buildctl import lock as locks
from buildctl import patches, reference, resolve, source
from buildctl.errors import BuildctlError, ManifestError, NetworkError, Problem
from buildctl.host import Host
from buildctl.lock import ENTRYPOINT, SERVER, TOOLS, Lock, LockedBase, LockedSeries, Wheel
from buildctl.patches import Checked
from buildctl.project import Project
from buildctl.registry import Registry
from buildctl.retry import Policy
from buildctl.stack import Stack

#: the input section that belongs to each environment of a lock
_SECTIONS = {SERVER: "requirements", ENTRYPOINT: "entrypoint", TOOLS: "tools"}


@dataclass(frozen=True, slots=True)
class Made:
    """A lock, and which of its sections were made anew."""

    lock: Lock
    sections: tuple[str, ...]


def make(stack: Stack, project: Project, host: Host, cache: Path, *, upgrade: bool = False,
         base: str = "auto") -> Made:
    """Make the lock of a stack, keeping what its present lock already has.

    :param upgrade: forget the present versions.
    :param base: `registry`, `bootstrap`, or `auto`: the present choice, else a registry when it answers.
    :raises BuildctlError: of the class that fits; nothing is written.
    """
    before = _previous(stack, project)
    inputs = locks.inputs_of(stack, project)
    changed: list[str] = []
    environments: dict[str, tuple[Wheel, ...]] = {}
    epoch = before.epoch if before else 0
    for name, request in resolve.environments(stack).items():
        section = _SECTIONS[name]
        kept = _wheels(before, name) if before and before.inputs.get(section) == inputs[section] else ()
        if kept and not upgrade:
            environments[name] = kept
            continue
        pins = () if upgrade or before is None else tuple(f"{wheel.name}=={wheel.version}"
                                                          for wheel in _wheels(before, name))
        found = resolve.resolve(resolve.with_preferences(request, pins), host)
        environments[name] = found.wheels
        epoch = max(epoch, found.epoch)
        changed.append(section)
    wheels = resolve.over_layers(stack, environments[SERVER])
    lock = Lock(stack=stack.name, python=stack.python, platform=stack.platform,
                base=_base(stack, before, inputs, base), wheels=wheels, entrypoint=environments[ENTRYPOINT],
                tools=environments[TOOLS], patches=_series(stack, project, wheels, host, cache),
                local=locks.local_of(stack, project), epoch=epoch, inputs=inputs)
    changed += [name for name, old, new in (("base", before and before.base, lock.base),
                                            ("patches", before and before.patches, lock.patches),
                                            ("local", before and before.local, lock.local)) if old != new]
    return Made(lock, tuple(changed))


def write(made: Made, path: Path) -> None:
    """Write a lock atomically."""
    partial = path.with_suffix(".lock.tmp")
    partial.write_text(locks.dump(made.lock), encoding="utf-8")
    partial.replace(path)


def check_patches(stack: Stack, project: Project, lock: Lock, host: Host, cache: Path) -> dict[str, Checked]:
    """Apply every series of a stack to the locked source, in memory; remembered results cost nothing.

    :raises PatchError: with everything that does not fit, or another tree than the lock's.
    """
    found = {}
    for package, folder in stack.patches.items():
        locked = lock.patches.get(package)
        wheel = lock.wheel(source.distribution(package))
        if locked is None or wheel is None:
            raise ManifestError(Problem(f"the lock knows no series for '{package}'", stack.place,
                                        todo=f"run `buildctl lock {stack.name}`"))
        series = patches.read_series(project.patches / folder)
        found[package] = patches.check(series, _reader(package, wheel, host, cache), wheel.sha256, tree=locked.tree,
                                       cache=cache / "patches")
    return found


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


def _reader(package: str, wheel: Wheel, host: Host, cache: Path) -> Callable[[], Callable[[str], bytes | None]]:
    def read() -> Callable[[str], bytes | None]:
        local = host.local_wheels().get(wheel.file)
        if local is not None and hashlib.sha256(local.read_bytes()).hexdigest() == wheel.sha256:
            return source.Wheel(local).read
        return source.wheel(package, wheel.version, sha256=wheel.sha256, cache=cache).read
    return read


def _base(stack: Stack, before: Lock | None, inputs: dict[str, str], wanted: str) -> LockedBase:
    if before and before.inputs.get("base") == inputs["base"] and wanted in ("auto", before.base.source):
        return before.base
    image, bootstrap = stack.base.image, stack.base.bootstrap
    if wanted != "bootstrap" and image is not None:
        try:
            return LockedBase("registry", image=image, digest=_digest(image))
        except BuildctlError:
            if wanted == "registry" or bootstrap is None:
                raise
    if bootstrap is None or wanted == "registry":
        raise ManifestError(Problem(f"the base of '{stack.name}' cannot come from a {wanted}", stack.place,
                                    expected="base: with 'image' for a registry, with 'bootstrap' for mmdebstrap"))
    return LockedBase("bootstrap", suite=bootstrap.suite, include=bootstrap.include)


def _digest(image: str) -> str:
    """The digest of the base for the stack's platform, asked of its registry."""
    parsed = reference.parse(image)
    if parsed.digest:
        return parsed.digest
    with Registry(parsed.registry, policy=Policy(attempts=2), timeout=20) as registry:
        found = registry.head(parsed.repository, parsed.tag or "latest")
    if found is None:
        raise NetworkError(Problem("the registry does not have the base", image,
                                   todo="check the name and tag of 'base' in the stack"))
    return found.digest


__all__ = ["Made", "check_patches", "make", "write"]
