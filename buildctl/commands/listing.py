"""`buildctl list`."""

from __future__ import annotations

from pathlib import Path

import click

from buildctl import compose, project, stack
from buildctl import lock as locks
from buildctl.cli import emit
from buildctl.commands._options import json_option
from buildctl.errors import BuildctlError, ManifestError, Problem


@click.command()
@json_option
@click.pass_obj
def command(root: Path, as_json: bool) -> None:
    """Show the stacks of the project, their images with versions, and whether their locks are current.

    A lock is current when a build takes it as it is: it fits its stack, and nothing in it is left open.
    """
    found = project.find(root)
    problems: list[Problem] = []
    rows = []
    for name in stack.names(found):
        try:
            loaded = stack.load(found, name)
        except BuildctlError as error:
            problems += error.problems
            continue
        lock, state = None, "current"
        try:
            lock = locks.read(locks.path_of(loaded), found)
            stale = locks.stale_sections(lock, loaded, found)
            if stale:
                state = f"stale: {', '.join(stale)}"
            elif lock.open_ends:
                state = f"incomplete: {len(lock.open_ends)} unlocked"
        except BuildctlError as error:
            state = error.problems[0].what
        images = [f"{layer.name}:{compose.version_of(loaded, lock, layer)}-{loaded.tag}" if lock else layer.name
                  for layer in loaded.layers]
        rows.append({"stack": name, "description": loaded.description, "targets": list(loaded.targets),
                     "images": images, "lock": state, "unlocked": list(lock.open_ends) if lock else []})
    tags = [image for row in rows for image in row["images"] if ":" in image]
    for tag in sorted({tag for tag in tags if tags.count(tag) > 1}):
        problems.append(Problem(f"two stacks make the same tag {tag}", found.shown(found.stacks),
                                todo="give their 'tag' fields different values"))
    if problems:
        raise ManifestError(problems)
    if as_json:
        emit({"stacks": rows})
        return
    for row in rows:
        click.echo(f"{row['stack']}  ({', '.join(row['targets'])}; lock {row['lock']})")
        click.echo(f"  {row['description']}")
        click.echo(f"  {' -> '.join(row['images'])}")
