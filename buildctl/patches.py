"""Patch series: parse, check, apply exactly in memory, effective tree.

A series is a folder `patches/PACKAGE/VERSION[-VARIANT]` with a file `series` and the patches that it names, each with a
header in the manner of DEP-3 (dep-team.pages.debian.net/deps/dep3) and a diff relative to site-packages, strip level 1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from buildctl import udiff
from buildctl.errors import PatchError, Problem
from buildctl.manifest import suggest
from buildctl.udiff import Diff, DiffError, Place, effective_tree

__all__ = [
    "Applied",
    "Checked",
    "Dropped",
    "Header",
    "Patch",
    "Series",
    "apply_series",
    "check",
    "effective_tree",
    "read_header",
    "read_patch",
    "read_series",
]

_FIELD = re.compile(r"([A-Za-z][A-Za-z-]*):(?:[ \t]+(.*))?")
_DROPPED = re.compile(r"# dropped (\S+): (applied upstream in \S+.*|obsolete because \S.*)")
_TARGET = re.compile(r"sm\d{2,3}|cpu|all")
_SLUG = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
REQUIRED = ("Description", "Origin", "Last-Update", "Concern", "Targets", "Files", "Marker", "Tested")
OPTIONAL = ("Subject", "Author", "From", "Bug", "Reviewed-by", "Acked-by", "Forwarded", "Applied-Upstream")
TESTED = ("compile", "cpu", "gpu")


@dataclass(frozen=True, slots=True)
class Header:
    """The fields above the diff. `strip` is the same for all patches."""

    description: str
    origin: str
    forwarded: str
    applied_upstream: str
    last_update: str
    concern: str
    targets: tuple[str, ...]
    files: tuple[str, ...]
    marker: str
    tested: str
    strip: int = 1

    @property
    def subject(self) -> str:
        """First line of the description."""
        return self.description.split("\n", 1)[0]

    @property
    def upstream_release(self) -> str:
        """The release that has the change according to `Applied-Upstream`, or nothing."""
        match = re.match(r"\d+(?:\.\w+)+", self.applied_upstream)
        return match[0] if match else ""


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch file, read."""

    name: str
    path: Path
    sha256: str
    header: Header
    diff: Diff

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it changes, relative to site-packages."""
        return tuple(file.path for file in self.diff.files)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A patch of an earlier series that was not carried over, with the recorded reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Series:
    """The patches for one release of one package, in order."""

    package: str
    version: str
    folder: Path
    patches: tuple[Patch, ...]
    dropped: tuple[Dropped, ...]
    sha256: str

    def patch(self, name: str) -> Patch:
        """The patch of that name; its number alone, or the name without `.patch`, will do.

        :raises PatchError: there is none, or more than one.
        """
        found = [
            patch
            for patch in self.patches
            if name in (patch.name, patch.name.removesuffix(".patch")) or patch.name.startswith(f"{name}-")
        ]
        if len(found) == 1:
            return found[0]
        raise PatchError(
            Problem(
                f"the series has {'no' if not found else 'more than one'} patch '{name}'",
                str(self.folder),
                todo=suggest(name, [patch.name for patch in self.patches]),
            )
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """A series after application in memory.

    `files` are the touched files with their contents, `places` where each hunk went, `builds_on` triples of patch,
    earlier patch whose lines it leans on, and file.
    """

    files: Mapping[str, bytes]
    places: tuple[Place, ...]
    builds_on: tuple[tuple[str, str, str], ...]
    tree_sha256: str

    @property
    def offsets(self) -> tuple[Place, ...]:
        """The hunks that fitted elsewhere than at their own line."""
        return tuple(place for place in self.places if place.offset)


@dataclass(frozen=True, slots=True)
class Checked:
    """What `check` found: enough for a lock and a plan. `cached`: nothing had changed since the last check."""

    tree_sha256: str
    files: tuple[str, ...]
    offsets: tuple[Place, ...]
    builds_on: tuple[tuple[str, str, str], ...]
    cached: bool = False


# --- reading -------------------------------------------------------------------------------------------------------


def read_series(folder: Path) -> Series:
    """The series in `folder`, with all its patches.

    :raises PatchError: with everything that is wrong in the folder.
    """
    problems: list[Problem] = []
    package, version = folder.resolve().parent.name, folder.name.split("-", 1)[0]
    file = folder / "series"
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(
            Problem(
                "the series cannot be read",
                str(file),
                found=_reason(error),
                expected="a file with one patch name per line",
                todo="start a series with `buildctl patch new`",
            )
        ) from None
    if "\r" in text:
        raise PatchError(
            Problem(
                "the series has CRLF line ends",
                str(file),
                found="\\r\\n",
                expected="\\n",
                todo="take it again with `git -c core.autocrlf=false`",
            )
        )
    try:
        names = udiff.read_series_file(text, str(file))
    except DiffError as error:
        raise patch_error(error) from None
    dropped = list(_dropped(text, str(file), problems))
    patches: list[Patch] = []
    for name in names:
        try:
            patches.append(read_patch(folder / name))
        except PatchError as error:
            problems += error.problems
    problems += [
        Problem(
            "the file is not in the series",
            str(path),
            expected="`series` and the patches that it names",
            todo="add its name to the series, or remove the file",
        )
        for path in sorted(folder.iterdir())
        if path.name not in {"series", *names}
    ]
    if problems:
        raise PatchError(problems)
    return Series(package, version, folder, tuple(patches), tuple(dropped), series_sha256(patches))


def series_sha256(patches: list[Patch]) -> str:
    """sha256 over the lines `SHA256  NAME` of the patches in order."""
    return hashlib.sha256("".join(f"{patch.sha256}  {patch.name}\n" for patch in patches).encode()).hexdigest()


def _dropped(text: str, where: str, problems: list[Problem]) -> Iterator[Dropped]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("# dropped"):
            match = _DROPPED.fullmatch(line)
            if match:
                yield Dropped(match[1], match[2])
            else:
                problems.append(
                    Problem(
                        "a dropped patch without a proper reason",
                        f"{where}:{number}",
                        found=line,
                        expected="`# dropped NAME: applied upstream in X` or `... obsolete because Y`",
                    )
                )


def read_patch(path: Path) -> Patch:
    """One patch file.

    :raises PatchError: it cannot be read, is damaged, or its header is not right.
    """
    if path.is_symlink() or not path.is_file():
        raise PatchError(
            Problem(
                "the patch is not there, or no plain file",
                str(path),
                expected="a file in this folder",
                todo="take it from version control again, or remove its line in the series",
            )
        )
    data = path.read_bytes()
    try:
        diff = udiff.parse(data, str(path))
    except DiffError as error:
        raise patch_error(error) from None
    header = read_header(diff, str(path))
    return Patch(path.name, path, hashlib.sha256(data).hexdigest(), header, diff)


def read_header(diff: Diff, where: str) -> Header:
    """The header of a patch, checked against its diff: `Files` names what it touches, `Marker` stands in what it adds.

    :raises PatchError: with everything that is wrong.
    """
    problems: list[Problem] = []
    fields = _fields(diff.preamble, where, problems)
    known = {*REQUIRED, *OPTIONAL}
    problems += [
        Problem(f"unknown field '{name}'", where, todo=suggest(name, known))
        for name in fields
        if name not in known and not name.startswith("Bug-")
    ]
    for name in REQUIRED:
        value = fields.get(name, "")
        if not value or re.search(r"\bTODO\b", value):
            problems.append(
                Problem(
                    f"the header has no {name}",
                    where,
                    found=value or "nothing",
                    expected=_EXPECTED[name],
                    todo="say it: without it nobody can retire the patch",
                )
            )
    if not fields.get("Forwarded") and not fields.get("Applied-Upstream"):
        problems.append(
            Problem(
                "the header has neither Forwarded nor Applied-Upstream",
                where,
                expected="`Forwarded: no`, `not-needed` or a URL, or `Applied-Upstream: RELEASE, PR`",
            )
        )
    targets, files = (tuple(re.split(r"[,\s]+", fields.get(name, ""))) for name in ("Targets", "Files"))
    checks = {
        "Last-Update": _is_date(fields.get("Last-Update", "")),
        "Concern": bool(_SLUG.fullmatch(fields.get("Concern", ""))),
        "Targets": all(map(_TARGET.fullmatch, targets)),
        "Tested": fields.get("Tested", "") in TESTED,
    }
    problems += [
        Problem(f"the header's {name} is not right", where, found=fields[name], expected=_EXPECTED[name])
        for name, right in checks.items()
        if fields.get(name) and not right
    ]
    touched = [file.path for file in diff.files]
    if fields.get("Files") and sorted(files) != sorted(touched):
        problems.append(
            Problem(
                "the header's Files are not those of the diff",
                where,
                found=", ".join(sorted(touched)),
                expected=", ".join(sorted(files)),
                todo="the patch may be cut off; else refresh it",
            )
        )
    marker = fields.get("Marker", "")
    added = (line[1:].decode() for file in diff.files for hunk in file.hunks for line in hunk.lines if line[:1] == b"+")
    if marker and not any(marker in line for line in added):
        problems.append(
            Problem(
                "the marker is in no line that the patch adds",
                where,
                found=marker,
                expected="a text of the log line, or the attribute, that shows it was reached",
            )
        )
    if problems:
        raise PatchError(problems)
    return Header(
        fields["Description"],
        fields["Origin"],
        fields.get("Forwarded", ""),
        fields.get("Applied-Upstream", ""),
        fields["Last-Update"],
        fields["Concern"],
        targets,
        files,
        marker,
        fields["Tested"],
    )


_EXPECTED = {
    "Description": "what the patch does and why",
    "Origin": "who wrote it, or the URL it comes from",
    "Last-Update": "a date, YYYY-MM-DD",
    "Concern": "a short name such as symm-mem",
    "Targets": "sm120, sm121, cpu, ... or all",
    "Files": "the files of the diff",
    "Marker": "a text that shows at run time",
    "Tested": " | ".join(TESTED),
}


def _fields(preamble: str, where: str, problems: list[Problem]) -> dict[str, str]:
    """Deb822-like fields: a continuation starts with a space, ` .` is an empty line; a line `---` ends them."""
    fields: dict[str, str] = {}
    name = ""
    for number, line in enumerate(preamble.split("\n"), 1):
        if line == "---":
            break
        match = _FIELD.fullmatch(line)
        if match:
            name = match[1]
            if name in fields:
                problems.append(Problem(f"{name} is given twice", f"{where}:{number}", expected="each field once"))
            fields[name] = (match[2] or "").strip()
        elif line[:1] in (" ", "\t") and name:
            fields[name] += "\n" + ("" if line.strip() == "." else line.strip())
        elif line.strip():
            problems.append(
                Problem(
                    "no field of a header",
                    f"{where}:{number}",
                    found=line,
                    expected="`Field: value`, or a continuation that starts with a space",
                )
            )
    return {name: value.strip() for name, value in fields.items()}


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def patch_error(error: DiffError) -> PatchError:
    """The faults of a diff as problems."""
    return PatchError(
        Problem(fault.what, fault.where, fault.found, fault.expected, fault.todo) for fault in error.faults
    )


# --- applying ------------------------------------------------------------------------------------------------------


def apply_series(series: Series, tree: Mapping[str, bytes] | udiff.Reader) -> Applied:
    """The series applied in memory to `tree` (contents by path, or a function that reads a path); writes nothing.

    :raises PatchError: with patch, file and hunk of everything that does not fit.
    """
    read = tree.get if isinstance(tree, Mapping) else tree
    try:
        result = udiff.apply_patches([(patch.name, patch.diff) for patch in series.patches], read)
    except DiffError as error:
        raise patch_error(error) from None
    return Applied(result.files, result.places, result.builds_on, effective_tree(result.files))


def check(
    series: Series, wheel: Callable[[], udiff.Reader], wheel_sha256: str, *, tree: str = "", cache: Path | None = None
) -> Checked:
    """Applies the series to the wheel with that hash, or remembers that it did; `wheel()` is asked only if need be.

    `tree` is the effective tree that must come out (a lock's), `cache` a folder for results.

    :raises PatchError: the series does not apply, or another tree comes out.
    """
    key = hashlib.sha256(f"{wheel_sha256} {series.sha256} {_engine_sha256()}".encode()).hexdigest()
    file = cache / f"{key}.json" if cache else None
    found = _remembered(file) if file else None
    if found is None:
        applied = apply_series(series, wheel())
        found = Checked(applied.tree_sha256, tuple(sorted(applied.files)), applied.offsets, applied.builds_on)
        if file:
            _remember(file, found)
    if tree and found.tree_sha256 != tree:
        raise PatchError(
            Problem(
                "another tree comes out of the series than the lock names",
                str(series.folder),
                found=found.tree_sha256,
                expected=tree,
                todo="if the series was changed on purpose: `buildctl lock`",
            )
        )
    return found


def _engine_sha256() -> str:
    return hashlib.sha256(Path(udiff.__file__).read_bytes()).hexdigest()


def _remembered(file: Path) -> Checked | None:
    try:
        data = json.loads(file.read_bytes())
        return Checked(
            data["tree"],
            tuple(data["files"]),
            tuple(Place(*place) for place in data["offsets"]),
            tuple((one, two, three) for one, two, three in data["builds_on"]),
            cached=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(file: Path, checked: Checked) -> None:
    data = {
        "tree": checked.tree_sha256,
        "files": checked.files,
        "builds_on": checked.builds_on,
        "offsets": [(place.patch, place.path, place.hunk, place.line, place.offset) for place in checked.offsets],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(data))
    new.replace(file)
