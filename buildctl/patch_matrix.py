"""Which upstream release breaks or absorbs which patch: every patch of a series against real releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from buildctl import udiff
from buildctl.patches import Patch, Series
from buildctl.udiff import FileDiff, Reader

APPLIES, OFFSET, UPSTREAM, FAILS = "applies", "offset", "upstream", "fails"
#: lines of ours that no upstream will have: the marker and what belongs to it
OURS = "buildctl"


@dataclass(frozen=True, slots=True)
class Cell:
    """How one patch fares on one release; `detail` is the largest offset, or where it fails."""

    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One patch over all releases, in order."""

    patch: Patch
    cells: tuple[tuple[str, Cell], ...]

    def first(self, state: str) -> str:
        """The first release with that fate, or nothing."""
        return next((version for version, cell in self.cells if cell.state == state), "")


def matrix(series: Series, base: Reader, releases: Iterable[tuple[str, Callable[[], Reader]]]) -> list[Row]:
    """The series tried on each release in order; `base` reads the release that it is for."""
    columns = [(version, column(series, base, release())) for version, release in releases]
    return [Row(patch, tuple((version, cells[patch.name]) for version, cells in columns)) for patch in series.patches]


def column(series: Series, base: Reader, release: Reader) -> dict[str, Cell]:
    """All patches on one release, by name; one that does not apply is left out for those behind it."""
    files: dict[str, bytes] = {}
    cells: dict[str, Cell] = {}
    for patch in series.patches:
        cells[patch.name], changed = attempt(patch, base, _over(files, release))
        files.update(changed)
    return cells


def attempt(patch: Patch, base: Reader, release: Reader) -> tuple[Cell, Mapping[str, bytes]]:
    """One patch on one release: how it fares, and the files that it changes."""
    try:
        result = udiff.apply_patches([(patch.name, patch.diff)], release)
    except udiff.DiffError as error:
        if is_upstream(patch.diff.files, base, release):
            return Cell(UPSTREAM), {}
        return Cell(FAILS, error.faults[0].where.removeprefix(f"{patch.name}: ")), {}
    offset = max((place.offset for place in result.offsets), key=abs, default=0)
    return (Cell(OFFSET, f"{offset:+d}") if offset else Cell(APPLIES)), result.files


def is_upstream(files: Sequence[FileDiff], base: Reader, release: Reader) -> bool:
    """Whether a release has the change: it reads as after each hunk, or has every line that the patch adds anew.

    Lines of ours (the marker) and lines that stood in the file before prove nothing and do not count.
    """
    proof = False
    for file in files:
        after = release(file.path)
        if after is None:
            return False
        if all(_reads_as_after(after, hunk.new) for hunk in file.hunks):
            proof = True
            continue
        before = _words(udiff.split_lines(base(file.path) or b""))
        added = _words(line[1:] for hunk in file.hunks for line in hunk.lines if line[:1] == b"+") - before
        if not added <= _words(udiff.split_lines(after)):
            return False
        proof = proof or bool(added)
    return proof


def _reads_as_after(content: bytes, wanted: Sequence[bytes]) -> bool:
    new = [line for line in wanted if OURS.encode() not in line]
    lines = udiff.split_lines(content)
    return any(lines[at : at + len(new)] == new for at in range(len(lines) - len(new) + 1))


def _words(lines: Iterable[bytes]) -> set[bytes]:
    stripped = (line.strip() for line in lines)
    return {line for line in stripped if line and OURS.encode() not in line and not line.startswith(b"#")}


def _over(files: Mapping[str, bytes], release: Reader) -> Reader:
    return lambda path: files[path] if path in files else release(path)


def table(rows: Sequence[Row], *, full: bool = False) -> list[list[str]]:
    """The matrix as rows of text, the head first; `full` tells the failing hunk too."""
    if not rows:
        return []
    versions = [version for version, _ in rows[0].cells]
    head = ["patch", *versions, "first change"]
    return [head, *([row.patch.name, *(_shown(cell, full) for _, cell in row.cells), _first(row)] for row in rows)]


def _shown(cell: Cell, full: bool) -> str:
    if cell.state == OFFSET:
        return f"offset {cell.detail}"
    if cell.state != FAILS:
        return cell.state
    if full:
        return f"fails: {cell.detail}"
    _, hunk, number = cell.detail.partition("hunk ")
    return f"fails {number}" if hunk else "file gone"


def _first(row: Row) -> str:
    broken, absorbed = row.first(FAILS), row.first(UPSTREAM)
    told = []
    if broken:
        told.append(f"broken by {broken} ({dict(row.cells)[broken].detail.rsplit('/', 1)[-1]})")
    if absorbed:
        told.append(f"upstream in {absorbed}")
    claim = row.patch.header.upstream_release
    return (", ".join(told) or "none") + (f"; header: {claim}" if claim else "")


def markdown(rows: Sequence[Row]) -> str:
    """The matrix as a Markdown table."""
    lines = table(rows)
    if not lines:
        return ""
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])
