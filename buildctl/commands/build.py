"""`buildctl build`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from buildctl import attestations, building, contents, credentials, drift, fetch, host, locking, resume
from buildctl.cli import emit
from buildctl.commands._options import cache_dir, composed, json_option, origin, stack_option, wheelhouse_option
from buildctl.engine import Builder, Engine
from buildctl.errors import Problem, UsageError
from buildctl.progress import Mode
from buildctl.provenance import Build
from buildctl.reference import Target, parse, parse_target
from buildctl.resume import Found
from buildctl.units import size

if TYPE_CHECKING:
    from buildctl.publishing import Finish, Placed


@click.command()
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@stack_option
@click.option("--push", "push_to", multiple=True, metavar="REGISTRY/NAMESPACE",
              help="Publish there, by content key first; repeatable. What the first one has under its key is not "
                   "built again.")
@click.option("--builder", metavar="NAME", help="A buildx builder; default: the engine's own.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@click.option("--progress", type=click.Choice(["auto", "terminal", "plain", "github", "quiet"]), default="auto",
              show_default=True, help="How progress is shown, on stderr.")
@click.option("--allow-unlocked", is_flag=True,
              help="Build although the lock has no hash for some packages or the base; the image records it.")
@click.option("--offline", is_flag=True,
              help="Build steps get no network; a wheelhouse filled by `buildctl fetch` has everything.")
@click.option("--buildkit-attest", "own_attestations", multiple=True, metavar="SPEC",
              help="BuildKit's own attestation of what is built, as buildx takes it (type=provenance,mode=max; "
                   "type=sbom): the digest is another at every build. Repeatable.")
@click.option("--no-attest", is_flag=True,
              help="With --push: attach neither provenance nor the bill of materials to what was built.")
@click.option("--strict", is_flag=True,
              help="Refuse images with other Debian packages than the lock's (exit 7); else that is a warning.")
@wheelhouse_option
@json_option
@click.pass_obj
def command(root: Path, images: tuple[str, ...], stack_name: str, push_to: tuple[str, ...], builder: str | None,
            no_cache: bool, progress: str, allow_unlocked: bool, offline: bool, strict: bool,
            own_attestations: tuple[str, ...], no_attest: bool, wheelhouses: tuple[Path, ...], as_json: bool) -> None:
    """Build IMAGE... (default: all of the stack), tag them, and ask the engine whether they are there."""
    lent = host.read(wheelhouses, offline=offline)
    found, composition = composed(root, stack_name, wheelhouses, lent)
    composition = composition.attested(own_attestations, host.secret_proxies(os.environ, Path.home()))
    if not allow_unlocked:
        locking.refuse_unlocked(composition.stack, found, composition.lock)
    cache = cache_dir()
    if offline:
        fetch.prepare_offline(composition.stack, composition.lock, lent, cache)
    locking.check_patches(composition.stack, found, composition.lock, lent, cache)
    places = [parse_target(text) for text in push_to]
    engine = Engine()
    with ExitStack() as open_ends:
        open_ends.enter_context(closing(engine))
        publisher = None
        found_there = Found({}, {})
        used = engine.builder(builder) if builder else None
        straight = None
        if places:
            from buildctl.commands.push import Speaker
            from buildctl.push import Publisher

            publisher = open_ends.enter_context(Publisher(engine, watcher=Speaker(sys.stderr.isatty())))
            wanted = [composition.image(name) for name in images] or composition.images
            if not no_cache:
                found_there = resume.look(composition, wanted, places[0], publisher.registry)
            # a right that is missing is better known before the build than after it
            publisher.check_rights(place.place(parse(image.tags[1])) for image in wanted for place in places
                                   if image.name not in found_there.images)
            if used is not None and not used.keeps_images:
                straight = places[0]
                _refuse_hidden_login(straight, used)
        request = building.Request(images, used, straight, bool(straight and engine.insecure(straight.registry)),
                                   no_cache, cast(Mode, progress), bool(places), found_there)
        began = time.time()
        outcome = building.build(found, composition, lent, engine, request, cache, _say)
        open_ends.callback(building.release, engine, outcome.names.values())
        finished = time.time()
        reader = contents.TopFiles(publisher.registry, composition.stack.platform) if publisher else None
        drifted, unseen = drift.of(_asked(outcome, places, engine, reader, all_of_them=strict))
        if strict:
            drift.refuse(drifted, unseen, stack_name)
        if not as_json:
            _tell(outcome)
        for line in drift.lines(drifted, stack_name):
            _say(line)
        pushed: list[dict[str, Any]] = []
        if publisher:
            from buildctl import publishing

            how = Build("" if builder or outcome.baked is None else engine.facts().version, builder or "", began,
                        finished)
            attach = partial(attestations.attach_all, composition, registry=publisher.registry,
                             origin=origin(found.root), build=how, environment=os.environ)
            pushed = publishing.publish(outcome, places, publisher, partial(
                _finish, reader=reader if strict else None, attach=None if no_attest else attach,
                stack_name=stack_name))
    if as_json:
        emit({**outcome.as_dict(), "drift": {name: list(both) for name, both in drifted.items()}, "pushed": pushed})
    else:
        for result in pushed:
            click.echo(f"{result['action']:10} {result['target']}@{result['digest']}")


def _asked(outcome: building.Outcome, places: list[Target], engine: Engine, there: drift.Reader | None, *,
           all_of_them: bool) -> Iterator[tuple[drift.Reader, str]]:
    """Who is to be asked for the guards' reports: the engine, or the first registry for what only that has.

    :param all_of_them: also images that a registry had before; the run that published them has told their drift.
    """
    for built in outcome.images:
        key = built.image.tags[1]
        if there is None or built.state not in ("published", "pushed"):
            yield engine, key
        elif built.state == "pushed" or all_of_them:
            yield there, str(places[0].place(parse(key)).at(built.digest))


def _finish(placed: Sequence[Placed], *, reader: drift.Reader | None, attach: Finish | None,
            stack_name: str) -> Sequence[dict[str, Any]]:
    """What has to be so before a version tag names an image: no drift, where `reader` is to ask, and what belongs to it
    attached.
    """
    if reader is not None:
        drift.refuse(*drift.of((reader, str(one.target.at(one.digest))) for one in placed if one.foreign), stack_name)
    return attach(placed) if attach else []


def _refuse_hidden_login(place: Target, builder: Builder) -> None:
    """A builder that pushes by itself gets its login from buildx, which reads the docker configuration only.

    :raises UsageError: the login is in our own variables.
    """
    if os.environ.get(credentials.ENV_HOST) == place.registry:
        raise UsageError(Problem(
            f"builder {builder.name} pushes by itself and cannot see this login", credentials.ENV_HOST,
            place.registry, "a login in the docker configuration", f"`docker login {place.registry}`, and without "
            f"{credentials.ENV_HOST}"))


def _say(text: str) -> None:
    click.echo(text, err=True)


def _tell(outcome: building.Outcome) -> None:
    for built in outcome.images:
        count = size(built.size) if built.size else ""
        click.echo(f"{built.state:10} {built.image.tags[0]:40} {count:>9}  {built.digest[:19]}  "
                   f"key {built.image.key.value[:16]}")
    for stage, there in outcome.resumed.items():
        _say(f"went on from {stage}: {there}")
    if outcome.baked is not None:
        _say(f"whole log: {outcome.log}")
    else:
        _say("nothing to build: every image is there under its content key")
