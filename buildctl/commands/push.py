"""`buildctl push`: publish images, fixed tags first, moving tags last, every digest read back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import click

from buildctl.cli import emit
from buildctl.commands._options import composed, json_option, retry_options
from buildctl.engine import Engine
from buildctl.errors import Problem, UsageError
from buildctl.push import Job, Move, Publisher, Result, Watcher
from buildctl.reference import Target, check_tag, parse, parse_target
from buildctl.retry import Policy, Retry
from buildctl.upload import Progress


@click.command("push")
@click.argument("references", nargs=-1, metavar="IMAGE:TAG...")
@click.option("--stack", "stack_name", metavar="NAME",
              help="Push built images of this stack, all or IMAGE...: each under its content key, which is fixed, and "
                   "its version tag, which moves.")
@click.option("--to", "targets", multiple=True, metavar="REGISTRY[/NAMESPACE]",
              help="Push there, keeping name and tag; may be repeated. Without it IMAGE names its registry itself.")
@click.option("--alias", "aliases", multiple=True, metavar="TAG", help="A further fixed tag for the same digest.")
@click.option("--moving", multiple=True, metavar="TAG",
              help="A tag that may point at something else today, such as latest; set last.")
@click.option("--dry-run", is_flag=True, help="Say what would move where, and stop.")
@retry_options
@click.option("--timeout", type=click.FloatRange(0.1), default=600.0, show_default=True, metavar="SECONDS",
              help="Longest time for which an upload may stand still.")
@click.option("--rate", type=click.FloatRange(0), default=0.0, metavar="MB/S",
              help="Upload rate of this line, to warn of layers that a registry would cut off.")
@json_option
@click.pass_obj
def command(root: Path | None, references: tuple[str, ...], stack_name: str | None, targets: tuple[str, ...],
            aliases: tuple[str, ...], moving: tuple[str, ...], dry_run: bool, attempts: int, wait: float,
            timeout: float, rate: float, as_json: bool) -> None:
    """Push local images to one or several registries.

    IMAGE:TAG is a fixed tag: when it exists with other content nothing is pushed and the exit code is 12. What a
    registry has already is not sent again, so an interrupted push is simply repeated.
    """
    places = [parse_target(target) for target in targets]
    further, moved = tuple(map(check_tag, aliases)), tuple(map(check_tag, moving))
    if stack_name is None:
        jobs = jobs_for(references, places, further, moved)
    else:
        _, composition = composed(root or Path(), stack_name, ())
        images = [composition.image(name) for name in references] or composition.images
        jobs = jobs_of([image.tags for image in images], places, further, moved)
    with (closing(Engine(max(timeout, 60))) as engine,
          Publisher(engine, policy=Policy(attempts, wait), patience=timeout,
                    watcher=Speaker(sys.stderr.isatty())) as publisher):
        if dry_run:
            moves = publisher.plan(jobs, rate=rate * 1e6)
            if as_json:
                emit({"moves": [move.as_dict() for move in moves]})
            else:
                click.echo("\n".join(map(_planned, moves)))
            return
        results = publisher.publish(jobs, rate=rate * 1e6)
    if as_json:
        emit({"pushed": [result.as_dict() for result in results]})
    else:
        click.echo("\n".join(f"{result.target}@{result.digest}" for result in results))


def jobs_of(tags: Iterable[tuple[str, ...]], targets: list[Target], aliases: tuple[str, ...] = (),
            moving: tuple[str, ...] = ()) -> list[Job]:
    """Jobs for images of a stack: version and key tag of each. Raises `UsageError`."""
    if not targets:
        raise UsageError(Problem("the images of a stack name no registry", "--to", "", "REGISTRY[/NAMESPACE]",
                                 "add --to REGISTRY/NAMESPACE"))
    pairs = [(parse(version), parse(key)) for version, key in tags]
    return [Job(str(key), place.place(key), aliases, (version.tag, *moving)) for version, key in pairs
            for place in targets]


def jobs_for(references: tuple[str, ...], targets: list[Target], aliases: tuple[str, ...] = (),
             moving: tuple[str, ...] = ()) -> list[Job]:
    """One job per image and target; all wrong references at once. Raises `UsageError`."""
    if not references:
        raise UsageError(Problem("nothing to push", "IMAGE:TAG...", "", "an image, or --stack NAME",
                                 "name an image that `docker images` shows"))
    jobs: list[Job] = []
    problems: list[Problem] = []
    for text in references:
        reference = parse(text)
        if not reference.tag or reference.digest:
            problems.append(Problem("a push needs a tag, and no digest", text, "", "IMAGE:TAG",
                                    "name the tag that the image was built with"))
        elif not targets and not reference.registry:
            problems.append(Problem("the image names no registry", text, "", "REGISTRY/IMAGE:TAG, or --to",
                                    "add --to REGISTRY/NAMESPACE"))
        else:
            places = [target.place(reference) for target in targets] or [reference]
            jobs += [Job(text, place, aliases, moving) for place in places]
    if problems:
        raise UsageError(problems)
    return jobs


_VERBS = {"upload": "push", "tag": "tag", "move": "move", "keep": "keep"}


def _planned(move: Move) -> str:
    now = f" (now {move.current})" if move.current and move.action == "move" else ""
    return f"{_VERBS[move.action]}  {move.target}  <- {move.job.source}{now}"


class Speaker(Watcher):
    """Says on stderr what happens; on a terminal also how far an upload is."""

    def __init__(self, live: bool) -> None:
        self._live, self._shown = live, 0.0

    def _say(self, text: str) -> None:
        click.echo(("\r\x1b[K" if self._live else "") + text, err=True)

    def note(self, text: str) -> None:  # noqa: D102
        self._say(text)

    def warn(self, problem: Problem) -> None:  # noqa: D102
        self._say(f"warning: {problem}")

    def retry(self, where: str, retry: Retry) -> None:  # noqa: D102
        self._say(f"{where}: attempt {retry.attempt} of {retry.attempts} failed: {retry.fault.text}; "
                  f"next in {retry.seconds:.1f} s")

    def progress(self, where: str, progress: Progress) -> None:  # noqa: D102
        if self._live and (now := time.monotonic()) - self._shown > 0.2:
            self._shown = now
            text = f"{where}: {progress.sent / 1e6:.0f} of {progress.total / 1e6:.0f} MB"
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)

    def done(self, result: Result) -> None:  # noqa: D102
        words = {"keep": "already there", "tag": "tagged", "move": "moved",
                 "upload": f"pushed in {result.seconds:.1f} s; layers: {result.layers.pushed} sent, "
                           f"{result.layers.present} there before, {result.layers.mounted} mounted"}[result.action]
        self._say(f"{result.target}: {words}")
