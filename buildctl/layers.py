"""Layers of an image, read as streams: what each adds and removes, every file hashed on the way by.

Nothing is unpacked and nothing is run. A layer is a tar, plain or packed by gzip or zstd (image specification 1.1,
`layer.md`); what it holds is believed in nothing: paths that leave the image, headers of absurd size and blobs that are
not what their digest says end the reading.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from buildctl.errors import AuditError, Problem

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError, ZstdFile
else:
    from backports.zstd import ZstdError, ZstdFile

Kind = Literal["file", "symlink", "hardlink", "folder", "other"]
#: whether the content of a file of that path is kept, because somebody reads it later
Keep = Callable[[str], bool]

_BUFFER = 1 << 20
#: tarfile copies the rest of this at every read: a bigger one is slower
_BLOCK = 1 << 16
#: the most that is kept of one file, and the longest header (a path, extended attributes), in bytes
LARGEST_KEPT = 64 << 20
_LONGEST_HEADER = 1 << 20
#: Debian's own list of its files has MD5 sums; it has nothing in here
_NOT_DEBIAN = "opt/"
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
#: what tarfile reads into memory: extended headers and long names
_READ_WHOLE = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
               tarfile.GNUTYPE_LONGLINK)
_DAMAGE = (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ZstdError, UnicodeError)


class Source(Protocol):
    """Something that is read in pieces; an empty piece is the end."""

    def read(self, size: int, /) -> bytes:
        """The next piece, of at most `size` bytes."""


class Pieces:
    """Chunks of any size as something to read from: just enough of a file for tarfile's stream mode."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._chunk, self._place = b"", 0

    def read(self, size: int, /) -> bytes:
        """Exactly `size` bytes, less at the end."""
        parts = []
        while size > 0:
            if self._place == len(self._chunk):
                self._chunk, self._place = next(self._chunks, b""), 0
                if not self._chunk:
                    break
            part = self._chunk[self._place:self._place + size]
            self._place += len(part)
            size -= len(part)
            parts.append(part)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or link of a layer. `size` in bytes; hashes of regular files only, in hex."""

    kind: Kind
    mode: int = 0
    uid: int = 0
    size: int = 0
    sha256: str = ""
    md5: str = ""
    #: where a link points, as written
    target: str = ""
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its blob's digest and size in bytes, the digest of its tar, and what it does to those below it."""

    digest: str
    size: int
    diff_id: str
    #: path without leading slash -> entry, in the order of the tar; the last of a path counts
    entries: tuple[tuple[str, Entry], ...]
    #: paths that are gone with everything under them
    removed: frozenset[str] = frozenset()
    #: folders whose lower content is gone
    emptied: frozenset[str] = frozenset()


class WrongDigest(Exception):
    """The bytes are not those that the digest names; whoever fetched them decides what that means."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


def read(source: Source, keep: Keep, *, where: str, digest: str = "", size: int | None = None) -> Layer:
    """Read one layer to its end.

    :param where: the layer's name in messages.
    :param digest: what the blob's digest must be; empty: not known.
    :param size: bytes that the blob must have at most; None: not known.
    :raises WrongDigest: the blob is another one; whatever else is wrong with it follows from that.
    :raises AuditError: the blob is the right one and no layer that may be trusted.
    """
    packed = _Tap(source, size)
    problem: AuditError | None = None
    entries: list[tuple[str, Entry]] = []
    removed: set[str] = set()
    emptied: set[str] = set()
    plain = _Tap(_unpacked(packed))
    try:
        _read_tar(plain, keep, where, entries, removed, emptied)
        _drain(plain)
    except _DAMAGE as error:
        problem = AuditError(Problem("a layer is damaged", where, f"{type(error).__name__}: {error}", "a whole tar",
                                     "push the image again from where it was built"))
    except AuditError as error:
        problem = error
    _drain(packed)
    if digest and packed.digest != digest:
        raise WrongDigest(packed.digest)
    if problem is not None:
        raise problem
    return Layer(packed.digest, packed.count, plain.digest, tuple(entries), frozenset(removed), frozenset(emptied))


def clean(name: str, where: str) -> str:
    """A path of a tar without leading slash, dots and doubled slashes; empty for the root.

    :raises AuditError: it leads out of the image.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise AuditError(Problem("a layer has a path that leads out of the image", where, repr(name)[:200],
                                 "paths below the root", "do not use this image; find out who made it"))
    return "/".join(parts)


