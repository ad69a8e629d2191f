"""A Debian archive on this disk: lists of made-up packages, as apt reads them; there are no packages behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def package(name: str, version: str, *, depends: str = "", priority: str = "optional", essential: bool = False) -> str:
    """A stanza of a Packages file."""
    return "".join([f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nPriority: {priority}\n",
                    "Essential: yes\n" if essential else "", f"Depends: {depends}\n" if depends else "",
                    f"Filename: pool/{name}_{version}_amd64.deb\nSize: 1\n",
                    f"SHA256: {hashlib.sha256(f'{name}{version}'.encode()).hexdigest()}\n"])


#: a minimal system, and what layers ask for
SYSTEM = (package("libc6", "2.36-9", priority="required"),
          package("dpkg", "1.21", depends="libc6", priority="required", essential=True),
          package("apt", "2.6.1", depends="libc6"),
          package("python3", "3.11.2", depends="python3-minimal (= 3.11.2)"), package("python3-minimal", "3.11.2"),
          package("g++", "12.2", depends="libc6, python3"), package("tini", "0.19"),
          package("ca-certificates", "1:2023"))


def write(folder: Path, stanzas: Iterable[str] = SYSTEM, suite: str = "bookworm") -> str:
    """Write the archive; its line for a sources.list."""
    place = folder / "dists" / suite / "main" / "binary-amd64"
    place.mkdir(parents=True, exist_ok=True)
    text = "\n".join(stanzas)
    (place / "Packages").write_text(text)
    (folder / "dists" / suite / "Release").write_text(
        f"Suite: {suite}\nCodename: {suite}\nArchitectures: amd64\nComponents: main\nSHA256:\n "
        f"{hashlib.sha256(text.encode()).hexdigest()} {len(text)} main/binary-amd64/Packages\n")
    return f"deb [trusted=yes] file:{folder} {suite} main"
