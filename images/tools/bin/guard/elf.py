"""Shared libraries as the dynamic loader and the CUDA driver see them: a small reader of 64-bit little-endian ELF.

Read from the System V ABI (dynamic section) and from NVIDIA's fatbin containers in the section `.nv_fatbin`.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"
_DYNAMIC, _LOAD = 2, 1
_NEEDED, _STRTAB, _SONAME, _RPATH, _RUNPATH = 1, 5, 14, 15, 29
_FATBIN = 0xBA55ED50
_ELF_KIND = 2


class ElfError(ValueError):
    """The file claims to be ELF and is not whole."""


@dataclass(frozen=True)
class Library:
    """What a library says of itself. Paths are as written, `$ORIGIN` included."""

    needed: tuple[str, ...]
    soname: str
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    #: number of segments that a loader maps; 0: it cannot be loaded
    segments: int
    #: compute capabilities times ten that it holds machine code for, as 120
    architectures: frozenset[int]


def read(path: Path) -> Library | None:
    """Read a library; None when the file is no 64-bit little-endian ELF.

    :raises ElfError: it is cut off or damaged.
    """
    with path.open("rb") as stream:
        if stream.read(6) != _MAGIC:
            return None
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(data)
            except (struct.error, IndexError, StopIteration) as error:
                raise ElfError(f"{path}: damaged ELF file ({error or type(error).__name__})") from None


def _parse(data: mmap.mmap) -> Library:
    start, size, count = _table(data, 32, 54)
    segments = [struct.unpack_from("<IIQQQQ", data, start + index * size) for index in range(count)]
    loads = [(vaddr, offset, filesz) for kind, _, offset, vaddr, _, filesz in segments if kind == _LOAD]
    entries: list[tuple[int, int]] = []
    for kind, _, offset, _, _, filesz in segments:
        if kind == _DYNAMIC:
            entries = list(struct.iter_unpack("<qQ", data[offset:offset + filesz - filesz % 16]))
    end = next((index for index, (tag, _) in enumerate(entries) if tag == 0), len(entries))
    entries = entries[:end]
    address = next((value for tag, value in entries if tag == _STRTAB), None)
    strings = 0
    if address is not None:
        strings = next(address - vaddr + offset for vaddr, offset, filesz in loads if vaddr <= address < vaddr + filesz)

    def texts(wanted: int) -> list[str]:
        return [_string(data, strings + value) for tag, value in entries if tag == wanted]

    return Library(tuple(texts(_NEEDED)), "".join(texts(_SONAME)[:1]), _paths(texts(_RPATH)), _paths(texts(_RUNPATH)),
                   len(loads), frozenset(_architectures(data)))


def _table(data: mmap.mmap, where: int, sizes: int) -> tuple[int, int, int]:
    (start,) = struct.unpack_from("<Q", data, where)
    size, count = struct.unpack_from("<HH", data, sizes)
    return start, size, count


def _string(data: mmap.mmap, offset: int) -> str:
    end = data.find(b"\0", offset)
    if end < 0:
        raise IndexError("a string without end")
    return data[offset:end].decode("utf-8", "replace")


def _paths(texts: list[str]) -> tuple[str, ...]:
    return tuple(path for text in texts for path in text.split(":") if path)


def _architectures(data: mmap.mmap) -> Iterator[int]:
    start, size, count = _table(data, 40, 58)
    (names_index,) = struct.unpack_from("<H", data, 62)
    if start == 0 or count == 0:
        return
    sections = [struct.unpack_from("<IIQQQQ", data, start + index * size) for index in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, length in sections:
        if _string(data, names + name) == ".nv_fatbin":
            yield from _fatbin(data, offset, offset + length)


def _fatbin(data: mmap.mmap, position: int, end: int) -> Iterator[int]:
    while position + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, position)
        if magic != _FATBIN:  # padding between containers
            position += 8
            continue
        entry, position = position + header, position + header + length
        while entry + 32 <= position:
            kind, _, head, body = struct.unpack_from("<HHIQ", data, entry)
            if kind == _ELF_KIND:
                yield struct.unpack_from("<I", data, entry + 28)[0]
            if head == 0:
                break
            entry += head + body