def _read_tar(plain: _Tap, keep: Keep, where: str, entries: list[tuple[str, Entry]], removed: set[str],
              emptied: set[str]) -> None:
    try:
        archive = tarfile.open(fileobj=plain, mode="r|", bufsize=_BLOCK, tarinfo=_Header)  # noqa: SIM115 - below
    except tarfile.ReadError:
        if plain.count == 0:  # a layer without anything
            return
        raise
    with archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined] # it would keep every header
            path = clean(member.name, where)
            folder, _, name = path.rpartition("/")
            if name == _OPAQUE:
                emptied.add(folder)
            elif name.startswith(_WHITEOUT + _WHITEOUT):
                continue  # bookkeeping of AUFS
            elif name.startswith(_WHITEOUT):
                removed.add(clean(f"{folder}/{name.removeprefix(_WHITEOUT)}", where))
            elif path:
                entries.append((path, _entry(archive, member, path, keep, where)))


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, keep: Keep, where: str) -> Entry:
    if member.issym() or member.islnk():
        kind: Kind = "symlink" if member.issym() else "hardlink"
        return Entry(kind, member.mode, member.uid, target=member.linkname)
    if not member.isfile():
        return Entry("folder" if member.isdir() else "other", member.mode, member.uid)
    kept = keep(path)
    if kept and member.size > LARGEST_KEPT:
        raise AuditError(Problem("a file that has to be read is too big", f"{where}: {path}", f"{member.size} bytes",
                                 f"at most {LARGEST_KEPT}", "do not use this image; find out who made it"))
    sha256 = hashlib.sha256()
    md5 = None if path.startswith(_NOT_DEBIAN) else hashlib.md5(usedforsecurity=False)
    pieces = []
    content = archive.extractfile(member)
    assert content is not None
    while piece := content.read(_BUFFER):
        sha256.update(piece)
        if md5 is not None:
            md5.update(piece)
        if kept:
            pieces.append(piece)
    return Entry("file", member.mode, member.uid, member.size, sha256.hexdigest(), md5.hexdigest() if md5 else "",
                 content=b"".join(pieces) if kept else None)


class _Header(tarfile.TarInfo):
    """A header that may not ask for absurd amounts of memory, and that ends the reading when it is damaged.

    (Left alone, tarfile takes a damaged header in the middle for the end, and whatever follows for nothing.)
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise tarfile.ReadError(f"a damaged header: {error}") from None
            raise
        if found.type in _READ_WHOLE and found.size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {found.size} bytes")
        return found


class _Tap(io.RawIOBase):
    """Counts and hashes what is read through it."""

    def __init__(self, source: Source, limit: int | None = None) -> None:
        self._source, self._limit, self._hash = source, limit, hashlib.sha256()
        self.count = 0

    @property
    def digest(self) -> str:
        """Of everything that has been read."""
        return f"sha256:{self._hash.hexdigest()}"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override] # typeshed: WriteableBuffer
        filled = 0
        while filled < len(buffer) and (piece := self._source.read(len(buffer) - filled)):  # a short read is no end
            buffer[filled:filled + len(piece)] = piece
            self._hash.update(piece)
            filled += len(piece)
        self.count += filled
        if self._limit is not None and self.count > self._limit:
            raise WrongDigest(f"more than {self._limit} bytes")
        return filled


def _unpacked(packed: _Tap) -> Source:
    buffered = io.BufferedReader(packed, _BUFFER)
    start = buffered.peek(4)[:4]
    if start.startswith(_GZIP):
        return gzip.GzipFile(fileobj=buffered)
    if start == _ZSTD:
        return ZstdFile(buffered)
    return buffered


def _drain(tap: _Tap) -> None:
    while tap.read(_BUFFER):
        pass
