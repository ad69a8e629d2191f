"""`buildctl prune`."""

from __future__ import annotations

from pathlib import Path

import click

from buildctl import compose, host, project, pruning, stack
from buildctl import lock as locks
from buildctl.cli import emit
from buildctl.commands._options import json_option
from buildctl.engine import Engine
from buildctl.units import size


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would go, and stop.")
@json_option
@click.pass_obj
def command(root: Path, dry_run: bool, as_json: bool) -> None:
    """Remove images that earlier states of this project's stacks left in the engine.

    What the stacks and locks of the checkout make now stays, and so does everything that buildctl did not make. Stages
    that a killed build left for its push go. Every lock must be current: a stale one would make its images look like
    leavings.
    """
    found = project.find(root)
    lent = host.read()
    names = stack.names(found)
    keys: set[str] = set()
    for name in names:
        loaded = stack.load(found, name)
        composition = compose.compose(found, loaded, locks.load(loaded, found), lent)
        keys |= {image.key.value for image in composition.images}
        keys |= {stage.key for stage in composition.chain}
    engine = Engine()
    gone = pruning.stale(engine.images("buildctl.key"), keys, names)
    if not dry_run:
        pruning.remove(engine, gone)
    if as_json:
        emit({"removed" if not dry_run else "would_remove": [one.as_dict() for one in gone]})
        return
    for one in gone:
        click.echo(f"{'would go' if dry_run else 'removed'}  {', '.join(one.image.tags)}  {size(one.image.size)}")
    if not gone:
        click.echo("nothing to remove")
