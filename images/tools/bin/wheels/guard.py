"""Guard: the installed set is the lock's, no more and no less. Runs in the build right after a layer is installed.

Usage: guard.py EXPECT, a file with one `name==version` per line: everything that should be installed by now. What a
build with --allow-unlocked resolved by itself counts as well; it is in RECORD.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

RECORD = Path("/etc/buildctl/unlocked.txt")


def name_of(text: str) -> str:
    """A distribution's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", text).lower()


def main() -> int:
    """Compare, and say every difference at once."""
    lines = Path(sys.argv[1]).read_text().split()
    if RECORD.is_file():
        lines += [line.split()[0] for line in RECORD.read_text().splitlines() if line]
    expected = {name_of(name): version for name, version in (line.split("==") for line in lines)}
    installed: dict[str, str] = {}
    wrong = []
    for found in distributions():
        name = name_of(found.metadata["Name"])
        if name in installed and installed[name] != found.version:
            wrong.append(f"{name}: installed twice, {installed[name]} and {found.version}")
        installed[name] = found.version
    for name in sorted(expected.keys() | installed.keys()):
        have, want = installed.get(name, "nothing"), expected.get(name, "nothing")
        if have != want:
            wrong.append(f"{name}: found {have}, expected {want}")
    if wrong:
        print("guard: the installed packages are not those of the lock", *wrong, sep="\n  ", file=sys.stderr)
        print("  do: find the step that installed more than its share; nothing may resolve in a build", file=sys.stderr)
        return 1
    print(f"guard: {len(expected)} packages as locked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
