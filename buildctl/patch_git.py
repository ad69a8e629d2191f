"""git as a diff and merge tool for single files; it never sees a repository. Only writing patches needs it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from buildctl.errors import Problem, UsageError

#: the user's git configuration must not change what a diff looks like
_CLEAN = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_DIR": os.devnull, "LC_ALL": "C"}


@dataclass(frozen=True, slots=True)
class Merged:
    """A three-way merge: the text, with conflict marks where there are `conflicts`."""

    content: bytes
    conflicts: int


def diff(old: bytes | None, new: bytes, path: str) -> bytes:
    """The part of a patch that turns `old` (`None`: a new file) into `new`, with paths `a/PATH` and `b/PATH`."""
    suffix = Path(path).suffix
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "attributes").write_text("*.py diff=python\n*.cuh diff=cpp\n*.cu diff=cpp\n")
        for name, content in (("old", old or b""), ("new", new)):
            (home / f"{name}{suffix}").write_bytes(content)
        text = _git(
            [
                "-c",
                f"core.attributesFile={home / 'attributes'}",
                "diff",
                "--no-index",
                "--no-color",
                "--no-ext-diff",
                "--text",
                "--diff-algorithm=histogram",
                "--unified=3",
                f"old{suffix}",
                f"new{suffix}",
            ],
            home,
            1,
        )
    start = text.find(b"\n@@ ") + 1
    if not start:
        return b""
    before = b"/dev/null" if old is None else b"a/" + path.encode()
    return b"--- " + before + b"\n+++ b/" + path.encode() + b"\n" + text[start:]


def merge(base: bytes, ours: bytes, theirs: bytes, labels: tuple[str, str, str]) -> Merged:
    """Three-way merge; `labels` name base, ours and theirs in conflict marks."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name, content in (("base", base), ("ours", ours), ("theirs", theirs)):
            (home / name).write_bytes(content)
        names = [word for label in (labels[1], labels[0], labels[2]) for word in ("-L", label)]
        text = _git(["merge-file", "-p", "--diff3", *names, "ours", "base", "theirs"], home, 127)
    return Merged(text, text.count(b"\n<<<<<<< ") + text.startswith(b"<<<<<<< "))


def _git(words: list[str], folder: Path, worst: int) -> bytes:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, env={**os.environ, **_CLEAN}, capture_output=True, check=False
        )
    except OSError as error:
        raise UsageError(
            Problem(
                "git is needed to write patches", found=str(error), todo="install git; checking and applying do without"
            )
        ) from None
    if not 0 <= done.returncode <= worst:
        raise UsageError(Problem(f"git {words[0]} failed", found=done.stderr.decode(errors="replace").strip()))
    return done.stdout
