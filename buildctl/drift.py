"""Drift: Debian packages of built images that are not those of the lock, because the mirror moved on since."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Protocol

from buildctl.errors import AuditError, Problem

#: where the guard of a layer leaves its report
REPORT = "/etc/buildctl/guard.json"
#: name -> (locked version, installed version); empty where there is none
Drift = Mapping[str, tuple[str, str]]


class Reader(Protocol):
    """What reads a file of an image: the engine."""

    def file(self, reference: str, path: str) -> bytes | None:
        """The content, None when the image or the file is not there."""


def of(reader: Reader, images: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The drift of some images together, as their guards found it. Images that are not here tell nothing."""
    found: dict[str, tuple[str, str]] = {}
    for image in images:
        content = reader.file(image, REPORT)
        report = json.loads(content) if content else {}
        found.update({name: (locked, installed)
                      for name, (locked, installed) in report.get("debian", {}).get("drift", {}).items()})
    return dict(sorted(found.items()))


def lines(drift: Drift, stack: str) -> list[str]:
    """The drift as a warning for people; nothing where there is none."""
    if not drift:
        return []
    return [f"warning: {len(drift)} Debian packages are not those of the lock: the mirror moved on",
            *(f"  {name}: {locked or 'none'} -> {installed or 'none'}" for name, (locked, installed) in drift.items()),
            f"  do: `buildctl lock {stack} --upgrade-debian` locks what the mirror has now; base.bootstrap.snapshot in "
            "the stack keeps what it had"]


def refuse(drift: Drift, stack: str) -> None:
    """Refuse images that are not what the lock says.

    :raises AuditError: there is drift.
    """
    if drift:
        raise AuditError(Problem(
            f"{len(drift)} Debian packages are not those of the lock", f"stack '{stack}'",
            found=", ".join(f"{name} {installed or 'none'}" for name, (_, installed) in drift.items()),
            expected=", ".join(f"{name} {locked or 'none'}" for name, (locked, _) in drift.items()),
            todo=f"`buildctl lock {stack} --upgrade-debian`, or 'snapshot' under base.bootstrap of the stack; without "
                 "--strict this is a warning"))
