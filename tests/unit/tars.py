"""Layers of images as bytes, for tests."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from collections.abc import Iterable, Mapping

from buildctl.layers import Layer, Pieces, read

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def item(name: str, content: bytes | None = None, *, link: str = "", hard: str = "", kind: bytes = b"") -> tuple[
        tarfile.TarInfo, bytes]:
    """One member: a file, a folder (no content), a symbolic link, a hard link, or whatever `kind` says."""
    info = tarfile.TarInfo(name)
    info.type = kind or (tarfile.SYMTYPE if link else tarfile.LNKTYPE if hard else
                         tarfile.DIRTYPE if content is None else tarfile.REGTYPE)
    info.linkname = link or hard
    info.size = len(content or b"")
    return info, content or b""


def tar(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """A plain tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def of(files: Mapping[str, bytes | str | None]) -> bytes:
    """A tar of files (bytes), folders (None) and symbolic links (text) by path."""
    return tar(item(path, link=value) if isinstance(value, str) else item(path, value)
               for path, value in files.items())


def pack(data: bytes, how: str) -> bytes:
    """Packed as registries keep layers: `gzip`, `zstd` or `plain`."""
    return {"gzip": lambda: gzip.compress(data, mtime=0), "zstd": lambda: zstd.compress(data), "plain": lambda: data}[
        how]()


def layer(files: Mapping[str, bytes | str | None] | bytes, keep: bool = True) -> Layer:
    """A layer, read by the real reader in small pieces."""
    data = files if isinstance(files, bytes) else of(files)
    return read(Pieces(data[at:at + 700] for at in range(0, len(data), 700)), lambda _: keep, where="a layer")
