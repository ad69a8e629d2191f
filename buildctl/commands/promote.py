"""`buildctl promote`: give a tested digest other tags, here or elsewhere."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import click

from buildctl import results
from buildctl.cli import emit
from buildctl.commands._options import json_option, retry_options
from buildctl.engine import Engine
from buildctl.errors import Problem, UsageError
from buildctl.promote import Move, Promoter
from buildctl.reference import Reference, check_tag, parse
from buildctl.registry import Registry
from buildctl.results import Requirement
from buildctl.retry import Policy, Retry


@click.command("promote")
@click.argument("reference", metavar="REGISTRY/IMAGE:TAG")
@click.option("--to", "targets", multiple=True, required=True, metavar="TAG|REGISTRY/IMAGE:TAG",
              help="A tag of the same repository, or a full reference elsewhere; may be repeated.")
@click.option("--move", is_flag=True, help="The tags may point at something else today.")
@click.option("--require-verdict", "require", type=click.Choice(list(results.ACCEPTS)),
              help="Refuse without such a benchmark verdict; 'equivalent' takes a win too.")
@click.option("--result", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="A benchmark's results folder: attached to the digest, and what --require-verdict looks at. "
                   "Without it the newest result attached before counts.")
@click.option("--dry-run", is_flag=True, help="Say what would move where, and stop.")
@retry_options
@json_option
def command(reference: str, targets: tuple[str, ...], move: bool, require: str | None, folder: Path | None,
            dry_run: bool, attempts: int, wait: float, as_json: bool) -> None:
    """Copy an image by digest to other tags, repositories or registries. Never rebuilds.

    Needs no engine; one that answers is asked which registries it speaks plain HTTP to.
    """
    source = in_registry(reference)
    places = list(dict.fromkeys(target_of(source, target) for target in targets))
    result = results.read(folder) if folder else None
    with ExitStack() as stack:
        promoter = Promoter(Clients(stack, Policy(attempts, wait), "pull,push"))
        promotion = promoter.plan(source, places, move=move, require=cast("Requirement | None", require), result=result)
        if not dry_run:
            copied = promoter.carry_out(promotion)
    moves = promotion.moves
    if as_json:
        found: dict[str, object] = {"digest": promotion.manifest.digest, "moves": [one.as_dict() for one in moves]}
        if not dry_run:
            found["blobs"] = {"present": copied.present, "mounted": copied.mounted, "sent": copied.sent,
                              "sent_bytes": copied.sent_bytes}
        emit(found)
    else:
        click.echo("\n".join(f"would {_line(one)}" if dry_run else _line(one) for one in moves))


def in_registry(text: str) -> Reference:
    """A reference that names its registry and a tag or digest. Raises `UsageError`."""
    reference = parse(text)
    if not reference.registry or not (reference.tag or reference.digest):
        raise UsageError(Problem("the image must name its registry, and a tag or digest", text, "",
                                 "REGISTRY/IMAGE:TAG or REGISTRY/IMAGE@sha256:...", "write it in full"))
    return reference


def target_of(source: Reference, text: str) -> Reference:
    """A bare tag belongs to the source's repository. Raises `UsageError`."""
    if "/" not in text and ":" not in text:
        return source.tagged(check_tag(text))
    target = parse(text)
    if not target.registry or not target.tag or target.digest:
        raise UsageError(Problem("a target is a tag, or names registry, image and tag", text, "",
                                 "TAG or REGISTRY/IMAGE:TAG", "write it in full"))
    return target


class Clients:
    """One registry client per host, closed with the stack; waits are told on stderr.

    Plain HTTP is spoken where the engine would, if there is one.
    """

    def __init__(self, stack: ExitStack, policy: Policy, actions: str) -> None:
        self._stack, self._policy, self._actions = stack, policy, actions
        self._engine = stack.enter_context(closing(Engine(60)))
        self._known: dict[str, Registry] = {}

    def __call__(self, host: str) -> Registry:
        """The client for a host."""
        if host not in self._known:
            def announce(retry: Retry) -> None:
                click.echo(f"{host}: attempt {retry.attempt} of {retry.attempts} failed: {retry.fault.text}; "
                           f"next in {retry.seconds:.1f} s", err=True)

            self._known[host] = self._stack.enter_context(
                Registry(host, actions=self._actions, policy=self._policy, announce=announce,
                         plain_http=self._engine.insecure(host)))
        return self._known[host]


def _line(move: Move) -> str:
    now = f" (was {move.current})" if move.action == "move" else ""
    return f"{move.action}  {move.target}@{move.digest}{now}"
