"""What people report of patching inside a Dockerfile, row by row: the input as reported, and what is said here instead.

The rows are those of kind 3 in the project's collection of reports: hunks that fail after a long build, patches that
say success and change nothing, fuzz into the wrong function, damaged files.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from buildctl import cli, patches
from buildctl.errors import PatchError, Problem
from tests.patched import lab

GATE = "sglang/srt/gate.py"
HEAD = "import os\n\n\ndef ninety():\n    size = 8\n    fraction = 0.9\n    return size\n"
TAIL = "\n\ndef other():\n    first = 1\n    second = 2\n    return first + second\n"
OLD = HEAD + "\n\n# between\n# the two\n# functions\n" + TAIL
NEW = OLD.replace("size = 8", "size = 16  # MARK").replace("second = 2", "second = 22")
TWO_HUNKS = lab.patch(lab.diff(GATE, OLD, NEW), files=GATE)


def series(root: Path, **named: str | bytes) -> patches.Series:
    folder = lab.series(root / "sglang" / "1.0", {f"{name}.patch": text for name, text in named.items()})
    return patches.read_series(folder)


def refusal(root: Path, tree: dict[str, str], **named: str | bytes) -> tuple[Problem, ...]:
    """What is said about patches on a tree; the tree is looked at afterwards, byte for byte."""
    contents = {path: text.encode() for path, text in tree.items()}
    before = dict(contents)
    with pytest.raises(PatchError) as caught:
        patches.apply_series(series(root, **named), contents)
    assert contents == before
    assert not [path for path in root.rglob("*") if path.suffix in (".rej", ".orig")]
    return caught.value.problems


# --- K3-1: the source moves under the patch


def test_k3_1_a_hunk_that_fails_on_the_newer_commit_is_named_before_any_build(tmp_path: Path) -> None:
    newer = OLD.replace("first = 1", "first = one()")

    found = refusal(tmp_path, {GATE: newer}, a=TWO_HUNKS)

    assert [problem.where for problem in found] == [f"a.patch: {GATE}: hunk #2"]
    assert found[0].found.endswith("'    first = one()'")


def test_k3_1_an_offset_is_taken_and_said(tmp_path: Path) -> None:
    applied = patches.apply_series(series(tmp_path, a=TWO_HUNKS), {GATE: ("# licence\n" + OLD).encode()})

    assert [(place.hunk, place.offset) for place in applied.offsets] == [(1, 1), (2, 1)]


def test_k3_1_a_patch_by_url_is_refused(tmp_path: Path) -> None:
    folder = lab.series(tmp_path / "sglang" / "1.0", {}, names="https://github.com/a/b/pull/1.diff\n")

    with pytest.raises(PatchError, match="a patch by URL"):
        patches.read_series(folder)


# --- K3-2: a patch has a life span


def test_k3_2_a_tree_that_has_the_change_already_keeps_it_and_the_patch_is_an_error(tmp_path: Path) -> None:
    found = refusal(tmp_path, {GATE: NEW}, a=TWO_HUNKS)

    assert all("upstream already" in problem.todo for problem in found)


def test_k3_2_a_context_line_that_changed_is_shown(tmp_path: Path) -> None:
    found = refusal(tmp_path, {GATE: OLD.replace("0.9\n", "0.92\n")}, a=TWO_HUNKS)

    assert (found[0].found, found[0].expected) == ("line 6: '    fraction = 0.92'", "'    fraction = 0.9'")


# --- K3-3: an edit that matches nothing says success


@pytest.mark.parametrize(("matches", "said"), [(0, "does not fit"), (1, ""), (2, "several places")])
def test_k3_3_exactly_one_match_is_success(tmp_path: Path, matches: int, said: str) -> None:
    block = "def gate():\n    return 90\n# end\n"
    hunk = (f"--- a/{GATE}\n+++ b/{GATE}\n@@ -2,3 +2,3 @@\n"
            " def gate():\n-    return 90\n+    return 120  # MARK\n # end\n")
    tree = {GATE: "# a\n# b\n# c\n" + block * matches + "# z\n"}

    if said:
        assert said in refusal(tmp_path, tree, a=lab.patch(hunk, files=GATE))[0].what
    else:
        one = series(tmp_path, a=lab.patch(hunk, files=GATE))
        assert b"return 120" in patches.apply_series(one, {GATE: tree[GATE].encode()}).files[GATE]


# --- K3-4: half applied, or waiting for an answer


def test_k3_4_one_rejected_hunk_of_three_files_leaves_the_two_good_ones_unchanged(tmp_path: Path) -> None:
    names = ["sglang/a.py", "sglang/b.py", "sglang/c.py"]
    text = "".join(lab.diff(name, "x = 1\ny = 1\n", "x = 2  # MARK\ny = 1\n") for name in names)
    tree = dict.fromkeys(names, "x = 1\ny = 1\n") | {"sglang/b.py": "x = 3\ny = 1\n"}

    found = refusal(tmp_path, tree, a=lab.patch(text, files=", ".join(names)))

    assert [problem.where for problem in found] == ["a.patch: sglang/b.py: hunk #1"]


def test_k3_4_a_missing_file_is_said_at_once_though_a_terminal_is_there_to_ask(tmp_path: Path) -> None:
    lab.series(tmp_path / "sglang" / "1.0", {"a.patch": TWO_HUNKS})
    wheel = lab.wheel(tmp_path / "w", {"sglang/__init__.py": ""}, name="sglang")
    words = ["patch", "check", "--series", str(tmp_path / "sglang/1.0"), "--wheel", str(wheel)]
    ours, theirs = pty.openpty()
    start = time.monotonic()

    code = subprocess.run([sys.executable, "-m", "buildctl", *words], stdin=theirs, stdout=theirs, stderr=theirs,
                          env={**os.environ, "BUILDCTL_CACHE_DIR": str(tmp_path)}, check=False, timeout=5).returncode
    os.close(theirs)
    said = os.read(ours, 1 << 16)
    os.close(ours)

    assert code == 5
    assert f"a.patch: {GATE}: the file to patch is not there".encode() in said
    assert time.monotonic() - start < 5


# --- K3-5: shell habits


def test_k3_5_a_bad_patch_before_a_good_one_fails_the_whole(tmp_path: Path) -> None:
    good = lab.patch(lab.diff("sglang/b.py", "x = 1\n", "x = 2  # MARK\n"), files="sglang/b.py")

    found = refusal(tmp_path, {GATE: OLD.replace("size", "bytes"), "sglang/b.py": "x = 1\n"}, a=TWO_HUNKS, b=good)

    assert {problem.where.split(":")[0] for problem in found} == {"a.patch"}


def test_k3_5_the_hunk_for_one_function_does_not_land_in_its_look_alike(tmp_path: Path) -> None:
    body = "    size = 8\n    extra = 0\n    return size\n"
    both = f"def ninety():\n{body}\n\ndef hundred():\n{body}"
    patch = lab.patch(lab.diff(GATE, both, both.replace("size = 8", "size = 16  # MARK", 1)), files=GATE)

    found = refusal(tmp_path, {GATE: f"def hundred():\n{body}\n\ndef other():\n    pass\n"}, a=patch)

    assert found[0].where == f"a.patch: {GATE}: hunk #1"


def test_k3_5_two_patches_for_the_same_lines_are_said(tmp_path: Path) -> None:
    rival = lab.patch(lab.diff(GATE, OLD, OLD.replace("size = 8", "size = 32  # MARK")), files=GATE)

    assert refusal(tmp_path, {GATE: OLD}, a=TWO_HUNKS, b=rival)[0].where.startswith("b.patch")


def test_k3_5_two_patches_of_one_name_are_refused(tmp_path: Path) -> None:
    folder = lab.series(tmp_path / "sglang" / "1.0", {"a.patch": TWO_HUNKS}, names="a.patch\na.patch\n")

    with pytest.raises(PatchError, match="twice"):
        patches.read_series(folder)


# --- K3-6: damaged patch files, and the same verdict whatever tools the host has


def test_k3_6_each_damage_has_its_own_message_and_no_tool_of_the_host_is_asked(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = TWO_HUNKS.splitlines(keepends=True)
    damaged = {"crlf": TWO_HUNKS.replace("\n", "\r\n"), "cut": "".join(lines[:-1]), "empty": "",
               "counts": TWO_HUNKS.replace("@@ -2,7 +2,7", "@@ -2,6 +2,7")}
    assert all(text != TWO_HUNKS for text in damaged.values())
    said = {}
    for name, text in damaged.items():
        folder = lab.series(tmp_path / name / "sglang" / "1.0", {"a.patch": text.encode()})
        assert cli.run(["patch", "check", "--series", str(folder)]) == 5
        said[name] = capsys.readouterr().err

    assert "CRLF" in said["crlf"]
    assert "hunk #2" in said["cut"]
    assert "cut off, or its counts are wrong" in said["cut"]
    assert "is empty" in said["empty"]
    assert "hunk #1" in said["counts"]


def test_k3_6_a_crlf_source_is_told_from_a_crlf_patch(tmp_path: Path) -> None:
    assert "the source has CRLF line ends" in refusal(tmp_path, {GATE: OLD.replace("\n", "\r\n")}, a=TWO_HUNKS)[0].todo
