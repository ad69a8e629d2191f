"""`buildctl compare`: runs of different images against each other, computed by an image's own entrypoint."""

from __future__ import annotations

from contextlib import closing

import click

from buildctl import bench, measuring
from buildctl.commands._options import json_option
from buildctl.engine import Engine
from buildctl.errors import Problem, UsageError
from buildctl.image_config import KEY_LABEL


@click.command("compare")
@click.argument("folders", metavar="DIR|NAME=DIR...", nargs=-1, required=True)
@click.option("--image", default="", metavar="IMAGE", help="The image whose entrypoint computes.  [default: that of "
              "the latest run]")
@click.option("--drift", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE",
              help="Shift of the machine that is allowed for between runs that do not alternate.  [default: 0.05]")
@click.option("--allow", multiple=True, metavar="NAME", help="Accept a difference of machine or flags by its name.")
@click.option("--exit-zero-on-valid", is_flag=True, help="Exit with 0 for every verdict but invalid.")
@json_option
@click.pass_context
def command(ctx: click.Context, folders: tuple[str, ...], image: str, drift: float | None, allow: tuple[str, ...],
            exit_zero_on_valid: bool, as_json: bool) -> int:
    """Compare runs of different images: ratio, interval and verdict for each load point.

    The first folder's image is the reference. Runs that did other work are refused, every difference by its name. The
    exit code is the entrypoint's: 0 win, 10 loss, 11 equivalent, 12 inconclusive, 13 invalid or refused.
    """
    if len(folders) < 2:
        raise UsageError(Problem("compare takes two run folders or more", "DIR...", folders[0], "two folders",
                                 "name the folders that `bench` printed"))
    engine = ctx.with_resource(closing(Engine()))
    paths = [measuring.folder_of(word)[1] for word in folders]
    keys = bench.keys(paths)
    if image:
        bench.checked(image, engine.image(image))
    else:
        known = {key: found[0] for _, key in keys if (found := engine.images(f"{KEY_LABEL}={key}"))}
        image = bench.newest(keys, known)
    words = [*(["--drift", str(drift)] if drift is not None else []), *(f"--allow={name}" for name in allow),
             *(["--exit-zero-on-valid"] if exit_zero_on_valid else []), *(["--json"] if as_json else [])]
    return measuring.compare(engine, folders, image, words, "through",
                             lambda text: click.echo(text, err=True)).code
