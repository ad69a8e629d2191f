"""Differences between two locks, as a person wants them: package, from, to, layer, size."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildctl.debian import Packages
from buildctl.errors import Problem, UsageError
from buildctl.lock import Lock, LockedBase, LockedSeries, Wheel
from buildctl.units import size


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a lock file, or a stack's lock as it is or as it was at a git revision."""

    stack: str
    revision: str = ""
    file: str = ""

    @property
    def shown(self) -> str:
        """As a headline shows it."""
        return self.file or (f"{self.stack} at {self.revision}" if self.revision else self.stack)


@dataclass(frozen=True, slots=True)
class Row:
    """One package that differs. Sizes in bytes, None where unknown or absent; `what` is added, removed, changed, or
    `other file` for the same version from another index or build, `moved` for another layer."""

    package: str
    what: str
    old: str
    new: str
    layer: str
    old_size: int | None
    new_size: int | None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"package": self.package, "what": self.what, "from": self.old, "to": self.new, "layer": self.layer,
                "bytes_from": self.old_size, "bytes_to": self.new_size}


@dataclass(frozen=True, slots=True)
class Difference:
    """Everything that differs."""

    rows: tuple[Row, ...]
    #: what differs beside packages: (name, from, to)
    others: tuple[tuple[str, str, str], ...]
    #: Debian packages, with the base or layer as `layer` and without sizes
    debian: tuple[Row, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"packages": [row.as_dict() for row in self.rows],
                "others": [{"what": what, "from": old, "to": new} for what, old, new in self.others],
                "debian": [{"package": row.package, "what": row.what, "from": row.old, "to": row.new,
                            "place": row.layer} for row in self.debian]}

    def lines(self) -> Iterator[str]:
        """The difference for a terminal."""
        if not self.rows and not self.others and not self.debian:
            yield "no difference"
            return
        for what, old, new in self.others:
            yield f"{what}: {old or '-'} -> {new or '-'}"
        width = max((len(row.package) for row in self.rows), default=0)
        for row in self.rows:
            was, now = (size(value) if value is not None else "-" for value in (row.old_size, row.new_size))
            yield (f"{row.package:{width}}  {row.old or '-':>16} -> {row.new or '-':<16} {row.layer:12} "
                   f"{was:>9} -> {now:>9}  {row.what}")
        for row in self.debian:
            yield f"Debian, {row.layer}: {row.package}  {row.old or '-'} -> {row.new or '-'}  {row.what}"
        grown = sum((row.new_size or 0) - (row.old_size or 0) for row in self.rows)
        yield f"{len(self.rows)} packages, {'+' if grown >= 0 else '-'}{size(abs(grown))}"


def compare(before: Lock, after: Lock) -> Difference:
    """What differs between two locks; the server's packages first, then the entrypoint's and the tools'."""
    rows: list[Row] = []
    debian = tuple(row for place in dict.fromkeys((*before.debian, *after.debian))
                   for row in _archives(before.debian.get(place, {}), after.debian.get(place, {}), place))
    for old, new, place in ((before.wheels, after.wheels, ""), (before.entrypoint, after.entrypoint, "(entrypoint)"),
                            (before.tools, after.tools, "(tools)")):
        rows += _rows(old, new, place)
    return Difference(tuple(rows), tuple(_others(before, after)), debian)


def _rows(before: Sequence[Wheel], after: Sequence[Wheel], place: str) -> Iterator[Row]:
    old, new = ({wheel.name: wheel for wheel in wheels} for wheels in (before, after))
    for name in sorted({*old, *new}):
        was, now = old.get(name), new.get(name)
        if was is not None and now is not None and (was.version, was.sha256, was.layer) == \
                (now.version, now.sha256, now.layer):
            continue
        layer = place or (now.layer if now else was.layer if was else "")
        if was is not None and now is not None and was.layer != now.layer and not place:
            layer = f"{was.layer} -> {now.layer}"
        yield Row(name, _what(was, now), was.version if was else "", now.version if now else "", layer,
                  was.size if was else None, now.size if now else None)


def _archives(before: Packages, after: Packages, place: str) -> Iterator[Row]:
    for name in sorted({*before, *after}):
        was, now = before.get(name, ""), after.get(name, "")
        if was != now:
            old, new = (text.split()[0] if text else "" for text in (was, now))
            what = "added" if not was else "removed" if not now else "changed" if old != new else "other file"
            yield Row(name, what, old, new, place, None, None)


def _what(was: Wheel | None, now: Wheel | None) -> str:
    if was is None:
        return "added"
    if now is None:
        return "removed"
    if was.version != now.version:
        return "changed"
    return "other file" if was.sha256 != now.sha256 else "moved"


def _others(before: Lock, after: Lock) -> Iterator[tuple[str, str, str]]:
    pairs = {"python": (before.python, after.python), "platform": (before.platform, after.platform),
             "base": (_base(before.base), _base(after.base))}
    for package in sorted({*before.patches, *after.patches}):
        pairs[f"patches of {package}"] = (_series(before.patches.get(package)), _series(after.patches.get(package)))
    for path in sorted({*before.local, *after.local}):
        pairs[f"local {path}"] = (before.local.get(path, "")[:12], after.local.get(path, "")[:12])
    pairs["unlocked"] = (", ".join(before.open_ends), ", ".join(after.open_ends))
    return ((what, old, new) for what, (old, new) in pairs.items() if old != new)


def _series(series: LockedSeries | None) -> str:
    return f"{len(series.patches)} of {series.folder}, tree {series.tree[:12]}" if series else ""


def _base(base: LockedBase) -> str:
    if base.source == "bootstrap":
        snapshot = (f"snapshot {base.snapshot}",) if base.snapshot else ()
        return " ".join(("bootstrap", base.suite, *base.include, *snapshot))
    return f"{base.image}@{base.digest[:19]}" if base.digest else f"{base.image} (unlocked)"


def sides(words: Sequence[str], stacks: Sequence[str], default: str) -> tuple[Side, Side]:
    """What `--diff [A] [B]` compares.

    :param stacks: names of the project's stacks; another word is a lock file when one lies there, else a revision.
    :raises UsageError: more than two words.
    """
    if len(words) > 2:
        raise UsageError(Problem("a comparison has two sides", "command line", found=" ".join(words)))
    named = next((word for word in words if word in stacks), default)

    def side(word: str) -> Side:
        if word in stacks:
            return Side(word)
        if word.endswith(".lock") or Path(word).is_file():
            return Side(named, file=word)
        return Side(named, revision=word)

    if len(words) == 2:
        return side(words[0]), side(words[1])
    if not words or words[0] in stacks:
        return Side(named, "HEAD"), Side(named)
    return side(words[0]), Side(named)


def at_revision(root: Path, revision: str, path: Path) -> str:
    """A file as git has it at a revision.

    :raises UsageError: git does not know the revision, or has no such file there.
    """
    place = path.relative_to(root)
    try:
        done = subprocess.run(["git", "-C", str(root), "show", "--end-of-options", f"{revision}:./{place}"],
                              capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise UsageError(Problem("cannot ask git", revision, found=str(error))) from None
    if done.returncode != 0:
        raise UsageError(Problem(f"git has no {place} at '{revision}'", "command line",
                                 found=(done.stderr.strip().splitlines() or [""])[0],
                                 expected="a stack, a lock file, or a git revision that holds the lock"))
    return done.stdout
