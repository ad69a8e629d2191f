"""`buildctl check`."""

from __future__ import annotations

from pathlib import Path

import click

from buildctl import compat, project, stack
from buildctl import lock as locks
from buildctl.cli import emit
from buildctl.commands._options import json_option
from buildctl.errors import BuildctlError, CompatibilityError, ManifestError, Problem


@click.command()
@click.argument("stack_names", metavar="[STACK]...", nargs=-1)
@click.option("--rules", "show_rules", is_flag=True, help="Show the compatibility rules instead, with their reasons.")
@json_option
@click.pass_obj
def command(root: Path, stack_names: tuple[str, ...], show_rules: bool, as_json: bool) -> None:
    """Check STACK... (default: all): manifest, lock, compatibility rules. Needs no engine and no network."""
    if show_rules:
        _show_rules(as_json)
        return
    found = project.find(root)
    errors: list[BuildctlError] = []
    rows = []
    for name in stack_names or stack.names(found):
        try:
            loaded = stack.load(found, name)
            lock = locks.load(loaded, found)
            report = compat.check(loaded, lock)
            rows.append({"stack": name, "errors": _dicts(report.errors), "warnings": _dicts(report.warnings),
                         "accepted": _dicts(report.accepted), "unlocked": list(lock.open_ends)})
            report.raise_errors()
        except BuildctlError as error:
            errors.append(error)
            continue
        if not as_json:
            _tell(name, report, lock)
    _raise_all(errors)
    if as_json:
        emit({"stacks": rows})


def _tell(name: str, report: compat.Report, lock: locks.Lock) -> None:
    counts = [f"{len(found)} {word}" for word, found in (("warnings", report.warnings), ("accepted", report.accepted))
              if found]
    click.echo(f"{name}: {len(lock.wheels)} packages fit{', ' + ', '.join(counts) if counts else ''}")
    for word, problems in (("warning", report.warnings), ("accepted", report.accepted)):
        for problem in problems:
            click.echo(f"  {word}: {problem}".replace("\n", "\n  "))
    for text in lock.open_ends:
        click.echo(f"  unlocked: {text}")


def _raise_all(errors: list[BuildctlError]) -> None:
    """One error for all stacks; a manifest that cannot be read matters more than versions."""
    if errors:
        kind = ManifestError if any(isinstance(error, ManifestError) for error in errors) else CompatibilityError
        raise kind(problem for error in errors for problem in error.problems)


def _dicts(problems: tuple[Problem, ...]) -> list[dict[str, str]]:
    return [problem.as_dict() for problem in problems]


def _show_rules(as_json: bool) -> None:
    if as_json:
        emit({"rules": [{"id": rule.id, "level": rule.level, "reason": rule.reason, "source": rule.source,
                         "advice": rule.advice.replace("{{", "{").replace("}}", "}")} for rule in compat.RULES]})
        return
    for rule in compat.RULES:
        click.echo(f"{rule.id} ({rule.level})\n  {rule.reason}\n  source: {rule.source}")
