"""What wheels say of themselves, read from the index without downloading them.

METADATA comes as its own small file where the index offers that (PEP 658), else out of the wheel by byte ranges; the
names of the wheel's files come from its table of contents, also by ranges. Both are kept by the wheel's sha256.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from buildctl.errors import NetworkError, Problem
from buildctl.host import Host
from buildctl.lock import Overlap, Wheel

if TYPE_CHECKING:
    import requests

_THREADS = 8
#: what a first read from the end of a wheel asks for: holds the table of contents of all but the biggest
_TAIL = 64 * 1024
#: a server without byte ranges is still read when the whole file is no bigger
_SMALL = 1024 * 1024
#: paths that an overlap names
_SHOWN = 20
#: files that a wheel has of its own under dist-info or that installers write anew
_OWN = re.compile(r"[^/]+\.(?:dist-info|data)/")


@dataclass(frozen=True, slots=True)
class Facts:
    """One wheel: `Requires-Dist` lines as they stand, and its files as (path, CRC-32, size). None: not to be had."""

    requires: tuple[str, ...] | None
    files: tuple[tuple[str, int, int], ...] | None


def read(wheels: Iterable[Wheel], urls: Mapping[str, str], host: Host, cache: Path) -> dict[str, Facts]:
    """The facts of wheels by package name.

    :param urls: file name -> where the index serves it; wheels of the host's wheelhouses are read from there.
    :raises NetworkError: an index stops answering.
    """
    local = host.local_wheels()
    found = tuple(wheels)

    def one(wheel: Wheel) -> Facts:
        kept = cache / "metadata" / f"{wheel.sha256}.json.gz"
        facts = _recall(kept)
        if facts is None:
            path = local.get(wheel.file)
            facts = of_file(path) if path is not None else remote.facts(urls.get(wheel.file, ""))
            if facts.requires is not None and facts.files is not None:
                _remember(kept, facts)
        return facts

    with _Remote(host) as remote, ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip((wheel.name for wheel in found), pool.map(one, found), strict=True))


def of_file(path: Path) -> Facts:
    """The facts of a wheel on this disk."""
    with zipfile.ZipFile(path) as archive:
        return _of_archive(archive)


def requires_of(text: str) -> tuple[str, ...]:
    """The `Requires-Dist` lines of a METADATA file."""
    return tuple(HeaderParser().parsestr(text).get_all("Requires-Dist") or ())


def applicable(facts: Mapping[str, Facts], roots: Iterable[str], python: str,
               machine: str) -> dict[str, tuple[str, ...] | None]:
    """What each package requires on the target, with the extras that somebody asks for.

    :param roots: the requirements that the resolution began with.
    :returns: package -> sorted requirements as `name` or `name==1.2`; None where METADATA was not to be had.
    """
    environment = {"implementation_name": "cpython", "implementation_version": f"{python}.0", "os_name": "posix",
                   "platform_machine": machine, "platform_python_implementation": "CPython", "platform_release": "",
                   "platform_system": "Linux", "platform_version": "", "python_full_version": f"{python}.0",
                   "python_version": python, "sys_platform": "linux"}
    parsed = {name: [requirement for line in fact.requires or () if (requirement := _parse(line))]
              for name, fact in facts.items()}
    extras: dict[str, set[str]] = {name: set() for name in facts}
    queue = [requirement for text in roots if (requirement := _parse(text))]
    found: dict[str, set[str]] = {name: set() for name in facts}
    # the root requirements may name extras of packages, these of others, and so on
    pending = set(facts)
    while pending or queue:
        for requirement in queue:
            name = canonicalize_name(requirement.name)
            if name in extras and requirement.extras - extras[name]:
                extras[name] |= requirement.extras
                pending.add(name)
        queue = []
        for package in sorted(pending):
            for requirement in parsed[package]:
                marker = requirement.marker
                if marker is None or any(marker.evaluate({**environment, "extra": extra})
                                         for extra in ("", *extras[package])):
                    queue.append(requirement)
                    found[package].add(f"{canonicalize_name(requirement.name)}{requirement.specifier}")
        pending = set()
    return {name: None if facts[name].requires is None else tuple(sorted(found[name])) for name in facts}


def annotate(wheels: Iterable[Wheel], requires: Mapping[str, tuple[str, ...] | None]) -> tuple[Wheel, ...]:
    """The wheels with what they require; a bare name of a package that is there says no more than its `via`."""
    found = tuple(wheels)
    names = {wheel.name for wheel in found}

    def telling(texts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if texts is None else tuple(text for text in texts if text not in names)

    return tuple(replace(wheel, requires=telling(requires.get(wheel.name))) for wheel in found)


def overlaps(facts: Mapping[str, Facts]) -> tuple[Overlap, ...]:
    """Pairs of packages that install the same path, where at least one such file differs in content."""
    owners: dict[str, list[tuple[str, int, int]]] = {}
    for name in sorted(facts):
        for path, crc, size in facts[name].files or ():
            if not _OWN.match(path):
                owners.setdefault(path, []).append((name, crc, size))
    pairs: dict[tuple[str, str], list[str]] = {}
    for path, entries in owners.items():
        for (first, *one), (second, *other) in combinations(entries, 2):
            if one != other:
                pairs.setdefault((first, second), []).append(path)
    return tuple(Overlap(first, second, len(paths), tuple(sorted(paths)[:_SHOWN]))
                 for (first, second), paths in sorted(pairs.items()))


def _parse(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None  # old wheels carry lines that no tool can read; installers skip them too


def _of_archive(archive: zipfile.ZipFile) -> Facts:
    files = tuple((info.filename, info.CRC, info.file_size) for info in archive.infolist() if not info.is_dir())
    names = [name for name, _, _ in files if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
    text = archive.read(names[0]).decode("utf-8", "replace") if names else ""
    return Facts(requires_of(text) if names else None, tuple(sorted(files)))


def _recall(path: Path) -> Facts | None:
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        return Facts(tuple(data["requires"]), tuple((name, crc, size) for name, crc, size in data["files"]))
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


def _remember(path: Path, facts: Facts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(gzip.compress(json.dumps({"requires": facts.requires, "files": facts.files}).encode(), mtime=0))
    partial.replace(path)


class _Remote:
    """Wheels on indexes, with this host's CA bundle, proxies and credentials."""

    def __init__(self, host: Host) -> None:
        self._host = host
        #: servers that had no METADATA file of its own: they are not asked again
        self._plain: set[str] = set()

    def __enter__(self) -> _Remote:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util import Retry

        self._session = requests.Session()
        retry = Retry(total=3, backoff_factor=0.3, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=retry, pool_maxsize=_THREADS))
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def facts(self, url: str) -> Facts:
        """The facts of one wheel.

        :raises NetworkError: the index does not answer.
        """
        parts = urlsplit(url)
        if parts.scheme == "file":
            return of_file(Path(unquote(parts.path)))
        if not parts.scheme:
            return Facts(None, None)
        requires = self._metadata(url)
        facts = self._contents(url)
        return facts if requires is None else replace(facts, requires=requires)

    def _metadata(self, url: str) -> tuple[str, ...] | None:
        server = urlsplit(url).netloc
        if server in self._plain:
            return None
        with self._get(f"{url}.metadata") as answer:
            if answer.ok:
                return requires_of(answer.content.decode("utf-8", "replace"))
        self._plain.add(server)
        return None

    def _contents(self, url: str) -> Facts:
        try:
            with zipfile.ZipFile(io.BufferedReader(_Ranges(self, url))) as archive:
                return _of_archive(archive)
        except (_NoRanges, zipfile.BadZipFile):
            return Facts(None, None)

    def fetch(self, url: str, wanted: str) -> tuple[bytes, int, int]:
        """Some bytes of a file: content, position, size of the file."""
        with self._get(url, {"Range": f"bytes={wanted}"}) as answer:
            if answer.status_code == 206 and (match := re.fullmatch(r"bytes (\d+)-\d+/(\d+)",
                                                                    answer.headers.get("Content-Range", ""))):
                return answer.content, int(match[1]), int(match[2])
            size = int(answer.headers.get("Content-Length") or _SMALL + 1)
            if answer.ok and size <= _SMALL:
                return answer.content, 0, size
            raise _NoRanges

    def _get(self, url: str, headers: Mapping[str, str] | None = None) -> requests.Response:
        import requests

        try:
            return self._session.get(url, headers=dict(headers or {}), auth=self._credentials(url), timeout=60,
                                     stream=True, verify=str(self._host.ca) if self._host.ca else True)
        except requests.RequestException as error:
            raise NetworkError(Problem("a package index stopped answering", urlsplit(url).path.rsplit("/", 1)[-1],
                                       found=type(error).__name__, todo="run the same command again; check network, "
                                       "proxy and index settings (UV_DEFAULT_INDEX) when it stays so")) from None

    def _credentials(self, url: str) -> tuple[str, str] | None:
        index = urlsplit(self._host.index or "")
        if index.username and urlsplit(url).hostname == index.hostname:
            return unquote(index.username), unquote(index.password or "")
        return None


class _NoRanges(Exception):
    """The server gives files as a whole only."""


class _Ranges(io.RawIOBase):
    """A file on a server that is read where it is asked for."""

    def __init__(self, remote: _Remote, url: str) -> None:
        self._remote, self._url, self._place = remote, url, 0
        self._data, self._start, self._size = remote.fetch(url, f"-{_TAIL}")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override] # typeshed: WriteableBuffer
        wanted = min(len(buffer), self._size - self._place)
        if wanted <= 0:
            return 0
        if not self._start <= self._place < self._start + len(self._data):
            last = min(self._size, self._place + max(wanted, _TAIL)) - 1
            self._data, self._start, _ = self._remote.fetch(self._url, f"{self._place}-{last}")
        begin = self._place - self._start
        part = self._data[begin:begin + wanted]
        buffer[:len(part)] = part
        self._place += len(part)
        return len(part)


