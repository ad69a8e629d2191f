"""`buildctl lock`."""

from __future__ import annotations

from pathlib import Path

import click

from buildctl import host, lockdiff, locking, project, stack
from buildctl import lock as locks
from buildctl.cli import emit
from buildctl.commands._options import DEFAULT_STACK, cache_dir, json_option, judge, wheelhouse_option
from buildctl.errors import Problem, UsageError
from buildctl.lock import Lock
from buildctl.locking import Wish
from buildctl.project import Project
from buildctl.units import size


@click.command()
@click.argument("words", metavar="[STACK]", nargs=-1)
@click.option("--check", is_flag=True, help="Change nothing; fail when the lock is missing, edited or stale.")
@click.option("--upgrade", multiple=True, metavar="PACKAGE",
              help="Choose this package's version anew; repeatable.")
@click.option("--upgrade-all", is_flag=True, help="Forget all versions of the present lock.")
@click.option("--upgrade-debian", is_flag=True, help="Take the Debian packages that the mirror has now.")
@click.option("--exclude-newer", metavar="AGE", default="",
              help="Leave out files younger than 7d, 12h, 2w, or uploaded after a date as 2026-11-30.")
@click.option("--diff", "compare", is_flag=True,
              help="Compare two locks instead: [A] [B], each a stack, a lock file or a git revision. One stack: its "
                   "last commit against the file. One revision: against the default stack's file.")
@click.option("--base", "base_source", type=click.Choice(["auto", "registry", "bootstrap"]), default="auto",
              show_default=True, help="Where the base comes from; auto: a registry when it answers, else bootstrap.")
@wheelhouse_option
@json_option
@click.pass_obj
def command(root: Path, words: tuple[str, ...], check: bool, upgrade: tuple[str, ...], upgrade_all: bool,
            upgrade_debian: bool, exclude_newer: str, compare: bool, base_source: str,
            wheelhouses: tuple[Path, ...], as_json: bool) -> None:
    """Resolve STACK once, with hashes, into images/stacks/STACK.lock.

    Sections of the lock whose inputs did not change are kept as they are; a lock whose inputs did not change at all is
    rewritten byte for byte. The compatibility rules are asked before anything is written, and nothing is written when
    something fails.
    """
    found = project.find(root)
    if compare:
        _compare(found, words, as_json)
        return
    if len(words) > 1:
        raise UsageError(Problem("one stack at a time", "command line", found=" ".join(words),
                                 todo="name one stack, or compare two with --diff"))
    wish = Wish(locking.names(upgrade), upgrade_all, locking.moment(exclude_newer), upgrade_debian)
    if check and wish.anew:
        raise UsageError(Problem("--check changes nothing", "command line", todo="leave out --upgrade, --upgrade-all, "
                                 "--upgrade-debian and --exclude-newer, or --check"))
    stack_name = words[0] if words else DEFAULT_STACK
    loaded = stack.load(found, stack_name)
    if check:
        lock = locks.load(loaded, found)
        changed: tuple[str, ...] = ()
    else:
        lent = host.read(wheelhouses)
        made = locking.make(loaded, found, lent, cache_dir(), wish=wish, base=base_source)
        lock, changed = made.lock, made.sections
        judge(loaded, lock)
        locking.write(made, locks.path_of(loaded))
        if lent.unused:
            click.echo(f"warning: not used, a lock depends on its stack alone: {', '.join(lent.unused)}", err=True)
    shares = {layer.name: lock.share(layer.name) for layer in loaded.layers}
    shown = found.shown(locks.path_of(loaded))
    if lock.open_ends:
        click.echo(f"warning: {shown} is not complete; out of reach when it was made:", err=True)
        for text in lock.open_ends:
            click.echo(f"  unlocked: {text}", err=True)
    if lock.base.source == "bootstrap" and "base" in changed and base_source == "auto" and loaded.base.image:
        click.echo(f"warning: the base is a bootstrap: the registry gave no digest of {loaded.base.image}; "
                   "`--base registry` says why, `--base bootstrap` wants it so", err=True)
    if lock.base.source == "bootstrap" and not lock.debian:
        click.echo(f"warning: {shown} has no versions of Debian packages: this machine has no apt-get or its apt knows "
                   "no Debian mirror; builds take what there is, and nothing can tell drift", err=True)
    if as_json:
        emit({"stack": stack_name, "lock": shown, "changed": list(changed), "unlocked": list(lock.open_ends),
              "debian": {place: len(packages) for place, packages in lock.debian.items()},
              "layers": {name: {"wheels": len(share), "bytes": sum(wheel.size or 0 for wheel in share)}
                         for name, share in shares.items()}})
        return
    for name, share in shares.items():
        debs = f", {len(lock.debian[name])} Debian packages" if name in lock.debian else ""
        click.echo(f"{name:12} {len(share):4} wheels {size(sum(wheel.size or 0 for wheel in share)):>9}{debs}")
    state = "is current" if check or not changed else f"written; new: {', '.join(changed)}"
    click.echo(f"{shown} {state}")


def _compare(found: Project, words: tuple[str, ...], as_json: bool) -> None:
    before, after = lockdiff.sides(words, stack.names(found), DEFAULT_STACK)
    difference = lockdiff.compare(_lock(found, before), _lock(found, after))
    if as_json:
        emit({"from": before.shown, "to": after.shown, **difference.as_dict()})
        return
    click.echo(f"{before.shown} -> {after.shown}")
    for line in difference.lines():
        click.echo(line)


def _lock(found: Project, side: lockdiff.Side) -> Lock:
    if side.file:
        return locks.read(Path(side.file), found)
    path = found.stacks / f"{side.stack}.lock"
    if not side.revision:
        return locks.read(path, found)
    return locks.parse(lockdiff.at_revision(found.root, side.revision, path), f"{side.revision}:{found.shown(path)}",
                       side.stack)
