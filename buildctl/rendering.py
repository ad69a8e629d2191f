"""Rendering: a composition as a folder that `docker buildx bake` can build, the base included."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from buildctl import base, context
from buildctl.compose import BASE_TAR, Composition
from buildctl.context import File
from buildctl.errors import Problem, UsageError
from buildctl.project import Project

_MARK = "docker-bake.json"


def folder_of(project: Project, stack: str) -> Path:
    """Where builds of a stack are rendered."""
    return project.work / stack / "context"


def render(composition: Composition, folder: Path, cache: Path, say: Callable[[str], None],
           needed: Collection[str] = ()) -> None:
    """Write everything that a build reads into `folder`, which then holds nothing else.

    :param needed: the stages that will be built; the base is left out when it is not among them.  [default: all]
    :raises UsageError: the folder holds files that are no earlier rendering.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise UsageError(Problem("the folder holds something else than a rendering", str(folder),
                                 expected=f"an empty or missing folder, or one with {_MARK}",
                                 todo="name another folder: rendering removes what does not belong"))
    files = composition.written()
    lock = composition.lock
    if lock.base.source == "bootstrap" and (not needed or "base" in needed):
        tar = base.ensure(lock, cache, say)
        files[BASE_TAR] = File(source=tar, trusted=True)
    context.write(files, folder)
