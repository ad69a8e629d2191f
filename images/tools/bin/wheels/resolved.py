"""Packages that the lock does not hold, and what they require, as resolved in a build with --allow-unlocked.

    resolved.py plan FOLDER PYLOCK TARGET     locked packages that are needed early, as lists for uv, one per index
    resolved.py record FOLDER PYLOCK RECORD   what was installed for them, into the image

FOLDER/locked has the whole lock, one list per index. Standard library only (tomllib: Python 3.11).
"""

import re
import sys
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any


def name_of(text: str) -> str:
    """A distribution's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", text).lower()


def chosen(pylock: str) -> dict[str, dict[str, Any]]:
    """The packages of a pylock.toml."""
    return {name_of(package["name"]): package for package in tomllib.loads(pylock).get("packages", ())}


def early(packages: dict[str, dict[str, Any]], lists: dict[str, str], installed: set[str]) -> dict[str, str]:
    """The part of the lock's lists that these packages need and that is not installed yet."""
    found = {}
    for index, text in lists.items():
        heads = [line for line in text.splitlines() if line.startswith("--")]
        lines = [line for line in text.splitlines() if "==" in line and not line.startswith("--")
                 and name_of(line.split("==")[0]) in packages.keys() - installed]
        if lines:
            found[index] = "".join(f"{line}\n" for line in (*heads, *lines))
    return found


def tags_of(wheel: str) -> set[str]:
    """The tags of a wheel's file name, one by one."""
    python, abi, platform = wheel.removesuffix(".whl").split("-")[-3:]
    return {f"{one}-{two}-{three}" for one in python.split(".") for two in abi.split(".")
            for three in platform.split(".")}


def hashes(package: dict[str, Any], distribution: Distribution) -> list[str]:
    """The sha256 of the file that was installed; of all that it can have been, where its tags do not tell."""
    text = distribution.read_text("WHEEL") or ""
    tags = {line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Tag:")}
    files = {str(wheel.get("name") or wheel.get("url") or wheel.get("path")).rsplit("/", 1)[-1].replace("%2B", "+"):
             str(wheel["hashes"]["sha256"]) for wheel in package.get("wheels", ())}
    exact = [sha for file, sha in files.items() if tags_of(file) == tags]
    return exact or sorted(files.values())


def main() -> int:
    """Plan or record."""
    what, folder, pylock, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    packages = chosen(pylock.read_text())
    lists = {path.name: path.read_text() for path in sorted((folder / "locked").glob("*.txt"))}
    there = {name_of(found.metadata["Name"]): found for found in distributions()}
    if what == "plan":
        target.mkdir(parents=True, exist_ok=True)
        for name, text in early(packages, lists, set(there)).items():
            (target / name).write_text(text)
        return 0
    locked = {name_of(line.split("==")[0]) for text in lists.values() for line in text.splitlines()
              if "==" in line and not line.startswith("--")}
    known = target.read_text().splitlines() if target.is_file() else []
    have = {name_of(line.split("==")[0]) for line in known}
    lines = [f"{name}=={there[name].version}  # " +
             ("of the lock, early" if name in locked else f"sha256:{' sha256:'.join(hashes(package, there[name]))}")
             for name, package in sorted(packages.items()) if name not in have]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(f"{line}\n" for line in (*known, *lines)))
    print(f"unlocked: {len(lines)} packages resolved in this build:", *lines, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
