"""`buildctl fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from buildctl import fetch, host, project, stack
from buildctl import lock as locks
from buildctl.cli import emit
from buildctl.commands._options import DEFAULT_STACK, cache_dir, json_option, wheelhouse_option
from buildctl.engine import Engine
from buildctl.progress import Mode
from buildctl.units import size


@click.command()
@click.argument("stack_name", metavar="[STACK]", default=DEFAULT_STACK)
@click.option("--to", "folder", required=True, metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
              help="Folder to fill; what is there already is not fetched again.")
@click.option("--progress", type=click.Choice(["auto", "terminal", "plain", "github", "quiet"]), default="auto",
              show_default=True, help="How progress is shown, on stderr.")
@wheelhouse_option
@json_option
@click.pass_obj
def command(root: Path, stack_name: str, folder: Path, progress: str, wheelhouses: tuple[Path, ...],
            as_json: bool) -> None:
    """Download everything that the lock of STACK names: wheels, base, Debian packages.

    Then `buildctl build --offline --wheelhouse DIR` builds the stack without any network.
    """
    found = project.find(root)
    loaded = stack.load(found, stack_name)
    lock = locks.load(loaded, found)
    fetched = fetch.fetch(loaded, lock, host.read(wheelhouses), Engine(), folder.resolve(), cache_dir(),
                          lambda text: click.echo(text, err=True), cast(Mode, progress))
    if as_json:
        emit(fetched.as_dict())
        return
    debs = sum(len(packages) for packages in fetched.apt.values())
    click.echo(f"{fetched.wheels} wheels ({fetched.new} new), {fetched.base}, {debs} Debian packages: "
               f"{size(fetched.bytes)} in {folder}")
    click.echo(f"then: buildctl build --stack {stack_name} --offline --wheelhouse {folder}")
