"""Where the images, stacks, patches and the entrypoint of a checkout lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from buildctl.errors import Problem, UsageError

#: what users may call things: safe in a shell, a path, a Dockerfile and an image reference
NAME = r"[a-z0-9]+(?:[._-][a-z0-9]+)*"
NAME_HELP = "lower-case letters, digits and single '.', '_' or '-' between them"


@dataclass(frozen=True, slots=True)
class Project:
    """A checkout: the folder that holds `images/`."""

    root: Path

    @property
    def images(self) -> Path:
        """`images/`."""
        return self.root / "images"

    @property
    def stacks(self) -> Path:
        """`images/stacks/`."""
        return self.root / "images" / "stacks"

    @property
    def patches(self) -> Path:
        """`patches/`."""
        return self.root / "patches"

    @property
    def entrypoints(self) -> Path:
        """`entrypoints/`."""
        return self.root / "entrypoints"

    @property
    def work(self) -> Path:
        """`.buildctl/`: everything that buildctl writes into a checkout."""
        return self.root / ".buildctl"

    def shown(self, path: Path) -> str:
        """A path as messages show it: relative to the checkout where possible."""
        try:
            return str(path.relative_to(self.root))
        except ValueError:
            return str(path)


def find(start: Path) -> Project:
    """The checkout that holds `start`.

    :raises UsageError: no folder from `start` upward holds `images/stacks`.
    """
    for folder in (start, *start.parents):
        if (folder / "images" / "stacks").is_dir():
            return Project(folder)
    raise UsageError(Problem("no project here", str(start), expected="a folder with images/stacks in it or above",
                             todo="change into a checkout, or name one with --project DIR"))
