"""A patch over releases: applies, moved, absorbed, broken; told apart by content."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import patch_matrix, patches
from buildctl.patch_matrix import APPLIES, FAILS, OFFSET, UPSTREAM, Cell
from buildctl.udiff import Reader
from tests.patched import lab

PATH = "sglang/srt/gate.py"
OLD = "import os\n\n\ndef gate(card):\n    return card in [9, 10]\n\n\ndef other():\n    return 1\n"
NEW = OLD.replace("[9, 10]\n", "[9, 10, 12]\n    # buildctl patch gate: MARK\n")
MOVED = "# licence\n" + OLD
ABSORBED = OLD.replace("[9, 10]", "[9, 10, 12]").replace("import os\n", "import os\nimport sys\n")
REWORDED = OLD.replace("[9, 10]", "{9, 10}")


def series(folder: Path, *, claim: str = "") -> patches.Series:
    text = lab.patch(lab.diff(PATH, OLD, NEW), files=PATH)
    if claim:
        text = text.replace("Forwarded: no", f"Applied-Upstream: {claim}")
    return patches.read_series(lab.series(folder / "sglang" / "1.0", {"0001-gate.patch": text}))


def reader(text: str | None) -> Reader:
    return ({PATH: text.encode()} if text is not None else {}).get


@pytest.mark.parametrize(("source", "state", "detail"), [
    (OLD, APPLIES, ""),
    (MOVED, OFFSET, "+1"),
    (ABSORBED, UPSTREAM, ""),
    (REWORDED, FAILS, f"{PATH}: hunk #1"),
    (None, FAILS, PATH),
], ids=["same", "moved", "absorbed", "reworded", "gone"])
def test_each_fate_has_its_name(tmp_path: Path, source: str | None, state: str, detail: str) -> None:
    one = series(tmp_path).patches[0]

    cell, files = patch_matrix.attempt(one, reader(OLD), reader(source))

    assert cell == Cell(state, detail)
    assert bool(files) == (state in (APPLIES, OFFSET))


def test_what_reads_as_after_the_patch_is_upstream_without_our_marker(tmp_path: Path) -> None:
    one = series(tmp_path).patches[0]

    upstream = NEW.replace("    # buildctl patch gate: MARK\n", "")
    assert patch_matrix.is_upstream(one.diff.files, reader(OLD), reader(upstream))


def test_lines_that_were_there_before_prove_nothing(tmp_path: Path) -> None:
    """A patch that only removes, or repeats a known line, must not pass for absorbed because that line is there."""
    shorter = OLD.replace("    return 1\n", "    return card in [9, 10]\n")
    text = lab.patch(lab.diff(PATH, OLD, shorter), files=PATH, marker="return card")
    one = patches.read_series(lab.series(tmp_path / "sglang" / "1.0", {"a.patch": text})).patches[0]

    assert not patch_matrix.is_upstream(one.diff.files, reader(OLD), reader(REWORDED + "    return card in [9, 10]\n"))


def test_a_patch_that_fails_is_left_out_for_those_behind_it(tmp_path: Path) -> None:
    second = lab.patch(lab.diff(PATH, NEW, NEW.replace("return 1", "return 2  # MARK")), files=PATH)
    first = lab.patch(lab.diff(PATH, OLD, NEW), files=PATH)
    whole = patches.read_series(lab.series(tmp_path / "sglang" / "1.0", {"1.patch": first, "2.patch": second}))

    cells = patch_matrix.column(whole, reader(OLD), reader(REWORDED))

    assert cells["1.patch"].state == FAILS
    assert cells["2.patch"].state in (FAILS, OFFSET)
    both = patch_matrix.column(whole, reader(OLD), reader(OLD))
    assert {cell.state for cell in both.values()} == {APPLIES}


def test_the_first_break_and_the_first_release_that_has_it_are_both_told(tmp_path: Path) -> None:
    rows = patch_matrix.matrix(series(tmp_path, claim="1.3"), reader(OLD), [
        ("1.0", lambda: reader(OLD)), ("1.1", lambda: reader(MOVED)), ("1.2", lambda: reader(REWORDED)),
        ("1.3", lambda: reader(ABSORBED))])

    assert patch_matrix.table(rows) == [
        ["patch", "1.0", "1.1", "1.2", "1.3", "first change"],
        ["0001-gate.patch", "applies", "offset +1", "fails #1", "upstream",
         "broken by 1.2 (gate.py: hunk #1), upstream in 1.3; header: 1.3"]]
    assert patch_matrix.table(rows, full=True)[1][3] == f"fails: {PATH}: hunk #1"


def test_a_patch_that_always_applies_says_so(tmp_path: Path) -> None:
    rows = patch_matrix.matrix(series(tmp_path), reader(OLD), [("1.0", lambda: reader(OLD))])

    assert patch_matrix.table(rows)[1][-1] == "none"


def test_a_file_that_is_gone_is_told_from_a_hunk_that_fails(tmp_path: Path) -> None:
    rows = patch_matrix.matrix(series(tmp_path), reader(OLD), [("1.0", lambda: reader(None))])

    assert patch_matrix.table(rows)[1] == ["0001-gate.patch", "file gone", "broken by 1.0 (gate.py)"]


def test_the_markdown_is_a_table(tmp_path: Path) -> None:
    rows = patch_matrix.matrix(series(tmp_path), reader(OLD), [("1.0", lambda: reader(OLD))])

    assert patch_matrix.markdown(rows) == (
        "| patch | 1.0 | first change |\n| --- | --- | --- |\n| 0001-gate.patch | applies | none |\n")
    assert patch_matrix.markdown([]) == ""
