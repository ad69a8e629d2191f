"""What is wrong around patches though each of them is right: series that fit no target, and edits by shell commands."""

from __future__ import annotations

import re
from collections.abc import Sequence

from buildctl.errors import Problem
from buildctl.patches import Series

#: a command that changes source text and exits 0 when it found nothing, or takes what does not fit exactly
_EDIT = re.compile(
    r"(?:^|[;&|(\s])(sed\s+(?:-\S+\s+)*-\S*i|perl\s+(?:-\S+\s+)*-\S*i|patch\s+[-<]|git\s+apply)", re.MULTILINE
)
#: a command that looks at the result
_LOOK = re.compile(r"\b(?:grep|cmp|diff|sha256sum|apply_series\.py)\b")


def untargeted(series: Series, targets: Sequence[str], where: str) -> list[Problem]:
    """The patches that are for none of a stack's targets."""
    return [
        Problem(
            "the patch is for none of the stack's targets",
            f"{where}: {patch.name}",
            found=", ".join(patch.header.targets),
            expected=", ".join(targets),
            todo="use the series of that target, or widen the patch's Targets if it does nothing wrong there",
        )
        for patch in series.patches
        if not {"all", *targets}.intersection(patch.header.targets)
    ]


def shell_edits(dockerfile: str, where: str) -> list[Problem]:
    """The instructions that edit text in place by shell and do not look at the result afterwards."""
    found = []
    for number, instruction in _instructions(dockerfile):
        edit = _EDIT.search(instruction)
        if edit and not _LOOK.search(instruction, edit.end()):
            found.append(
                Problem(
                    "text is edited by a command that says success when it changes nothing",
                    f"{where}:{number}",
                    found=edit[1],
                    expected="a patch of a series, which is exact and checked before the build",
                    todo="`buildctl patch new`, or look at the result in the same instruction (grep -q)",
                )
            )
    return found


def _instructions(dockerfile: str) -> list[tuple[int, str]]:
    """RUN instructions with the number of their first line; continued lines joined, comments left out."""
    found: list[tuple[int, str]] = []
    open_ = False
    for number, line in enumerate(dockerfile.split("\n"), 1):
        if line.lstrip().startswith("#"):
            continue
        if open_:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line.rstrip(chr(92))}")
        elif re.match(r"RUN\s", line, re.IGNORECASE):
            found.append((number, line.rstrip("\\")[3:]))
        else:
            continue
        open_ = line.endswith("\\")
    return found
