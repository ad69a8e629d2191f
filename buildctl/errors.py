"""Everything that can go wrong, one class per exit code.

A problem has three parts: what is wrong and where, what was found against what was expected, what to do next. All
problems of one kind are collected and raised together, so that a user repairs a manifest once and not line by line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    `where` is `file:line`, a build step, a registry reference or the like; empty when there is no place to point at.
    """

    what: str
    where: str = ""
    found: str = ""
    expected: str = ""
    todo: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.found:
            lines.append(f"  found:    {self.found}")
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.todo:
            lines.append(f"  do:       {self.todo}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str]:
        """The problem for `--json`, without empty parts."""
        parts = {"what": self.what, "where": self.where, "found": self.found, "expected": self.expected,
                 "todo": self.todo}
        return {key: value for key, value in parts.items() if value}


class BuildctlError(Exception):
    """Base of all errors that a user is meant to read; carries one or more problems and the exit code."""

    exit_code = 1
    kind = "error"
    #: whether running the same command again can help, for CI
    retry = "no"

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def as_dict(self) -> dict[str, object]:
        """The error for `--json`."""
        return {"kind": self.kind, "exit_code": self.exit_code, "retry": self.retry,
                "problems": [problem.as_dict() for problem in self.problems]}


class UsageError(BuildctlError):
    """A command was called with words that do not fit together."""

    exit_code, kind = 2, "usage"


class ManifestError(BuildctlError):
    """A stack, image or lock file is invalid, or a lock is stale or missing."""

    exit_code, kind = 3, "manifest"


class CompatibilityError(BuildctlError):
    """The versions of a stack do not fit together."""

    exit_code, kind = 4, "compatibility"


class PatchError(BuildctlError):
    """A patch does not apply exactly, or the patched tree is not the one that the lock names."""

    exit_code, kind = 5, "patch"


class BuildError(BuildctlError):
    """A build step failed."""

    exit_code, kind = 6, "build"


class AuditError(BuildctlError):
    """The built image is not what the plan says."""

    exit_code, kind = 7, "audit"


class ResourceError(BuildctlError):
    """Not enough disk or memory."""

    exit_code, kind, retry = 8, "resources", "after cleaning"


class EngineError(BuildctlError):
    """The Docker engine is not reachable or too old."""

    exit_code, kind, retry = 9, "engine", "maybe"


class AuthError(BuildctlError):
    """The registry refuses the credentials or the right to push."""

    exit_code, kind = 10, "auth"


class NetworkError(BuildctlError):
    """A registry, index or the network failed, retries included."""

    exit_code, kind, retry = 11, "network", "yes"


class TagExistsError(BuildctlError):
    """An immutable tag exists with other content."""

    exit_code, kind = 12, "tag exists"


class Interrupted(BuildctlError):
    """Interrupted by the user, after clean-up."""

    exit_code, kind = 130, "interrupted"
