"""The tools of the image build as modules, and ELF files made to measure."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

BIN = Path(__file__).parents[2] / "images" / "tools" / "bin"


def tool(name: str) -> ModuleType:
    """A module under images/tools/bin by its path there, as `guard/elf`."""
    path = BIN / f"{name}.py"
    unique = path.stem if path.parent.name == "guard" and path.stem != "guard" else f"bin_{name.replace('/', '_')}"
    if unique in sys.modules:
        return sys.modules[unique]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    return module


def fatbin(*architectures: int, kind: int = 2) -> bytes:
    """A fatbin container with one empty program per architecture; kind 2 is machine code, 1 is PTX."""
    entries = b"".join(struct.pack("<HHIQIIHHIIIQ", kind, 0x101, 64, 8, 0, 0, 0, 1, arch, 0, 0, 0).ljust(64, b"\0")
                       + b"program!" for arch in architectures)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def elf(needed: Iterable[str] = (), *, soname: str = "", rpath: str = "", runpath: str = "",
        kernels: bytes | None = None) -> bytes:
    """A shared library that nothing can run and every reader of ELF understands."""
    strings = b"\0"
    entries = b""
    for tag, texts in ((1, tuple(needed)), (14, (soname,)), (15, (rpath,)), (29, (runpath,))):
        for text in filter(None, texts):
            entries += struct.pack("<qQ", tag, len(strings))
            strings += text.encode() + b"\0"
    base = 64 + 2 * 56
    # the addresses are not the offsets, as in real files
    entries += struct.pack("<qQ", 5, 0x10000 + base) + struct.pack("<qQ", 0, 0)
    dynamic = base + len(strings)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    code = dynamic + len(entries)
    content = kernels if kernels is not None else b""
    tables = code + len(content) + len(names)
    sections = b"" if kernels is None else b"".join((
        bytes(64),
        struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0x10000 + code, code, len(content), 0, 0, 8, 0),
        struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, code + len(content), len(names), 0, 0, 1, 0)))
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, tables if sections else 0, 0, 64, 56, 2, 64, 3 if sections else 0,
        2 if sections else 0)
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x10000, 0x10000, tables, tables, 4096)
    place, size = 0x10000 + dynamic, len(entries)
    segments += struct.pack("<IIQQQQQQ", 2, 6, dynamic, place, place, size, size, 8)
    return header + segments + strings + entries + content + names + sections
