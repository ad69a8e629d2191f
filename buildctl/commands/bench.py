"""`buildctl bench`: the image's own benchmark, with the right docker flags, and its result bound to the image."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from buildctl import bench, measuring
from buildctl.bench import Wanted
from buildctl.cli import emit
from buildctl.commands._options import json_option
from buildctl.engine import Engine, LocalImage
from buildctl.errors import Problem, ResourceError, UsageError

_WORDS = "buildctl.words"


class WithWords(click.Command):
    """A command whose words after the first `--` are kept apart from its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Cut at the first `--`."""
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_WORDS] = tuple(args[cut + 1:])
            args = args[:cut]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """What the usage line says."""
        return [*super().collect_usage_pieces(ctx), "[-- OPTIONS OF entrypoint benchmark [-- SERVER FLAGS]]"]


@click.command("bench", cls=WithWords)
@click.argument("references", metavar="IMAGE...", nargs=-1, required=True)
@click.option("--model", default="", metavar="DIR|NAME", help="Target model: a folder of the engine's host, or a name "
              "on the hub.")
@click.option("--draft", default="", metavar="DIR|NAME", help="EAGLE-3 draft model.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("results"), show_default=True,
              metavar="DIR", help="Where run folders go.")
@click.option("--rounds", type=click.IntRange(2), metavar="N", help="With several images: how often each runs, "
              "alternately (A B B A ...).  [default: 4]")
@click.option("--seed", type=int, default=20261201, show_default=True, help="Of the coin that says which image begins.")
@click.option("--resume", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
              help="Go on with an interrupted run; its options come with it, its model folders do not.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="JSONL file of chat prompts; default: the image's pack.")
@click.option("--gpus", default="", metavar="all|N|device=0,1", help="GPUs of the container.  [default: all, where the "
              "image has a GPU target]")
@click.option("--shm-size", "shm", default="", metavar="SIZE", help="Limit of /dev/shm.  [default: 32g with GPUs, 1g "
              "without]")
@click.option("--cache", default=bench.CACHE, show_default=True, metavar="VOLUME",
              help="Volume for compiled kernels, keyed by image, and for models of the hub.")
@click.option("--env", "environment", multiple=True, metavar="NAME",
              help="A variable of this environment to pass on; its value is in no command line. HF_TOKEN and proxies "
              "go along by themselves where a model comes from the hub.")
@click.option("--dry-run", is_flag=True, help="Print the docker commands, and stop.")
@json_option
@click.pass_context
def command(ctx: click.Context, references: tuple[str, ...], model: str, draft: str, out: Path, rounds: int | None,
            seed: int, resume: Path | None, prompts: Path | None, gpus: str, shm: str, cache: str,
            environment: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Benchmark IMAGE: baseline against EAGLE-3, in its container, and bind the result to its digest.

    The exit code is the entrypoint's: 0 win, 10 loss, 11 equivalent, 12 inconclusive, 13 invalid, 64 and more for what
    kept it from measuring. With several images they run alternately, and the exit code is that of their comparison.
    """
    wanted = Wanted(model, draft, ctx.meta.get(_WORDS, ()), gpus, shm, cache, environment, prompts, resume)
    _check_words(references, rounds, resume)
    engine = ctx.with_resource(closing(Engine()))
    images = {one: bench.checked(one, engine.image(one)) for one in references}
    bench.check_different(images)
    local = engine.facts().free is not None
    bench.check(wanted, images, os.environ, local=local)
    several = len(images) > 1
    order = list(references)
    if several:
        order = bench.alternating(references, rounds or 4, seed)
        wanted = dataclasses.replace(wanted, words=bench.short(wanted.words))
    if dry_run:
        _show(order, images, wanted, out, local, as_json)
        return 0
    _check_out(out)
    done: list[measuring.Measured] = []
    for number, reference in enumerate(order, 1):
        if several:
            _say(f"== run {number} of {len(order)}: {reference}")
        spec = bench.spec(reference, images[reference], wanted, os.environ, name=bench.new_name("bench"), local=local)
        try:
            one = measuring.measure(engine, spec, images[reference], wanted, out,
                                    "stderr" if several or as_json else "through", _say)
        except BaseException:  # an interrupt ends the rounds, and so does any error
            if done:
                _say(f"complete before it: {' '.join(str(before.folder) for before in done)}")
            raise
        done.append(one)
        if one.folder:
            _say(f"results: {one.folder}")
        if several and one.code not in bench.VALID:
            _say(f"run {number} of {len(order)} ended with {one.code}: no comparison; the runs before it are kept")
            break
    code, comparison = done[-1].code, None
    if several and len(done) == len(order):
        done.sort(key=lambda one: references.index(one.reference))  # the image named first is the reference
        code, comparison = _compare(engine, done, as_json)
    if as_json:
        emit({"runs": [one.as_dict() for one in done], "comparison": comparison})
    return code


def _check_words(references: tuple[str, ...], rounds: int | None, resume: Path | None) -> None:
    twice = sorted({one for one in references if references.count(one) > 1})
    problems = [Problem("an image is named twice", "IMAGE...", one, "each image once",
                        "a noise floor comes with `-- --arm baseline --arm again=`") for one in twice]
    if rounds and len(references) < 2:
        problems.append(Problem("rounds need several images", "--rounds", references[0], "two images or more",
                                "for one image: -- --pairs N"))
    if resume and len(references) > 1:
        problems.append(Problem("one run of one image is resumed", "--resume", ", ".join(references), "one image",
                                "name the image that ran"))
    if problems:
        raise UsageError(problems)


def _check_out(out: Path) -> None:
    """Known before hours are spent. Raises `ResourceError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ResourceError(Problem("cannot write the results", str(out), error.strerror or str(error),
                                    "a writable folder", "--out DIR")) from None


def _show(order: list[str], images: Mapping[str, LocalImage], wanted: Wanted, out: Path, local: bool,
          as_json: bool) -> None:
    specs = [bench.spec(one, images[one], wanted, os.environ, name=bench.new_name("bench"), local=local)
             for one in order]
    if as_json:
        emit({"commands": [bench.script(one, wanted, out).splitlines() for one in specs]})
    else:
        click.echo("\n\n".join(bench.script(one, wanted, out) for one in specs))


def _compare(engine: Engine, done: list[measuring.Measured], as_json: bool) -> tuple[int, Any]:
    ended = measuring.compare(engine, [str(one.folder) for one in done], done[-1].reference,
                              ["--json"] if as_json else [], "capture" if as_json else "through", _say)
    return ended.code, json.loads(ended.output) if as_json and ended.output else None


def _say(text: str) -> None:
    click.echo(text, err=True)
