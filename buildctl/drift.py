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
    """What reads a file of an image: the engine, or a registry."""

    def file(self, reference: str, path: str) -> bytes | None:
        """The content, None when the image or the file is not there."""


def of(images: Iterable[tuple[Reader, str]]) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """The drift of some images together, as their guards found it; and the images that cannot be asked.

    :param images: who has the image, and its name there.
    """
    found: dict[str, tuple[str, str]] = {}
    unseen = []
    for reader, image in images:
        content = reader.file(image, REPORT)
        if content is None:
            unseen.append(image)
            continue
        drift = json.loads(content).get("debian", {}).get("drift", {})
        found.update({name: (locked, installed) for name, (locked, installed) in drift.items()})
    return dict(sorted(found.items())), tuple(unseen)


def lines(drift: Drift, stack: str) -> list[str]:
    """The drift as a warning for people; nothing where there is none."""
    if not drift:
        return []
    return [f"warning: {len(drift)} Debian packages are not those of the lock: the mirror moved on",
            *(f"  {name}: {locked or 'none'} -> {installed or 'none'}" for name, (locked, installed) in drift.items()),
            f"  do: `buildctl lock {stack} --upgrade-debian` locks what the mirror has now; base.bootstrap.snapshot in "
            "the stack keeps what it had"]


def refuse(drift: Drift, unseen: Iterable[str], stack: str) -> None:
    """Refuse images that are not what the lock says, or that cannot be asked.

    :raises AuditError: there is drift, or an image that is not here.
    """
    problems = [Problem("the image cannot be asked for its Debian packages", image, found=f"no {REPORT}",
                        expected="the report of its guard", todo="build it again with --no-cache, or leave out "
                        "--strict")
                for image in unseen]
    if drift:
        problems.append(Problem(
            f"{len(drift)} Debian packages are not those of the lock", f"stack '{stack}'",
            found=", ".join(f"{name} {installed or 'none'}" for name, (_, installed) in drift.items()),
            expected=", ".join(f"{name} {locked or 'none'}" for name, (locked, _) in drift.items()),
            todo=f"`buildctl lock {stack} --upgrade-debian`, or 'snapshot' under base.bootstrap of the stack; without "
                 "--strict this is a warning"))
    if problems:
        raise AuditError(problems)
