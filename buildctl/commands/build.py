"""`buildctl build`."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import cast

import click

from buildctl import building, host, locking
from buildctl.cli import emit
from buildctl.commands._options import cache_dir, composed, json_option, size, stack_option, wheelhouse_option
from buildctl.engine import Engine
from buildctl.progress import Mode


@click.command()
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@stack_option
@click.option("--push", "push_to", multiple=True, metavar="REGISTRY/NAMESPACE",
              help="Push the images there after the build; repeatable.")
@click.option("--builder", metavar="NAME", help="A buildx builder; default: the engine's own.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@click.option("--progress", type=click.Choice(["auto", "terminal", "plain", "github", "quiet"]), default="auto",
              show_default=True, help="How progress is shown, on stderr.")
@wheelhouse_option
@json_option
@click.pass_obj
def command(root: Path, images: tuple[str, ...], stack_name: str, push_to: tuple[str, ...], builder: str | None,
            no_cache: bool, progress: str, wheelhouses: tuple[Path, ...], as_json: bool) -> None:
    """Build IMAGE... (default: all of the stack), tag them, and ask the engine whether they are there."""
    lent = host.read(wheelhouses)
    found, composition = composed(root, stack_name, wheelhouses, lent)
    cache = cache_dir()
    locking.check_patches(composition.stack, found, composition.lock, lent, cache)
    request = building.Request(images, builder, no_cache, cast(Mode, progress))
    outcome = building.build(found, composition, lent, Engine(), request, cache,
                             lambda text: click.echo(text, err=True))
    if not as_json:
        for built in outcome.images:
            state = "built" if built.fresh else "present"
            click.echo(f"{state:8} {built.image.tags[0]:40} {size(built.size):>9}  {built.digest[:19]}  "
                       f"key {built.image.key.value[:16]}")
        if outcome.baked is not None:
            click.echo(f"whole log: {outcome.log}", err=True)
        else:
            click.echo("nothing to build: the engine has every image under its content key", err=True)
    pushed = _push(outcome, push_to) if push_to else []
    if as_json:
        emit({**outcome.as_dict(), "pushed": pushed})
    else:
        for result in pushed:
            click.echo(f"pushed   {result['target']}@{result['digest']}")


def _push(outcome: building.Outcome, targets: tuple[str, ...], timeout: float = 600) -> list[dict[str, object]]:
    """Each image by its content key, which never moves, then its version tag, which does."""
    from buildctl.commands.push import Speaker
    from buildctl.engine import connect
    from buildctl.push import Job, Publisher
    from buildctl.reference import parse, parse_target

    places = [parse_target(text) for text in targets]
    jobs = []
    for built in outcome.images:
        version_tag, key_tag = (parse(tag) for tag in built.image.tags)
        jobs += [Job(str(key_tag), place.place(key_tag), moving=(version_tag.tag,)) for place in places]
    with closing(connect(timeout)) as client, Publisher(client, watcher=Speaker(sys.stderr.isatty())) as publisher:
        return [result.as_dict() for result in publisher.publish(jobs)]
