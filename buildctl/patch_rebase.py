"""Carrying a series to another release: drop what is upstream, merge the rest, stop where a person must look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from packaging.version import Version

from buildctl import patch_edit, patch_git, patches, udiff
from buildctl.errors import PatchError, Problem
from buildctl.patch_matrix import APPLIES, OFFSET, UPSTREAM, attempt
from buildctl.patches import Patch, Series
from buildctl.udiff import Reader


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one patch: `carried` with its new bytes, `dropped` with a reason, or `conflict`.

    A conflict has `files` with conflict marks, and `missing` names files that the release does not have.
    """

    patch: Patch
    outcome: str
    how: str
    data: bytes = b""
    files: Mapping[str, bytes] | None = None
    missing: tuple[str, ...] = ()


def step(series: Series, patch: Patch, old: Reader, new: Reader, onto: str, today: str) -> Step:
    """One patch of `series` onto a release.

    `old` reads the release that the series is for, `new` the other one with the patches carried so far. What a header
    says of a release that has the change is a person's word and goes first; else it is found out.
    """
    before = patches.apply_series(patch_edit.up_to(series, patch.name, included=False), old).files
    base: Reader = lambda path: before[path] if path in before else old(path)  # noqa: E731
    claim = patch.header.upstream_release
    if claim and Version(claim) <= Version(onto):
        return Step(patch, "dropped", f"applied upstream in {patch.header.applied_upstream}")
    cell, changed = attempt(patch, base, new)
    if cell.state == UPSTREAM:
        return Step(patch, "dropped", f"applied upstream in {onto}, or before")
    if cell.state in (APPLIES, OFFSET):
        return _carried(patch, changed, new, today, "applies" if cell.state == APPLIES else f"offset {cell.detail}")
    missing = tuple(file.path for file in patch.diff.files if not file.created and new(file.path) is None)
    merged: dict[str, bytes] = {}
    conflicts = 0
    for file in patch.diff.files:
        theirs, source = new(file.path), base(file.path)
        ours, _ = udiff.apply_file(source, file, patch.name)
        if theirs is None and not file.created:
            conflicts += 1
            continue
        result = patch_git.merge(source or b"", ours, theirs or b"", (series.version, patch.name, onto))
        conflicts += result.conflicts
        merged[file.path] = result.content
    if conflicts:
        return Step(patch, "conflict", f"{conflicts} conflict(s)", files=merged, missing=missing)
    if all(merged[path] == new(path) for path in merged):
        return Step(patch, "dropped", f"applied upstream in {onto}")
    try:
        for path, content in merged.items():
            udiff.check_python(content, path, patch.name)
    except udiff.DiffError as error:
        return Step(patch, "conflict", str(error), files=merged)
    return _carried(patch, merged, new, today, "merged")


def _carried(patch: Patch, files: Mapping[str, bytes], new: Reader, today: str, how: str) -> Step:
    body = b"".join(patch_git.diff(new(path), files[path], path) for path in sorted(files) if files[path] != new(path))
    touched = ", ".join(path for path in sorted(files) if files[path] != new(path))
    header = patch_edit.header_with(patch.diff.preamble, {"Files": touched, "Last-Update": today})
    return Step(patch, "carried", how, header.encode() + body, files)


def rebase(
    series: Series, target: Series, old: Reader, new: Reader, onto: str, today: str, put: Callable[[Step], Series]
) -> list[Step]:
    """Carries the patches that `target` neither has nor has dropped; `put` records each step. Stops at a conflict.

    Running it again goes on behind the patches that are there, so a person may resolve one conflict at a time.
    """
    steps: list[Step] = []
    for patch in series.patches:
        done = {other.name for other in target.patches} | {other.name for other in target.dropped}
        if patch.name in done:
            continue
        carried = patches.apply_series(target, new).files
        over: Reader = lambda path, carried=carried: carried[path] if path in carried else new(path)  # type: ignore[misc] # noqa: E731
        steps.append(step(series, patch, old, over, onto, today))
        if steps[-1].outcome == "conflict":
            break
        target = put(steps[-1])
    return steps


def record_drop(target: Series, name: str, reason: str) -> Series:
    """Writes down why a patch is not carried over."""
    file = target.folder / "series"
    text = file.read_text()
    file.write_text(text + ("" if text.endswith("\n") or not text else "\n") + f"# dropped {name}: {reason}\n")
    return replace(target, dropped=(*target.dropped, patches.Dropped(name, reason)))


def conflict_error(step: Step, folder: str) -> PatchError:
    """The message for a conflict that lies in the workspace `folder`."""
    problems = [
        Problem(
            f"{path} is not in the new release",
            step.patch.name,
            todo="find where it went (the description says"
            " what the patch is for), change that, or record why the patch is dropped",
        )
        for path in step.missing
    ]
    marked = [path for path, content in (step.files or {}).items() if b"\n<<<<<<< " in content]
    problems += [
        Problem(
            "upstream changed the same lines",
            f"{step.patch.name}: {path}",
            found="conflict marks in the file",
            todo=f"resolve them in {folder}, `buildctl patch refresh --from {folder}`, then rebase again",
        )
        for path in marked
    ]
    unsound = Problem(
        "the merge went through, and its result does not compile",
        step.patch.name,
        found=step.how,
        todo=f"repair it in {folder}, `buildctl patch refresh --from {folder}`, then rebase again",
    )
    return PatchError(problems or [unsound])
