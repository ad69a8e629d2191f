"""What is installed in an image, read from its files and not asked of its programs: Python's distributions, Debian's
packages."""

from __future__ import annotations

import base64
import binascii
import csv
import io
import posixpath
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name

from buildctl.filesystem import FileSystem
from buildctl.sbom import DPKG_STATUS, OS_RELEASE, stanzas

#: the server's environment and the entrypoint's
SERVER, ENTRYPOINT = "opt/venv", "opt/entrypoint/venv"
#: what travels in the image about the image
ETC = "etc/buildctl"
_DPKG = "var/lib/dpkg/info/"
_KEPT = re.compile(rf"{ETC}/|opt/(?:.*/)?site-packages/(?:[^/]+\.dist-info/(?:METADATA|RECORD)|[^/]+\.pth)$"
                   rf"|{DPKG_STATUS}$|{_DPKG}[^/]+\.md5sums$|{'$|'.join(OS_RELEASE)}$")


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution. `name` in its normal form; `files` are real paths, each with the SHA-256 in hex that
    RECORD states, empty where it states none (bytecode, RECORD itself)."""

    name: str
    version: str
    metadata: str
    info: str
    files: dict[str, str]
    #: what cannot be read in it, in words
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Debian:
    """An installed Debian package, and the MD5 sum in hex of each of its files, as dpkg keeps them."""

    name: str
    version: str
    files: dict[str, str]


def keep(path: str) -> bool:
    """Whether the content of a file is read here or by those who compare."""
    return _KEPT.match(path) is not None


def site_of(files: FileSystem, environment: str) -> str | None:
    """The `site-packages` of an environment; None where there is none."""
    lib = files.find(f"{environment}/lib")
    for entry in files.under(lib.path) if lib else ():
        if re.fullmatch(r".*/lib/python3\.\d+/site-packages", entry.path) and entry.entry.kind == "folder":
            return entry.path
    return None


def distributions(files: FileSystem, site: str) -> tuple[Distribution, ...]:
    """The distributions of an environment, by name."""
    folder = files.find(site)
    if folder is None:
        return ()
    found = [_distribution(files, site, entry.path) for entry in files.under(site)
             if entry.path.endswith(".dist-info") and posixpath.dirname(entry.path) == site]
    return tuple(sorted(found, key=lambda one: (one.name, one.version)))


def _distribution(files: FileSystem, site: str, info: str) -> Distribution:
    faults = []
    metadata = (files.content(f"{info}/METADATA") or b"").decode("utf-8", "replace")
    header = HeaderParser().parsestr(metadata)
    name, version = str(header.get("Name", "")), str(header.get("Version", ""))
    if not name or not version:
        faults.append("METADATA names no package and version")
        name = name or posixpath.basename(info).partition("-")[0]
    rows: dict[str, str] = {}
    record = files.content(f"{info}/RECORD")
    if record is None:
        faults.append("no RECORD")
    try:
        for path, digest in record_rows(record or b""):
            rows[_real(files, f"{site}/{path}")] = digest
    except ValueError as error:
        faults.append(f"RECORD cannot be read: {error}")
    return Distribution(canonicalize_name(name), version, metadata, info, rows, tuple(faults))


def record_rows(record: bytes) -> Iterator[tuple[str, str]]:
    """Path and SHA-256 in hex of each row of a RECORD, the hash empty where there is none.

    :raises ValueError: it is no RECORD, or a hash is no SHA-256.
    """
    for row in csv.reader(io.StringIO(record.decode())):
        if not row:
            continue
        algorithm, _, value = (row[1] if len(row) > 1 else "").partition("=")
        if value and algorithm != "sha256":
            raise ValueError(f"{row[0]} has a hash of type {algorithm!r}")
        try:
            digest = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex() if value else ""
        except binascii.Error as error:
            raise ValueError(f"{row[0]}: {error}") from None
        yield row[0], digest


def wheel_record(path: Path) -> dict[str, str]:
    """The RECORD in a wheel file, path -> SHA-256 in hex; empty where it has none that can be read."""
    with zipfile.ZipFile(path) as archive:
        name = next((one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", one)), "")
        try:
            return dict(record_rows(archive.read(name))) if name else {}
        except ValueError:
            return {}


def _real(files: FileSystem, path: str) -> str:
    """A path with its folders' links followed and its dots taken out, as the kernel would."""
    folder, _, name = posixpath.normpath(path.lstrip("/")).rpartition("/")
    found = files.find(folder)
    return f"{found.path}/{name}" if found else f"{folder}/{name}"


def debian_packages(files: FileSystem) -> tuple[Debian, ...]:
    """Debian's packages, by name; none where the image is not a Debian."""
    status = (files.content(DPKG_STATUS) or b"").decode("utf-8", "replace")
    found = []
    for stanza in stanzas(status):
        name, architecture = stanza["Package"], stanza.get("Architecture", "")
        sums = files.content(f"{_DPKG}{name}.md5sums") or files.content(f"{_DPKG}{name}:{architecture}.md5sums") or b""
        rows = [line.split(maxsplit=1) for line in sums.decode("utf-8", "replace").splitlines()]
        found.append(Debian(name, stanza["Version"],
                            {_real(files, row[1]): row[0] for row in rows if len(row) == 2}))
    return tuple(found)
