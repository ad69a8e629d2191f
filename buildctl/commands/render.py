"""`buildctl render`."""

from __future__ import annotations

from pathlib import Path

import click

from buildctl import rendering
from buildctl.cli import emit
from buildctl.commands._options import cache_dir, composed, json_option, stack_option, wheelhouse_option


@click.command()
@stack_option
@click.option("--to", "target", type=click.Path(file_okay=False, path_type=Path), default=None, metavar="DIR",
              help="Where to write.  [default: .buildctl/STACK/context]")
@wheelhouse_option
@json_option
@click.pass_obj
def command(root: Path, stack_name: str, target: Path | None, wheelhouses: tuple[Path, ...], as_json: bool) -> None:
    """Write what a build consists of: Dockerfile, docker-bake.json and every file that they read.

    The folder works by hand: `docker buildx bake -f docker-bake.json` in it gives the same images.
    """
    found, composition = composed(root, stack_name, wheelhouses)
    folder = target or rendering.folder_of(found, stack_name)
    rendering.render(composition, folder, cache_dir(), lambda text: click.echo(text, err=True))
    if as_json:
        emit({"folder": str(folder), "dockerfile": str(folder / "Dockerfile"), "bake": str(folder / "docker-bake.json"),
              "targets": [image.stage for image in composition.images]})
        return
    click.echo(f"written to {found.shown(folder)}")
    click.echo(f"by hand: (cd {found.shown(folder)} && docker buildx bake -f docker-bake.json)")
