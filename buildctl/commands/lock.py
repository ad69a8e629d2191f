"""`buildctl lock`."""

from __future__ import annotations

from pathlib import Path

import click

from buildctl import host, locking, project, stack
from buildctl import lock as locks
from buildctl.cli import emit
from buildctl.commands._options import DEFAULT_STACK, cache_dir, json_option, size, wheelhouse_option


@click.command()
@click.argument("stack_name", metavar="[STACK]", default=DEFAULT_STACK)
@click.option("--check", is_flag=True, help="Change nothing; fail when the lock is missing, edited or stale.")
@click.option("--upgrade", is_flag=True, help="Forget the versions of the present lock and resolve anew.")
@click.option("--base", "base_source", type=click.Choice(["auto", "registry", "bootstrap"]), default="auto",
              show_default=True, help="Where the base comes from; auto: a registry when it answers, else bootstrap.")
@wheelhouse_option
@json_option
@click.pass_obj
def command(root: Path, stack_name: str, check: bool, upgrade: bool, base_source: str,
            wheelhouses: tuple[Path, ...], as_json: bool) -> None:
    """Resolve STACK once, with hashes, into images/stacks/STACK.lock.

    Sections of the lock whose inputs did not change are kept as they are; a lock whose inputs did not change at all is
    rewritten byte for byte.
    """
    found = project.find(root)
    loaded = stack.load(found, stack_name)
    if check:
        lock = locks.load(loaded, found)
        changed: tuple[str, ...] = ()
    else:
        made = locking.make(loaded, found, host.read(wheelhouses), cache_dir(), upgrade=upgrade, base=base_source)
        lock, changed = made.lock, made.sections
        locking.write(made, locks.path_of(loaded))
    shares = {layer.name: lock.share(layer.name) for layer in loaded.layers}
    shown = found.shown(locks.path_of(loaded))
    if as_json:
        emit({"stack": stack_name, "lock": shown, "changed": list(changed),
              "layers": {name: {"wheels": len(share), "bytes": sum(wheel.size or 0 for wheel in share)}
                         for name, share in shares.items()}})
        return
    for name, share in shares.items():
        click.echo(f"{name:12} {len(share):4} wheels {size(sum(wheel.size or 0 for wheel in share)):>9}")
    state = "is current" if check or not changed else f"written; new: {', '.join(changed)}"
    click.echo(f"{shown} {state}")
