"""Compatibility: do the versions, targets and flags of a stack fit together? Rules are data, the engine is small.

`check` is pure: it reads a stack and its lock and nothing else, so that `plan` needs no network.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.utils import canonicalize_name

from buildctl.compat.kinds import KINDS
from buildctl.compat.rules import RULES, Finding, Rule, driver_floors
from buildctl.compat.view import View
from buildctl.errors import CompatibilityError, ManifestError, Problem
from buildctl.lock import Lock
from buildctl.manifest import Problems, suggest
from buildctl.stack import Accepted, Stack

__all__ = ["RULES", "Report", "Rule", "check", "driver_floor"]


@dataclass(frozen=True, slots=True)
class Report:
    """What the rules say. `accepted` holds findings that the stack lives with, each with its reason."""

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    accepted: tuple[Problem, ...]

    def raise_errors(self) -> None:
        """Raise all errors together.

        :raises CompatibilityError: there are some.
        """
        if self.errors:
            raise CompatibilityError(self.errors)


def check(stack: Stack, lock: Lock) -> Report:
    """Hold a stack and its lock against every rule.

    :raises ManifestError: the stack accepts findings of a rule that does not exist.
    """
    _check_accepted(stack)
    view = View.of(stack, lock)
    errors: list[Problem] = []
    warnings: list[Problem] = []
    accepted: list[Problem] = []
    used: set[Accepted] = set()
    for rule in RULES:
        for finding in KINDS[rule.kind](rule, view):
            reason = _accepted(stack, rule, finding)
            problem = _problem(rule, finding, view, reason.reason if reason else "")
            if reason is not None:
                used.add(reason)
                accepted.append(problem)
            else:
                (errors if (finding.level or rule.level) == "error" else warnings).append(problem)
    for idle in (entry for entry in stack.accept if entry not in used):
        warnings.append(Problem(f"rule '{idle.rule}' finds nothing here to accept", idle.place,
                                found=f"accept: {idle.rule} of {idle.subject}" if idle.subject else idle.rule,
                                todo="take the entry out"))
    return Report(tuple(errors), tuple(warnings), tuple(accepted))


def driver_floor(stack: Stack) -> str | None:
    """The lowest driver branch for a stack's CUDA, for image.json; None without CUDA."""
    return driver_floors().get(stack.cuda.version.partition(".")[0]) if stack.cuda else None


def _accepted(stack: Stack, rule: Rule, finding: Finding) -> Accepted | None:
    return next((entry for entry in stack.accept if entry.rule == rule.id
                 and entry.subject in ("", canonicalize_name(finding.subject))), None)


def _check_accepted(stack: Stack) -> None:
    problems = Problems()
    ids = [rule.id for rule in RULES]
    for entry in stack.accept:
        if entry.rule not in ids:
            problems.add(f"there is no rule '{entry.rule}'", entry.place, todo=suggest(entry.rule, ids))
    problems.raise_any(ManifestError)


def _problem(rule: Rule, finding: Finding, view: View, accepted: str) -> Problem:
    why = f"{rule.reason} [{rule.source}]"
    return Problem(f"{finding.what} (rule {rule.id})", finding.where or view.stack.place, found=finding.found,
                   expected=f"{finding.expected}; {why}" if finding.expected else why,
                   todo=f"accepted: {accepted}" if accepted else rule.advice.format_map(view.words))
