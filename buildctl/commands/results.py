"""`buildctl results`: the benchmark results attached to an image."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from buildctl import results
from buildctl.cli import emit
from buildctl.commands._options import json_option
from buildctl.commands.promote import Clients, in_registry
from buildctl.image_config import identity_of
from buildctl.results import Result
from buildctl.retry import Policy


@click.command("results")
@click.argument("reference", metavar="REGISTRY/IMAGE:TAG")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write each result's files to a folder of its own there.")
@click.option("--attach", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
              help="First attach the result in a benchmark's results folder.")
@json_option
def command(reference: str, out: Path | None, folder: Path | None, as_json: bool) -> None:
    """List the benchmark results attached to an image, the newest last."""
    source = in_registry(reference)
    added = results.read(folder) if folder else None
    with ExitStack() as stack:
        registry = Clients(stack, Policy(), "pull,push" if folder else "pull")(source.registry)
        manifest = registry.existing(source)
        if added is not None:
            results.check(added, None, identity_of(registry, source.repository, manifest), reference)
            results.attach(registry, source.repository, manifest.descriptor, added)
        found = results.attached(registry, source.repository, manifest.digest)
    for result in found if out else ():
        assert out is not None
        _write(result, out / result.digest.partition(":")[2][:16])
    if as_json:
        emit({"digest": manifest.digest, "results": [result.as_dict() for result in found]})
    elif found:
        click.echo("\n".join(f"{result.created or '?':20}  {result.verdict:12}  {result.headline}" for result in found))
    else:
        click.echo(f"no results attached to {manifest.digest}", err=True)


def _write(result: Result, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in result.files.items():
        (folder / name).write_bytes(data)
