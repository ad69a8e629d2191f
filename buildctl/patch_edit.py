"""Changing a patch by editing real files: unpack, edit, write the patch back with its header."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from buildctl import patch_git, patches, udiff
from buildctl.errors import PatchError, Problem, UsageError
from buildctl.patches import Patch, Series
from buildctl.source import Wheel

STATE = ".buildctl-patch.json"
HEADER = "HEADER"
TEMPLATE = """\
Description: TODO one line: what it does
 TODO why: the symptom on which card, and where in the source it comes from.
Origin: ours
Forwarded: no
Last-Update: {today}
Concern: {concern}
Targets: sm120, sm121
Files: -
Marker: buildctl patch {concern}:
Tested: compile
---
"""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A tree that is being edited: the package as it is with the series up to one patch."""

    folder: Path
    series: Path
    name: str
    wheel_sha256: str

    @property
    def header(self) -> Path:
        """The patch's header, to be edited like the files."""
        return self.folder / HEADER


def unpack(wheel: Wheel, files: Mapping[str, bytes], to: Path) -> None:
    """Writes the package with `files` in the place of its own into `to`, which must be empty or absent.

    :raises UsageError: `to` holds something.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(Problem("the folder is not empty", str(to), todo="name a new one; nothing is overwritten"))
    for name in {*wheel.names, *files}:
        path = to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name] if name in files else wheel.read(name) or b"")


def up_to(series: Series, name: str, *, included: bool) -> Series:
    """The series before the patch `name`, or with it; whole when it has no such patch."""
    names = [patch.name for patch in series.patches]
    end = names.index(name) + included if name in names else len(names)
    return replace(series, patches=series.patches[:end])


def edit(series: Series, name: str, wheel: Wheel, to: Path) -> Workspace:
    """A workspace for a patch of the series."""
    files = patches.apply_series(up_to(series, name, included=True), wheel.read).files
    unpack(wheel, files, to)
    return _begin(Workspace(to, series.folder, name, wheel.sha256), series.patch(name).diff.preamble)


def new(series: Series, slug: str, wheel: Wheel, to: Path, today: str) -> Workspace:
    """A workspace for a new patch behind the series; its number follows the last one."""
    number = max((int(patch.name[:4]) for patch in series.patches if patch.name[:4].isdecimal()), default=0) + 1
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug):
        raise UsageError(
            Problem("not a name for a patch", found=slug, expected="words joined by '-', such as symm-mem")
        )
    unpack(wheel, patches.apply_series(series, wheel.read).files, to)
    workspace = Workspace(to, series.folder, f"{number:04d}-{slug}.patch", wheel.sha256)
    return _begin(workspace, TEMPLATE.format(today=today, concern=slug))


def _begin(workspace: Workspace, header: str) -> Workspace:
    workspace.header.write_text(header)
    state = {"series": str(workspace.series), "patch": workspace.name, "wheel_sha256": workspace.wheel_sha256}
    (workspace.folder / STATE).write_text(json.dumps(state, indent=1) + "\n")
    return workspace


def opened(folder: Path) -> Workspace:
    """The workspace in `folder`.

    :raises UsageError: there is none.
    """
    try:
        state = json.loads((folder / STATE).read_bytes())
        return Workspace(folder, Path(state["series"]), state["patch"], state["wheel_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            Problem(
                "no patch is being edited there", str(folder), expected=f"a file {STATE}", todo="buildctl patch edit"
            )
        ) from None


def refreshed(workspace: Workspace, series: Series, wheel: Wheel, today: str) -> bytes:
    """The patch file that makes the workspace out of the package with the patches before it.

    :raises PatchError: nothing differs, or a file was deleted.
    """
    before = patches.apply_series(up_to(series, workspace.name, included=False), wheel.read).files
    changes = sorted(_changes(workspace.folder, wheel, before))
    if not changes:
        raise PatchError(
            Problem(
                "nothing differs from the patches before it",
                str(workspace.folder),
                todo="edit files there first; to retire a patch, drop it from the series",
            )
        )
    unresolved = [path for path, _, content in changes if b"\n<<<<<<< " in content]
    if unresolved:
        raise PatchError(
            Problem(
                "there are conflict marks left", str(workspace.folder), ", ".join(unresolved), todo="resolve them first"
            )
        )
    body = b"".join(patch_git.diff(old, content, path) for path, old, content in changes)
    files = ", ".join(path for path, _, _ in changes)
    return header_with(workspace.header.read_text(), {"Files": files, "Last-Update": today}).encode() + body


def header_with(header: str, values: Mapping[str, str]) -> str:
    """The header with the fields replaced, or added before the closing `---`."""
    lines = [line for line in header.split("\n---", 1)[0].split("\n") if line.strip()]
    kept: list[str] = []
    skipping = False
    left = dict(values)
    for line in lines:
        if line[:1] not in (" ", "\t"):
            name = line.split(":", 1)[0]
            skipping = name in values
            if skipping:
                kept.append(f"{name}: {left.pop(name)}")
        if not skipping:
            kept.append(line)
    return "\n".join([*kept, *(f"{name}: {value}" for name, value in left.items()), "---", ""])


def _changes(folder: Path, wheel: Wheel, before: Mapping[str, bytes]) -> Iterator[tuple[str, bytes | None, bytes]]:
    known = {*wheel.names, *before}
    missing = [name for name in sorted(known) if not (folder / name).is_file()]
    if missing:
        raise PatchError(
            Problem(
                "a patch deletes no files",
                str(folder),
                found=", ".join(missing[:5]),
                todo="put the file back and change what uses it",
            )
        )
    for top in sorted({name.split("/", 1)[0] for name in known}):
        for path in (folder / top).rglob("*"):
            name = path.relative_to(folder).as_posix()
            if not path.is_file() or "__pycache__" in path.parts or path.suffix in (".pyc", ".orig", ".rej"):
                continue
            content = path.read_bytes()
            old = before[name] if name in before else wheel.read(name)
            if content != old:
                yield name, old, content


def put(series: Series, name: str, data: bytes, wheel: Wheel, *, force: bool = False) -> Series:
    """Writes a patch into the series, at the end when it is new; the whole series must apply afterwards.

    :raises PatchError: the patch or a later one does not; nothing was written then, unless `force` is set.
    """
    path = series.folder / name
    diff = udiff_of(data, path)
    patch = Patch(name, path, "", patches.read_header(diff, str(path)), diff)
    names = [other.name for other in series.patches]
    changed = tuple(patch if other.name == name else other for other in series.patches)
    whole = replace(series, patches=changed if name in names else (*changed, patch))
    if not force:
        patches.apply_series(whole, wheel.read)
    path.write_bytes(data)
    if name not in names:
        text = (series.folder / "series").read_text()
        (series.folder / "series").write_text(text + ("" if text.endswith("\n") or not text else "\n") + name + "\n")
    return patches.read_series(series.folder)


def udiff_of(data: bytes, path: Path) -> udiff.Diff:
    """The patch parsed.

    :raises PatchError: it is damaged.
    """
    try:
        return udiff.parse(data, str(path))
    except udiff.DiffError as error:
        raise patches.patch_error(error) from None


def rewritten(series: Series, name: str, wheel: Wheel, today: str) -> bytes:
    """The patch written anew against the source as it is, so that its hunks have no offset any more."""
    patch = series.patch(name)
    before = patches.apply_series(up_to(series, name, included=False), wheel.read).files
    after = patches.apply_series(up_to(series, name, included=True), wheel.read).files
    body = b"".join(
        patch_git.diff(before[path] if path in before else wheel.read(path), after[path], path)
        for path in sorted(patch.files)
    )
    return (
        header_with(patch.diff.preamble, {"Files": ", ".join(sorted(patch.files)), "Last-Update": today}).encode()
        + body
    )


def lay_out(series: Series, patch: Patch, wheel: Wheel, files: Mapping[str, bytes], to: Path) -> Workspace:
    """A workspace for a patch that met a conflict: `files` have conflict marks, the rest is as the series leaves it."""
    unpack(wheel, {**patches.apply_series(series, wheel.read).files, **files}, to)
    return _begin(Workspace(to, series.folder, patch.name, wheel.sha256), patch.diff.preamble)
