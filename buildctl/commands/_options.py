"""Options that several commands share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from buildctl import compat, compose, host, project, source, stack
from buildctl import lock as locks
from buildctl.provenance import Origin, public

DEFAULT_STACK = "sglang-0.5.23-cu130"
F = TypeVar("F", bound=Callable[..., Any])
#: where buildctl keeps what can be made again
cache_dir = source.default_cache


def stack_option(command: F) -> F:
    """`--stack`."""
    return click.option("--stack", "stack_name", default=DEFAULT_STACK, show_default=True, metavar="NAME",
                        help="Stack to work on: images/stacks/NAME.yaml.")(command)


def json_option(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; messages go to stderr.")(
        command)


def retry_options(command: F) -> F:
    """`--attempts` and `--wait`: how patient a command is with a registry."""
    attempts = click.option("--attempts", type=click.IntRange(1), default=6, show_default=True,
                            help="Attempts in all for faults that may pass.")
    wait = click.option("--wait", type=click.FloatRange(0), default=1.0, show_default=True, metavar="SECONDS",
                        help="First wait between attempts, doubled each time; Retry-After is obeyed.")
    return attempts(wait(command))


def wheelhouse_option(command: F) -> F:
    """`--wheelhouse`, repeatable; the host's own find-links settings count as well."""
    return click.option("--wheelhouse", "wheelhouses", multiple=True, metavar="DIR",
                        type=click.Path(exists=True, file_okay=False, path_type=Path),
                        help="Folder with wheels that builds may take instead of an index; repeatable. "
                             "pip's and uv's find-links settings of this host count too.")(command)


def revision(root: Path) -> str:
    """The commit of the checkout, `-dirty` when files differ from it; empty outside git."""
    try:
        done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40",
                               "--exclude=*"],
                              capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def origin(root: Path) -> Origin:
    """The checkout as provenance names it: its commit, and its remote without credentials."""
    try:
        done = subprocess.run(["git", "-C", str(root), "remote", "get-url", "origin"], capture_output=True, text=True,
                              check=False, stdin=subprocess.DEVNULL)
    except OSError:
        return Origin()
    return Origin(revision(root), public(done.stdout.strip()) if done.returncode == 0 else "")


def composed(root: Path, stack_name: str, wheelhouses: tuple[Path, ...],
             lend: host.Host | None = None) -> tuple[project.Project, compose.Composition]:
    """Read, check and compose a stack: what plan, render and build begin with."""
    found = project.find(root)
    loaded = stack.load(found, stack_name)
    locked = locks.load(loaded, found)
    judge(loaded, locked)
    lent = lend or host.read(wheelhouses)
    return found, compose.compose(found, loaded, locked, lent, revision(found.root))


def judge(loaded: stack.Stack, locked: locks.Lock) -> compat.Report:
    """Hold a stack against the compatibility rules; warnings go to stderr.

    :raises CompatibilityError: with everything that does not fit.
    """
    report = compat.check(loaded, locked)
    for problem in report.warnings:
        click.echo(f"warning: {problem}", err=True)
    report.raise_errors()
    return report
