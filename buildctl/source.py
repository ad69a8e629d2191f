"""The real source of a package: its wheel, fetched by pip from the host's indexes, read without unpacking.

pip does the download because it knows the host's settings (index, credentials, CA bundle, wheelhouse, proxies). Where
buildctl's environment has no pip, uv lends one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from buildctl import uv_settings
from buildctl.errors import ManifestError, NetworkError, Problem

#: import package, as patches/ names it -> distribution
DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}
#: what a wheel may be built for: patches only need the Python files, which are the same in all wheels of a release
PLATFORMS = (*tuple(f"manylinux_2_{minor}_x86_64" for minor in range(40, 16, -1)), "manylinux2014_x86_64")
PYTHON = "3.11"


class Wheel:
    """One wheel file; reads its members by their path in site-packages."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def sha256(self) -> str:
        """sha256 of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def version(self) -> str:
        """The version in the file name."""
        return self.path.name.split("-")[1]

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ManifestError(
                Problem(
                    "the wheel cannot be read",
                    str(self.path),
                    found=str(error),
                    todo="remove the file; it is fetched again",
                )
            ) from None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The paths of its files; those of the metadata folder do not count."""
        return tuple(
            name
            for name in self._zip.namelist()
            if not name.endswith("/") and not name.split("/", 1)[0].endswith((".dist-info", ".data"))
        )

    def read(self, path: str) -> bytes | None:
        """A file's content, `None` when the wheel has no such file."""
        try:
            return self._zip.read(path)
        except KeyError:
            return None


def distribution(package: str) -> str:
    """The distribution that holds the import package `package`."""
    return canonicalize_name(DISTRIBUTIONS.get(package, package))


def default_cache() -> Path:
    """Where fetched wheels stay: `BUILDCTL_CACHE_DIR`, else the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("BUILDCTL_CACHE_DIR") or Path(home) / "buildctl")


def at_hand(package: str, version: str, *, sha256: str = "", cache: Path | None = None) -> Wheel | None:
    """The wheel of a release when the cache has it."""
    folder = _folder(package, version, cache)
    found = (Wheel(path) for path in sorted(folder.glob("*.whl")))
    return next((one for one in found if not sha256 or one.sha256 == sha256), None)


def _folder(package: str, version: str, cache: Path | None) -> Path:
    return (cache or default_cache()) / "wheels" / f"{distribution(package)}-{version}"


def wheel(package: str, version: str, *, sha256: str = "", cache: Path | None = None) -> Wheel:
    """The wheel of a release, from the cache or by pip; the file's hash is checked against `sha256` when that is given.

    :raises NetworkError: pip cannot fetch it.
    :raises ManifestError: the index serves a file with another hash.
    """
    found = at_hand(package, version, sha256=sha256, cache=cache)
    if found is not None:
        return found
    fetched = Wheel(_download(f"{distribution(package)}=={version}", _folder(package, version, cache)))
    if sha256 and fetched.sha256 != sha256:
        raise ManifestError(
            Problem(
                "the index serves another wheel than the lock names",
                fetched.path.name,
                found=fetched.sha256,
                expected=sha256,
                todo="`buildctl lock` again if upstream replaced the file; else distrust it",
            )
        )
    return fetched


def releases(package: str, since: str) -> list[str]:
    """The final releases on the index from `since` on, oldest first; of post-releases only the last.

    :raises NetworkError: pip cannot ask the index.
    """
    output = pip(["index", "versions", distribution(package), *_target()], f"releases of {package}")
    match = re.search(r"^Available versions: (.+)$", output, re.MULTILINE)
    return newest_posts(match[1].split(", ") if match else [], since)


def newest_posts(versions: Iterable[str], since: str) -> list[str]:
    """Of `versions`, the final ones from `since` on in order; 0.5.15.post1 stands for 0.5.15."""
    newest: dict[tuple[int, ...], Version] = {}
    for text in versions:
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        if not version.is_prerelease and version >= Version(since):
            newest[version.release] = max(version, newest.get(version.release, version))
    return [str(version) for version in sorted(newest.values())]


def _download(requirement: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip(["download", "--no-deps", *_target(), "--dest", scratch, requirement], requirement)
        found = next(Path(scratch).glob("*.whl"))
        return Path(shutil.move(found, folder / found.name))


def _target() -> list[str]:
    return [
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        *(word for platform in PLATFORMS for word in ("--platform", platform)),
    ]


def pip(words: list[str], what: str) -> str:
    """Runs pip and returns its output; uv's index variables count where pip has none of its own.

    :raises NetworkError: pip fails, or there is none.
    """
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "tool", "run", "pip"]
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    for theirs, ours in (
        ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"),
        ("UV_INDEX_URL", "PIP_INDEX_URL"),
        ("UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL"),
        ("UV_FIND_LINKS", "PIP_FIND_LINKS"),
    ):
        if theirs in environment:
            environment.setdefault(ours, uv_settings.named(environment[theirs], os.environ))
    try:
        done = subprocess.run([*pip, *words], env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NetworkError(
            Problem(
                "there is neither pip nor uv to fetch with",
                what,
                found=str(error),
                todo="install buildctl with its dependencies",
            )
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        raise NetworkError(
            Problem(
                "pip cannot fetch it",
                what,
                found=" / ".join(lines[-2:]),
                expected="wheels that fit the stack's Python and platform",
                todo="check the release's number, the index settings of this host and the network",
            )
        )
    return done.stdout
