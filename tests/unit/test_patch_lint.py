"""Patches that no target uses, and edits by shell that nobody checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import patch_lint, patches
from tests.patched import lab

TEXT = lab.patch(lab.diff("demo/a.py", "x = 1\n", "x = 2  # MARK\n"), files="demo/a.py")


@pytest.mark.parametrize(("targets", "stack", "fits"), [
    ("sm120, sm121", ["sm120"], True), ("sm120", ["sm121", "sm120"], True), ("all", ["cpu"], True),
    ("cpu", ["sm120"], False), ("sm121", ["sm120"], False),
])
def test_a_patch_must_be_for_a_target_of_the_stack(tmp_path: Path, targets: str, stack: list[str], fits: bool) -> None:
    series = patches.read_series(lab.series(tmp_path / "demo" / "1.0", {
        "a.patch": TEXT.replace("Targets: sm120", f"Targets: {targets}")}))

    found = patch_lint.untargeted(series, stack, "patches/demo/1.0")

    assert (not found) == fits
    assert all(problem.where == "patches/demo/1.0: a.patch" for problem in found)


@pytest.mark.parametrize("command", [
    "sed -i 's/90/120/' a.py", "sed -E -i.bak s/a/b/ a.py", "cd /x && sed -ri s/a/b/ a.py", "perl -pi -e s/a/b/ a.py",
    "patch -p1 < /x.patch", "patch < /x.patch", "set -e; git apply /x.patch",
])
def test_an_edit_by_shell_is_warned_about(command: str) -> None:
    text = f"FROM base\n# sed -i in a remark\nRUN true && \\\n    {command}\nRUN grep x y\n"

    found = patch_lint.shell_edits(text, "Dockerfile")

    assert [problem.where for problem in found] == ["Dockerfile:3"]


@pytest.mark.parametrize("command", [
    "sed -i s/a/b/ a.py && grep -q b a.py", "sed -n p a.py", "sed s/a/b/ a.py > b.py", "apt-get install patch sed",
    "python apply_series.py --package x", "echo dispatch -i",
])
def test_what_looks_at_its_result_or_edits_nothing_is_not(command: str) -> None:
    assert not patch_lint.shell_edits(f"FROM base\nRUN {command}\n", "Dockerfile")


def test_our_own_images_edit_nothing_by_shell() -> None:
    for file in sorted((Path(__file__).parents[2] / "images").glob("*/Dockerfile")):
        assert not patch_lint.shell_edits(file.read_text(), file.name)
