"""`buildctl plan`."""

from __future__ import annotations

from pathlib import Path

import click

from buildctl import host, locking, plan
from buildctl.cli import emit
from buildctl.commands._options import cache_dir, composed, json_option, stack_option, wheelhouse_option
from buildctl.units import size


@click.command()
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@stack_option
@wheelhouse_option
@json_option
@click.pass_obj
def command(root: Path, images: tuple[str, ...], stack_name: str, wheelhouses: tuple[Path, ...],
            as_json: bool) -> None:
    """Show what a build of IMAGE... (default: all of the stack) would do, and why. Needs no engine and no network."""
    lent = host.read(wheelhouses)
    found, composition = composed(root, stack_name, wheelhouses, lent)
    for name in images:
        composition.image(name)
    checked = locking.check_patches(composition.stack, found, composition.lock, lent, cache_dir(), fetch=False)
    for package in (package for package, result in checked.items() if result is None):
        click.echo(f"note: the source of {package} is not at hand, so its series was not applied again; "
                   f"`buildctl lock` did, and the build will", err=True)
    made = plan.make(composition, images, plan.read_record(found.work / stack_name / "record.json"))
    if as_json:
        emit(made.as_dict())
        return
    click.echo(f"stack {made.stack} for {', '.join(made.targets)}: {len(made.todo)} of {len(made.changes)} to build, "
               f"about {size(made.disk)} of disk")
    for change in made.changes:
        image = change.image
        click.echo(f"\n{image.tags[0]}  {change.state}" + (f": {', '.join(change.reasons)}" if change.reasons else ""))
        click.echo(f"  key {image.key.value[:16]}, chain {image.chain.value[:16]}")
        biggest = ", ".join(f"{wheel.name} {wheel.version} {size(wheel.size)}"
                            for wheel in plan.largest(image.wheels, 4))
        click.echo(f"  {len(image.wheels)} wheels, {size(change.download)}" + (f": {biggest}" if biggest else ""))
        for patch in image.patches:
            click.echo(f"  patch {patch}")
