"""Fetching: everything that a lock names into one folder, from which builds then run without a network.

The folder is a wheelhouse (`*.whl`), with the base under `base/`, the Debian packages of each layer under `apt/LAYER/`
and `fetched.json`, which says what is there. What lies there already with the right digest is not fetched again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from buildctl import base, context, debian, layout, source
from buildctl import lock as locks
from buildctl.compose import BASE_TAR
from buildctl.context import File
from buildctl.engine import Engine
from buildctl.errors import ManifestError, NetworkError, Problem
from buildctl.host import Host
from buildctl.lock import Lock, Wheel
from buildctl.progress import Mode
from buildctl.stack import Stack

#: the list of what was fetched
RECORD = "fetched.json"
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
_DOCKERFILE = """\

FROM base AS apt
RUN --mount=type=bind,source=lists,target=/lists --mount=type=secret,id=ca sh /lists/download

FROM scratch AS debs
COPY --from=apt /debs /
"""
# each list on its own: a layer needs what the ones below it have installed already, which does no harm
_DOWNLOAD = """\
set -eu
options="-q -o Dpkg::Use-Pty=0 -o Acquire::Retries=3"
if [ -s /run/secrets/ca ]; then options="$options -o Acquire::https::CaInfo=/run/secrets/ca"; fi
apt-get $options update
for list in /lists/*.txt; do
    folder=/debs/$(basename "$list" .txt)
    mkdir -p "$folder/partial"
    apt-get $options -o Dir::Etc::Preferences="${list%.txt}.preferences" -o Dir::Cache::archives="$folder" \\
        install -y --no-install-recommends --download-only $(cat "$list")
    rm -rf "$folder/partial" "$folder/lock"
done
"""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a folder holds after a fetch. `new` counts the wheels of this run, `bytes` everything."""

    wheels: int
    new: int
    base: str
    #: layer -> Debian packages, as `name_version_architecture`
    apt: Mapping[str, tuple[str, ...]]
    bytes: int
    #: Debian packages that the mirror had in another form than the lock
    drift: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"wheels": self.wheels, "new": self.new, "base": self.base, "bytes": self.bytes,
                "apt": {layer: list(packages) for layer, packages in self.apt.items()},
                "drift": list(self.drift)}


def fetch(stack: Stack, lock: Lock, host: Host, engine: Engine, folder: Path, cache: Path, say: Callable[[str], None],
          show: Mode = "auto") -> Fetched:
    """Fetch everything that a lock names.

    :raises NetworkError: an index or mirror does not give what the lock names.
    :raises ManifestError: a file has another digest than the lock says, or the lock is not complete.
    """
    if lock.open_ends:
        raise ManifestError(Problem("the lock does not name all that a build needs", f"stack '{stack.name}'",
                                    found=f"unlocked: {'; '.join(lock.open_ends)}",
                                    expected="a hash for every file, a digest for the base",
                                    todo=f"run `buildctl lock {stack.name}` where these indexes and registries are "
                                         "reachable, then fetch"))
    folder.mkdir(parents=True, exist_ok=True)
    wanted = every_wheel(lock)
    missing = _missing(wanted, folder)
    local = host.local_wheels()
    for wheel in [one for one in missing if one.file in local]:
        if _digest(local[wheel.file]) == wheel.sha256:
            _place(local[wheel.file], folder / wheel.file)
            missing.remove(wheel)
    for index in dict.fromkeys(wheel.index for wheel in missing):
        _download(stack, lock, [wheel for wheel in missing if wheel.index == index], index, folder, say)
    if lock.base.source == "bootstrap":
        bottom = base.ensure(lock, cache, say)
        _place(bottom, folder / "base" / bottom.name)
    else:
        bottom = layout.path_of(folder, lock.base.digest)
        say(f"base: {lock.base.pinned} from its registry")
        layout.save(lock.base.image, lock.base.digest, lock.platform, bottom)
    say("apt: asking the mirror from inside the base")
    _fetch_apt(stack, lock, bottom, host, engine, folder, cache, show)
    drift = drift_of(lock, folder)
    fetched = Fetched(len(wanted), len(_by_file(missing)), f"base/{bottom.name}", archives(folder),
                      sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), drift)
    if drift and lock.base.snapshot:
        raise ManifestError(Problem("the snapshot gave other Debian packages than the lock names",
                                    f"snapshot {lock.base.snapshot}", found=", ".join(drift[:8]),
                                    expected="what the lock was made from",
                                    todo=f"`buildctl lock {stack.name} --upgrade-debian`, or mend the snapshot mirror"))
    if drift:
        say(f"warning: {len(drift)} Debian packages are not those of the lock, the mirror moved on: "
            f"{', '.join(drift[:6])}{' ...' if len(drift) > 6 else ''}; `buildctl lock {stack.name} --upgrade-debian` "
            "locks what it has now")
    _write_record(folder, stack, fetched)
    return fetched


def every_wheel(lock: Lock) -> list[Wheel]:
    """The wheels of all environments, each file once."""
    return list(_by_file((*lock.wheels, *lock.entrypoint, *lock.tools)).values())


def prepare_offline(stack: Stack, lock: Lock, host: Host, cache: Path) -> None:
    """Refuse a build without network that would miss something; lend it the base that was fetched.

    :raises ManifestError: with everything that the wheelhouses lack.
    """
    local = host.local_wheels()
    # no folder can hold what no hash names
    lacking = [f"{text}, which the lock does not hold" for text in lock.open_ends]
    lacking += [wheel.file for wheel in every_wheel(lock) if wheel.file not in local]
    lacking += [f"apt/{layer}" for layer in locks.apt_of(stack) if not host.debs(layer)]
    if lock.base.source == "bootstrap":
        tar = base.path_of(lock, cache)
        fetched = next((path for folder in host.wheelhouses if (path := folder / "base" / tar.name).is_file()), None)
        if fetched is None and not tar.is_file():
            lacking.append(f"base/{tar.name}")
        elif fetched is not None and not tar.is_file():
            _place(fetched, tar)
    elif lock.base.digest and host.layout(lock.base.digest) is None:
        lacking.append(f"base/{layout.path_of(Path(), lock.base.digest).name}")
    if lacking:
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        raise ManifestError(Problem("a build without network would miss something", "wheelhouse", found=f"no {shown}",
                                    expected="everything that the lock names",
                                    todo=f"`buildctl fetch {stack.name} --to DIR` with a network, then "
                                         "`--offline --wheelhouse DIR`"))


def archives(folder: Path) -> dict[str, tuple[str, ...]]:
    """The Debian packages that a folder holds, by layer."""
    return {layer.name: tuple(sorted(path.stem for path in layer.glob("*.deb")))
            for layer in sorted((folder / "apt").iterdir()) if layer.is_dir()}


def _by_file(wheels: Iterable[Wheel]) -> dict[str, Wheel]:
    return {wheel.file: wheel for wheel in wheels}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _missing(wheels: Iterable[Wheel], folder: Path) -> list[Wheel]:
    """The wheels that the folder lacks or has in another form; a damaged file is removed."""
    missing = []
    for wheel in wheels:
        path = folder / wheel.file
        if path.is_file() and _digest(path) == wheel.sha256:
            continue
        path.unlink(missing_ok=True)
        missing.append(wheel)
    return missing


def _place(origin: Path, target: Path) -> None:
    if target.exists() and target.samefile(origin):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    context.link(origin, target)


def _download(stack: Stack, lock: Lock, wheels: list[Wheel], index: str, folder: Path,
              say: Callable[[str], None]) -> None:
    """Download wheels of one index by pip, which knows this host's settings; nothing half-written stays."""
    say(f"wheels: {len(wheels)} from the index '{index}', {sum(wheel.size or 0 for wheel in wheels) / 1e6:.0f} MB")
    url = next((one.url for one in stack.indexes if one.name == index), None)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
        wanted = Path(scratch, "wheels.txt")
        wanted.write_text("".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels))
        words = ["download", "--no-deps", "--require-hashes", *_target(lock, stack), "--dest", scratch,
                 "--requirement", str(wanted), *(["--index-url", url] if url else [])]
        try:
            source.pip(words, f"{len(wheels)} wheels of the index '{index}'")
        except NetworkError as error:
            if "DO NOT MATCH THE HASHES" not in str(error):
                raise
            raise ManifestError(Problem("the index serves another file than the lock names", f"index '{index}'",
                                        found=error.problems[0].found, expected="files with the lock's hashes",
                                        todo=f"`buildctl lock {stack.name}` again if upstream replaced the file; else "
                                             "distrust it")) from None
        for wheel in wheels:
            found = Path(scratch, wheel.file)
            if not found.is_file():
                there = [path.name for path in Path(scratch).glob("*.whl")
                         if canonicalize_name(path.name.split("-")[0]) == wheel.name]
                raise NetworkError(Problem("the index serves another file than the lock names", wheel.name,
                                           found=", ".join(there) or "no file", expected=wheel.file,
                                           todo=f"`buildctl lock {stack.name}` again if upstream replaced it"))
            shutil.move(found, folder / wheel.file)


def _target(lock: Lock, stack: Stack) -> list[str]:
    machine = _MACHINES[lock.platform]
    minor = int(stack.glibc.split(".")[1])
    platforms = [*(f"manylinux_2_{number}_{machine}" for number in range(minor, 4, -1)), f"manylinux2014_{machine}",
                 f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    return ["--only-binary=:all:", "--python-version", lock.python,
            *(word for platform in platforms for word in ("--platform", platform))]


def drift_of(lock: Lock, folder: Path) -> tuple[str, ...]:
    """The fetched Debian packages that are not those of the lock, by file name; none where the lock has no record."""
    known = {text.rpartition("sha256:")[2] for packages in lock.debian.values() for text in packages.values()}
    return tuple(sorted({path.name for path in (folder / "apt").rglob("*.deb") if _digest(path) not in known})
                 ) if known else ()


def _fetch_apt(stack: Stack, lock: Lock, bottom: Path, host: Host, engine: Engine, folder: Path, cache: Path,
               show: Mode) -> None:
    """Let apt say inside the base what it needs; the same versions for all layers, from one state of the mirror."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
        made = Path(scratch, "debs")
        secrets = [f"id=ca,src={host.ca}"] if host.ca else []
        target: dict[str, Any] = {"context": ".", "dockerfile": "Dockerfile", "target": "debs", "secret": secrets,
                                  "platforms": [stack.platform], "no-cache": True,
                                  "output": [f"type=local,dest={made}"]}
        files = {"lists/download": File(_DOWNLOAD.encode())}
        if lock.base.source == "bootstrap":
            begin = f"FROM scratch AS base\nADD {BASE_TAR} /\n"
            files[BASE_TAR] = File(source=bottom, trusted=True)
        else:
            begin = f"FROM {lock.base.pinned} AS base\n"
            target["contexts"] = {"base": f"oci-layout://{bottom}@{lock.base.digest}"}
        files["Dockerfile"] = File((begin + _DOCKERFILE).encode())
        files["docker-bake.json"] = File(json.dumps({"target": {"debs": target}}).encode())
        pins = {name: text for packages in lock.debian.values() for name, text in packages.items()}
        for layer, names in locks.apt_of(stack).items():
            files[f"lists/{layer}.txt"] = File("".join(f"{name}\n" for name in names).encode())
            files[f"lists/{layer}.preferences"] = File(debian.preferences(pins).encode())
        context.write(files, Path(scratch, "context"))
        engine.bake(Path(scratch, "context"), ["debs"], cache / "logs" / f"fetch-{stack.name}.log", show=show)
        kept = folder / "apt"
        if kept.exists():
            shutil.rmtree(kept)
        shutil.move(made, kept)


def _write_record(folder: Path, stack: Stack, fetched: Fetched) -> None:
    digests = {str(path.relative_to(folder)): _digest(path) for path in sorted((folder / "apt").rglob("*.deb"))}
    partial = folder / f".{RECORD}"
    partial.write_text(json.dumps({"stack": stack.name, **fetched.as_dict(), "sha256": digests}, indent=1,
                                  sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(folder / RECORD)
