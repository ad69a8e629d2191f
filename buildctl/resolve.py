"""uv: resolve everything that a stack installs, once, with hashes, and partition it over the layers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from buildctl import uv_settings
from buildctl.errors import BuildctlError, CompatibilityError, ManifestError, NetworkError, Problem, UsageError
from buildctl.host import Host
from buildctl.lock import ENTRYPOINT, PUBLIC, SERVER, TOOLS, Wheel, partition
from buildctl.manifest import Problems
from buildctl.stack import Index, Rule, Stack

_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
_ROOT = "stack"


@dataclass(frozen=True, slots=True)
class Request:
    """One resolution: what is asked for, and under which conditions."""

    python: str
    machine: str
    glibc: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    prerelease: tuple[str, ...] = ()
    indexes: tuple[Index, ...] = ()
    #: pins of an earlier lock that are kept where they still fit
    preferences: tuple[str, ...] = ()
    #: RFC 3339 time; files that an index got later do not exist for the resolution
    exclude_newer: str = ""

    @property
    def requirement_of(self) -> dict[str, Requirement]:
        """What is asked for directly, by package; an override beats a requirement."""
        return {canonicalize_name(parsed.name): parsed for text in (*self.requirements, *self.overrides)
                if (parsed := Requirement(text))}


@dataclass(frozen=True, slots=True)
class Resolution:
    """The wheels of one environment (no layers yet), and the time of the youngest of them."""

    wheels: tuple[Wheel, ...]
    epoch: int
    #: file name -> where the index serves it; not part of a lock
    urls: Mapping[str, str] = field(default_factory=dict)


def environments(stack: Stack) -> dict[str, Request]:
    """What is resolved for a stack: the server's environment, the entrypoint's, and the build's tools."""
    machine = _MACHINES[stack.platform]
    server = tuple(dict.fromkeys(text for layer in stack.layers for text in stack.requirements.get(layer.name, ())))
    plain = Request(stack.python, machine, stack.glibc, ())

    def texts(rules: Sequence[Rule]) -> tuple[str, ...]:
        return tuple(rule.text for rule in rules)

    return {
        SERVER: replace(plain, requirements=server, constraints=texts(stack.constraints),
                        overrides=texts(stack.overrides), excludes=texts(stack.excludes),
                        prerelease=stack.prerelease, indexes=stack.indexes),
        ENTRYPOINT: replace(plain, requirements=stack.runtime.requirements),
        TOOLS: replace(plain, requirements=stack.tools.requirements),
    }


