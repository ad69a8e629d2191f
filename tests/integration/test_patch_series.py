"""The series of this repository on the real wheels from the package index: exact, explained, and git agrees."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildctl import cli, patches, source, udiff
from buildctl.errors import PatchError
from buildctl.patches import Applied, Series
from buildctl.source import Wheel
from tests.patched import lab

PATCHES = Path(__file__).parents[2] / "patches"
FOLDERS = sorted(path.parent for path in PATCHES.glob("*/*/series"))
EACH = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")


@functools.cache
def real(folder: Path) -> tuple[Series, Wheel]:
    series = patches.read_series(folder)
    return series, source.wheel(series.package, series.version)


@functools.cache
def applied(folder: Path) -> Applied:
    series, wheel = real(folder)
    return patches.apply_series(series, wheel.read)


def test_there_are_series_for_both_tracks_and_the_demo() -> None:
    names = {f"{folder.parent.name}/{folder.name}" for folder in FOLDERS}

    assert {"sglang/0.5.9", "flashinfer/0.6.3", "sglang/0.5.23", "sglang/0.5.23-cpu"} <= names


@EACH
def test_a_series_applies_exactly_and_without_offset(folder: Path) -> None:
    found = applied(folder)

    assert not found.offsets
    assert set(found.files) == {path for patch in real(folder)[0].patches for path in patch.files}


@EACH
def test_git_makes_the_same_bytes_of_it(folder: Path, tmp_path: Path) -> None:
    series, wheel = real(folder)
    files = {path: wheel.read(path) or b"" for patch in series.patches for path in patch.files if wheel.read(path)}

    ours = applied(folder).files
    theirs = dict(files)
    for number, patch in enumerate(series.patches):
        done = lab.git_apply(patch.path.read_bytes(), theirs, tmp_path / str(number))
        assert done is not None, patch.name
        theirs = done

    assert theirs == ours


@EACH
def test_every_marker_names_its_concern_and_is_unlike_the_others(folder: Path) -> None:
    series = patches.read_series(folder)
    markers = [patch.header.marker for patch in series.patches]

    assert len(set(markers)) == len(markers)
    assert all(patch.header.marker.startswith("buildctl patch ") and patch.header.concern in patch.header.marker
               for patch in series.patches)
    assert len({patch.header.concern for patch in series.patches}) == len(series.patches)


def test_every_patch_of_the_old_release_is_carried_or_dropped_with_a_reason() -> None:
    old, new = (patches.read_series(PATCHES / "sglang" / version) for version in ("0.5.9", "0.5.23"))
    kept, dropped = {patch.name for patch in new.patches}, {gone.name for gone in new.dropped}

    assert {patch.name for patch in old.patches} <= kept | dropped
    assert not kept & dropped


def test_the_marker_of_fusion_means_that_it_runs() -> None:
    """The benchmark takes a marker of this concern for proof that fusion is active; 0.5.23 only takes its flag back."""
    concerns = {patch.header.concern for patch in patches.read_series(PATCHES / "sglang" / "0.5.23").patches}

    assert "allreduce-fusion" not in concerns


@pytest.mark.parametrize("name", ["sglang/0.5.9", "sglang/0.5.23", "flashinfer/0.6.3"])
def test_the_documents_matrix_is_of_these_patches(name: str) -> None:
    document = (PATCHES.parent / "docs" / "patches.md").read_text()
    text = document.split(f"<!-- matrix patches/{name}:")[1].split("<!-- end -->")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")]
                      for line in text.splitlines() if line.startswith("|"))
    series = patches.read_series(PATCHES / name)

    assert [row[0] for row in rows] == [patch.name for patch in series.patches]
    assert {row[head.index(series.version)] for row in rows} == {"applies"}
    assert len(head) >= 8  # the patch, six releases or more, the first change


def test_no_patch_touches_the_gate_of_custom_all_reduce() -> None:
    """Behind it the kernel launches nothing on more than two PCIe cards: numbers that nobody reduced."""
    touched = {path for folder in FOLDERS for patch in patches.read_series(folder).patches for path in patch.files}

    assert not any("custom_all_reduce" in path for path in touched)


def test_a_series_for_another_release_is_refused_with_file_and_hunk() -> None:
    series, _ = real(PATCHES / "sglang" / "0.5.9")
    newer = source.wheel("sglang", "0.5.23")

    with pytest.raises(PatchError) as caught:
        patches.apply_series(series, newer.read)

    assert caught.value.exit_code == 5
    assert all(re.match(r"000\d-[a-z0-9-]+\.patch: sglang/", problem.where) for problem in caught.value.problems)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 1 << 20), bit=st.integers(0, 7), cut=st.integers(0, 60), which=st.integers(0, 1 << 10))
def test_a_damaged_real_patch_never_passes_for_the_right_tree(at: int, bit: int, cut: int, which: int) -> None:
    """A bit flipped or bytes cut out: refused, or the same files (a word of the header changed), or another tree."""
    series, wheel = real(PATCHES / "sglang" / "0.5.9")
    right = applied(PATCHES / "sglang" / "0.5.9")
    name = series.patches[which % len(series.patches)].name
    data = bytearray(series.patch(name).path.read_bytes())
    at %= len(data)
    if cut:
        del data[at:at + cut]
    else:
        data[at] ^= 1 << bit
    try:
        diffs = [(patch.name, udiff.parse(bytes(data), patch.name) if patch.name == name else patch.diff)
                 for patch in series.patches]
        result = udiff.apply_patches(diffs, wheel.read)
    except udiff.DiffError:
        return

    assert (udiff.effective_tree(result.files) == right.tree_sha256) == (dict(result.files) == dict(right.files))


def test_patch_check_is_green_on_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(["--project", str(PATCHES.parent), "patch", "check"])

    out, err = capsys.readouterr()
    assert code == 0, err
    assert not err
    assert all(f"patches/{folder.parent.name}/{folder.name}: " in out for folder in FOLDERS)
