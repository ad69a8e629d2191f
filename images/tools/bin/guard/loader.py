"""How the dynamic loader finds a library: RPATH or RUNPATH, then its cache, then the system's folders (ld.so(8)).

LD_LIBRARY_PATH does not count on purpose: what a user must set before a server starts is a bug of the image.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elf import Library

_SYSTEM = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_LINE = re.compile(r"^\s*(\S+) \(([^)]*)\) => (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Loader:
    """The loader's cache: soname -> file."""

    cache: Mapping[str, str]
    system: tuple[str, ...] = _SYSTEM

    def find(self, name: str, path: Path, library: Library) -> str | None:
        """Where the loader finds `name` when it loads the library at `path`, None when nowhere."""
        if "/" in name:
            return name if Path(name).is_file() else None
        own = library.runpath or library.rpath
        for folder in own:
            candidate = Path(expand(folder, path), name)
            if candidate.is_file():
                return str(candidate)
        if name in self.cache:
            return self.cache[name]
        return next((f"{folder}/{name}" for folder in self.system if Path(folder, name).is_file()), None)


def expand(folder: str, path: Path) -> str:
    """An entry of RPATH with `$ORIGIN` as the loader replaces it."""
    return re.sub(r"\$(?:ORIGIN\b|\{ORIGIN\})", str(path.resolve().parent), folder)


def parse_cache(text: str) -> dict[str, str]:
    """What `ldconfig -p` prints; of two files the first, as the loader takes it."""
    found: dict[str, str] = {}
    for name, flags, file in _LINE.findall(text):
        if "libc6" in flags and ("x86-64" in flags or "AArch64" in flags):
            found.setdefault(name, file)
    return found


def system_loader() -> Loader:
    """The loader as this file system configures it."""
    done = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True)
    return Loader(parse_cache(done.stdout))