def without(request: Request, packages: Iterable[str]) -> Request:
    """The same request as if these packages did not exist."""
    gone = set(packages)

    def kept(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(text for text in texts if canonicalize_name(Requirement(text).name) not in gone)

    return replace(request, requirements=kept(request.requirements), constraints=kept(request.constraints),
                   overrides=kept(request.overrides), preferences=kept(request.preferences),
                   excludes=(*request.excludes, *sorted(gone)),
                   indexes=tuple(replace(index, packages=tuple(name for name in index.packages if name not in gone))
                                 for index in request.indexes))


def unreachable(request: Request, host: Host) -> tuple[Index, ...]:
    """The indexes of a request that do not answer, each asked by uv for what the request wants of it."""
    found = []
    for index in request.indexes:
        wanted = tuple(str(requirement) for name, requirement in request.requirement_of.items()
                       if name in index.packages)
        alone = replace(request, requirements=wanted, constraints=(), overrides=(), excludes=(), indexes=(index,))
        try:
            resolve(alone, host, alone=True)
        except NetworkError:
            found.append(index)
        except BuildctlError:
            continue  # it answered; what it said matters in the joint resolution
    return tuple(found)


def over_layers(stack: Stack, wheels: Iterable[Wheel]) -> tuple[Wheel, ...]:
    """The wheels of the server's environment, each with the layer that owns it."""
    found = tuple(wheels)
    requirements = {layer.name: stack.requirements.get(layer.name, ()) for layer in stack.layers}
    owner = partition(requirements, {wheel.name: frozenset(wheel.via) for wheel in found})
    return tuple(replace(wheel, layer=owner[wheel.name]) for wheel in found)


def resolve(request: Request, host: Host, *, alone: bool = False) -> Resolution:
    """Ask uv for one consistent set of wheels.

    An index that is declared for some packages is asked for them and for nothing else; when every package of an index
    lies in a wheelhouse in the version asked for, the index itself is not needed.

    :param alone: leave out what the requirements depend on.
    :raises UsageError: uv is told of indexes or logins that builds would not have.
    :raises CompatibilityError: there is no solution.
    :raises NetworkError: an index does not answer.
    """
    if not request.requirements:
        return Resolution((), 0)
    _refuse_unlendable(request, host)
    local = host.local_wheels()
    tags = _tags(request)
    indexes = tuple(index for index in request.indexes if not _offered(index, request, local, tags))
    with tempfile.TemporaryDirectory(prefix="buildctl-resolve-") as name:
        folder = Path(name)
        arguments = [*_write_inputs(folder, request, indexes, host), *(["--no-deps"] if alone else [])]
        pins = folder / "pins.txt"
        pins.write_text("".join(f"{pin}\n" for pin in request.preferences))
        _uv([*arguments, "--annotation-style", "line", "--no-header", "-o", str(pins)], host, folder,
            {"UV_HTTP_RETRIES": "1"} if alone else {})
        via = parse_annotated(pins.read_text())
        # the second run may not choose anew: the first one's pins are its constraints
        constraints = folder / "chosen.txt"
        constraints.write_text("".join(f"{package}=={version}\n" for package, (version, _) in via.items()))
        output = folder / "pylock.toml"
        _uv([*arguments, "--constraints", str(constraints), "--format", "pylock.toml", "-o", str(output)], host, folder)
        packages = tomllib.loads(output.read_text())["packages"]
    return _select(packages, via, tags, request.indexes, local)


def _refuse_unlendable(request: Request, host: Host) -> None:
    names = uv_settings.logins((index.name for index in request.indexes), os.environ)
    problems = [Problem("a build would not have this index, so no lock is made with it", place,
                        found="an index beside the default one",
                        expected="one default index (UV_DEFAULT_INDEX), all others declared by the stack",
                        todo="name the index and the packages that come from it under 'indexes' of the stack, or let "
                             "the default index serve them; then take the setting away")
                for place in host.extra_indexes]
    problems += [Problem("a build would not have this login of an index", place, found="a login for uv alone",
                         expected="a login that builds get as well: netrc (NETRC names another file)",
                         todo="write it there as `machine HOST login USER password PASSWORD`; then unset the variable")
                 for place in names]
    if problems:
        raise UsageError(problems)


def parse_annotated(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Read uv's one-line annotated output: package -> (version, packages that need it; `.` is the stack)."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for line in text.splitlines():
        pin, _, comment = line.partition("#")
        match = re.match(r"\s*([A-Za-z0-9._-]+)==([^\s;]+)", pin)
        if not match:
            continue
        words = re.sub(r"^\s*via\s+", "", comment).split(",")
        parents = {"." if "pyproject.toml" in word else canonicalize_name(word.split("[")[0].strip())
                   for raw in words if (word := raw.strip()) and not word.startswith("-")}
        found[canonicalize_name(match[1])] = (match[2], frozenset(parents))
    return found


def _tags(request: Request) -> dict[Tag, int]:
    """Wheel tags of the target, best first (PEP 425, PEP 600)."""
    major, minor = request.glibc.split(".")
    platforms = [f"manylinux_{major}_{number}_{request.machine}" for number in range(int(minor), 4, -1)]
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    ordered = []
    for platform in platforms:
        ordered.append(platform)
        number = int(platform.split("_")[2])
        if number in legacy:
            ordered.append(f"{legacy[number]}_{request.machine}")
    ordered.append(f"linux_{request.machine}")
    version = tuple(int(part) for part in request.python.split("."))
    tags = [*cpython_tags(version, platforms=ordered),
            *compatible_tags(version, f"cp{version[0]}{version[1]}", ordered)]
    return {tag: rank for rank, tag in enumerate(tags)}


def _rank(file: str, tags: Mapping[Tag, int]) -> int | None:
    try:
        _, _, _, wheel_tags = parse_wheel_filename(file)
    except ValueError:
        return None
    ranks = [tags[tag] for tag in wheel_tags if tag in tags]
    return min(ranks) if ranks else None


def _offered(index: Index, request: Request, local: Mapping[str, Path], tags: Mapping[Tag, int]) -> bool:
    """Whether the wheelhouses hold a fitting wheel for every package of an index."""
    for package in index.packages:
        requirement = request.requirement_of.get(package)
        if requirement is None:
            continue
        fits = any(_rank(file, tags) is not None and (wheel := parse_wheel_filename(file))[0] == package
                   and requirement.specifier.contains(wheel[1], prereleases=True) for file in local)
        if not fits:
            return False
    return True


def project_file(request: Request, requirements: Sequence[str], indexes: Sequence[Index]) -> str:
    """A pyproject.toml that asks uv for requirements, those of a declared index from there and nowhere else."""
    lines = ["[project]", f'name = "{_ROOT}"', 'version = "0"', f'requires-python = "=={request.python}.*"',
             f"dependencies = {json.dumps(list(requirements))}"]
    direct = {canonicalize_name(Requirement(text).name) for text in requirements}
    if indexes:
        lines.append("[tool.uv.sources]")
        lines += [f'{package} = {{index = "{index.name}"}}' for index in indexes for package in index.packages
                  if package in direct]
        for index in indexes:
            lines += ["[[tool.uv.index]]", f'name = "{index.name}"', f"url = {json.dumps(index.url)}",
                      "explicit = true"]
    return "\n".join(lines) + "\n"


def _write_inputs(folder: Path, request: Request, indexes: Sequence[Index], host: Host) -> list[str]:
    direct = {canonicalize_name(Requirement(text).name) for text in request.requirements}
    (folder / "pyproject.toml").write_text(project_file(request, request.requirements, indexes))
    arguments = ["pip", "compile", "pyproject.toml", "--quiet", "--python-version", request.python,
                 "--python-platform", f"{request.machine}-manylinux_{request.glibc.replace('.', '_')}",
                 "--only-binary", ":all:"]
    for flag, texts in (("--constraints", request.constraints), ("--overrides", request.overrides),
                        ("--excludes", request.excludes)):
        if texts:
            file = folder / f"{flag[2:]}.txt"
            file.write_text("".join(f"{text}\n" for text in texts))
            arguments += [flag, str(file)]
    if request.prerelease:
        arguments += ["--prerelease", "allow"]
    if request.exclude_newer:
        arguments += ["--exclude-newer", request.exclude_newer]
        # indexes of a few packages and wheelhouses seldom tell upload times; uv would hide all they have
        dated = {package for index in request.indexes for package in index.packages if package in direct}
        dated |= {parse_wheel_filename(file)[0] for file in host.local_wheels()} & direct
        arguments += [word for package in sorted(dated)
                      for word in ("--exclude-newer-package", f"{package}=false")]
    for wheelhouse in host.wheelhouses:
        arguments += ["--find-links", str(wheelhouse)]
    # always ours, if empty: uv then reads no file of this host
    config = folder / "uv.toml"
    config.touch(mode=0o600)
    config.write_text(host.uv_config() or "")
    return [*arguments, "--config-file", str(config)]


def _uv(arguments: Sequence[str], host: Host, folder: Path, extra: Mapping[str, str] | None = None) -> None:
    """Run uv.

    :raises BuildctlError: of the class that fits uv's message.
    """
    env = {**uv_settings.environment(os.environ), "UV_SYSTEM_CERTS": "1", "NO_COLOR": "1", **(extra or {})}
    if host.ca is not None:
        env["SSL_CERT_FILE"] = str(host.ca)
    try:
        done = subprocess.run([_uv_binary(), *arguments], env=env, cwd=folder, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise ManifestError(Problem("cannot run uv, the resolver", found=str(error),
                                    todo="install buildctl with its dependencies: pip install -e .")) from None
    if done.returncode != 0:
        raise classify(done.stderr, host)


def _uv_binary() -> str:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else "uv"


def classify(stderr: str, host: Host) -> BuildctlError:
    """The error that uv's message stands for."""
    text = stderr.strip() or "uv said nothing"
    if host.index:
        text = text.replace(host.index, "<the host's index>")
    text = re.sub(r"://[^/@\s]+@", "://***@", text)
    shown = "\n            ".join(text.splitlines()[:14])
    unreachable = ("Failed to fetch", "error sending request", "dns error", "timed out", "Connection refused",
                   "HTTP status", "tls handshake", "invalid peer certificate")
    if "No solution found" in text:
        return CompatibilityError(Problem("the requirements of the stack do not fit together", "resolver", found=shown,
                                          todo="change requirements, constraints, overrides or excludes of the stack"))
    if any(word in text for word in unreachable):
        return NetworkError(Problem("a package index does not answer", "resolver", found=shown,
                                    todo="check network, proxy and index settings (UV_DEFAULT_INDEX), or give the "
                                         "wheels of that index with --wheelhouse DIR"))
    return ManifestError(Problem("the resolver refuses the stack", "resolver", found=shown))


def _select(packages: Sequence[Mapping[str, Any]], via: Mapping[str, tuple[str, frozenset[str]]],
            tags: Mapping[Tag, int], indexes: Sequence[Index], local: Mapping[str, Path]) -> Resolution:
    owners = {package: index.name for index in indexes for package in index.packages}
    wheels, problems, urls, epoch = [], Problems(), {}, 0
    for package in packages:
        name = canonicalize_name(package["name"])
        best: tuple[int, str, Mapping[str, Any]] | None = None
        for wheel in package.get("wheels", ()):
            file = unquote(PurePosixPath(urlsplit(wheel.get("url") or wheel.get("path")).path).name)
            rank = _rank(file, tags)
            if rank is not None and (best is None or (rank, file) < best[:2]):
                best = (rank, file, wheel)
        if best is None:
            problems.add(f"{name} {package['version']} has no wheel for the stack's platform", "resolver",
                         todo="pin another version, or exclude the package with a reason")
            continue
        _, file, wheel = best
        if name in owners and "." not in via.get(name, ("", frozenset()))[1]:
            problems.add(f"{name} must come from index '{owners[name]}' and nothing asks for it directly", "resolver",
                         found=f"{name} {package['version']} of the public index, for {', '.join(via[name][1])}",
                         todo=f"require {name} in the layer that owns it: an index counts for direct requirements only")
        stamp = wheel.get("upload-time")
        if isinstance(stamp, datetime):
            epoch = max(epoch, int(stamp.timestamp()))
        wheels.append(Wheel(name, package["version"], "", owners.get(name, PUBLIC), file, _sha256(wheel, file, local),
                            wheel.get("size") or _size(file, local),
                            tuple(sorted(via[name][1])) if name in via else ()))
        if "url" in wheel:
            urls[file] = str(wheel["url"])
    problems.raise_any(CompatibilityError)
    return Resolution(tuple(sorted(wheels, key=lambda wheel: wheel.name)), epoch, urls)


def _sha256(wheel: Mapping[str, Any], file: str, local: Mapping[str, Path]) -> str:
    sha256 = wheel.get("hashes", {}).get("sha256")
    if sha256:
        return str(sha256)
    if file in local:
        return hashlib.sha256(local[file].read_bytes()).hexdigest()
    raise NetworkError(Problem(f"the index gives no sha256 for {file}", "resolver",
                               todo="use an index that serves hashes, or a wheelhouse"))


def _size(file: str, local: Mapping[str, Path]) -> int | None:
    return local[file].stat().st_size if file in local else None
