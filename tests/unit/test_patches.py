"""Series folders, headers, application of a series and the remembered check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buildctl import patches
from buildctl.errors import PatchError, Problem
from tests.patched import lab

PATH = "demo/gate.py"
OLD = "import os\n\n\ndef gate(card):\n    return card == 90\n\n\ndef other():\n    return 1\n"
NEW = OLD.replace("return card == 90", "return card in (90, 120)  # MARK")
NEXT = NEW.replace("(90, 120)", "(90, 120, 121)")
ONE = lab.patch(lab.diff(PATH, OLD, NEW), files=PATH)
TWO = lab.patch(lab.diff(PATH, NEW, NEXT), files=PATH, concern="more")


def problems(call: Callable[[], object]) -> tuple[Problem, ...]:
    with pytest.raises(PatchError) as caught:
        call()
    return caught.value.problems


def read(tmp_path: Path, **named: str | bytes) -> patches.Series:
    return patches.read_series(lab.series(tmp_path / "demo" / "1.0", {f"{name}.patch": text
                                                                      for name, text in named.items()}))


def test_a_series_knows_its_package_release_and_order(tmp_path: Path) -> None:
    series = patches.read_series(lab.series(tmp_path / "demo" / "1.0-cpu", {"b.patch": ONE, "a.patch": TWO}))

    assert (series.package, series.version) == ("demo", "1.0")
    assert [patch.name for patch in series.patches] == ["b.patch", "a.patch"]
    assert series.patches[0].files == (PATH,)


def test_the_hash_of_a_series_covers_names_bytes_and_order(tmp_path: Path) -> None:
    first = read(tmp_path / "1", a=ONE, b=TWO).sha256

    assert first == read(tmp_path / "2", a=ONE, b=TWO).sha256
    assert first != read(tmp_path / "3", b=ONE, a=TWO).sha256
    assert first != read(tmp_path / "4", a=ONE).sha256
    assert first != read(tmp_path / "5", a=ONE.replace("ours", "Ours"), b=TWO).sha256


def test_the_header_is_read_with_its_continuation_lines(tmp_path: Path) -> None:
    text = ONE.replace(" with its reason.\n", " with its reason.\n .\n And more.\n").replace(
        "Forwarded: no\n", "Applied-Upstream: 0.5.14, https://example.org/1\nBug-Demo: 7\n")
    header = read(tmp_path, a=text).patches[0].header

    assert header.description == "a change for a test\nwith its reason.\n\nAnd more."
    assert header.subject == "a change for a test"
    assert header.upstream_release == "0.5.14"
    assert (header.targets, header.files, header.tested, header.strip) == (("sm120",), (PATH,), "cpu", 1)


@pytest.mark.parametrize(("change", "said"), [
    (("Description: a change for a test\n with its reason.\n", ""), "no Description"),
    (("a change for a test", "TODO"), "no Description"),
    (("Origin: ours\n", ""), "no Origin"),
    (("Forwarded: no\n", ""), "neither Forwarded nor Applied-Upstream"),
    (("2026-12-01", "1 December"), "Last-Update is not right"),
    (("Concern: test", "Concern: Two Words"), "Concern is not right"),
    (("Targets: sm120", "Targets: blackwell"), "Targets is not right"),
    (("Tested: cpu", "Tested: yes"), "Tested is not right"),
    (("Tested: cpu", "Testet: cpu"), "unknown field 'Testet'"),
    (("Origin: ours\n", "Origin: ours\nOrigin: theirs\n"), "Origin is given twice"),
    (("Origin: ours\n", "Origin: ours\nnot a field\n"), "no field of a header"),
    (("Files: demo/gate.py", "Files: demo/gate.py, demo/more.py"), "not those of the diff"),
    (("Marker: MARK", "Marker: NOWHERE"), "the marker is in no line"),
], ids=lambda value: value if isinstance(value, str) else None)
def test_a_header_that_is_not_right_is_refused(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    found = problems(lambda: read(tmp_path, a=ONE.replace(*change)))

    assert any(said in problem.what for problem in found), found


def test_a_mistyped_field_is_named_with_the_right_one(tmp_path: Path) -> None:
    found = problems(lambda: read(tmp_path, a=ONE.replace("Tested:", "Testet:")))

    assert "did you mean 'Tested'?" in {problem.todo for problem in found}


def test_everything_wrong_in_a_folder_is_told_at_once(tmp_path: Path) -> None:
    folder = lab.series(tmp_path / "demo" / "1.0",
                        {"a.patch": ONE.replace("cpu", "yes"), "b.patch": b"", "c.patch": TWO},
                        names="a.patch\nb.patch\nmissing.patch\n# dropped x.patch: because\n")
    (folder / "a.patch.orig").write_text("left over")

    found = problems(lambda: patches.read_series(folder))

    said = " | ".join(f"{problem.where.rsplit('/', 1)[-1]}: {problem.what}" for problem in found)
    assert "a.patch: the header's Tested" in said
    assert "b.patch: the patch is empty" in said
    assert "missing.patch: the patch is not there" in said
    assert "series:4: a dropped patch without a proper reason" in said
    assert "a.patch.orig: the file is not in the series" in said
    assert "c.patch: the file is not in the series" in said


@pytest.mark.parametrize(("text", "said"), [
    (b"a.patch\r\n", "CRLF"),
    (b"\xff\xfe", "cannot be read"),
    (b"https://example.org/1.patch\n", "a patch by URL"),
    (b"a.patch\na.patch\n", "twice"),
])
def test_a_series_file_that_is_not_right_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    folder = lab.series(tmp_path / "demo" / "1.0", {"a.patch": ONE})
    (folder / "series").write_bytes(text)

    assert said in problems(lambda: patches.read_series(folder))[0].what


def test_a_folder_without_series_is_refused_with_the_way_to_start_one(tmp_path: Path) -> None:
    assert "buildctl patch new" in problems(lambda: patches.read_series(tmp_path))[0].todo


def test_a_patch_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = lab.series(tmp_path / "demo" / "1.0", {})
    (tmp_path / "x.patch").write_text(ONE)
    (folder / "a.patch").symlink_to(tmp_path / "x.patch")
    (folder / "series").write_text("a.patch\n")

    assert "no plain file" in problems(lambda: patches.read_series(folder))[0].what


def test_a_dropped_patch_is_kept_with_its_reason(tmp_path: Path) -> None:
    folder = lab.series(tmp_path / "demo" / "1.0", {"a.patch": ONE},
                        names="a.patch\n# dropped b.patch: applied upstream in 0.5.14\n"
                              "# dropped c.patch: obsolete because the file is gone\n# a remark\n")

    assert [(gone.name, gone.reason) for gone in patches.read_series(folder).dropped] == [
        ("b.patch", "applied upstream in 0.5.14"), ("c.patch", "obsolete because the file is gone")]


def test_a_patch_is_found_by_name_or_number(tmp_path: Path) -> None:
    folder = lab.series(tmp_path / "demo" / "1.0", {"0001-gate.patch": ONE, "0002-more.patch": TWO})
    series = patches.read_series(folder)

    assert {series.patch(name).name for name in ("0001", "0001-gate", "0001-gate.patch")} == {"0001-gate.patch"}
    assert "no patch '0003'" in problems(lambda: series.patch("0003"))[0].what


def test_a_series_is_applied_in_memory_and_its_tree_is_named(tmp_path: Path) -> None:
    series = read(tmp_path, a=ONE, b=TWO)

    applied = patches.apply_series(series, {PATH: OLD.encode(), "demo/free.py": b"x"})

    assert applied.files == {PATH: NEXT.encode()}
    assert applied.tree_sha256 == patches.effective_tree({PATH: NEXT.encode()})
    assert applied.builds_on == (("b.patch", "a.patch", PATH),)


def test_the_first_bad_patch_stops_a_series_though_the_last_is_good(tmp_path: Path) -> None:
    """A loop in a shell that reports the last status only would call this a success."""
    bad = lab.patch(lab.diff(PATH, OLD.replace("90", "91"), NEW.replace("90", "91")), files=PATH)
    good = lab.patch(lab.diff("demo/b.py", "x = 1\n", "x = 2  # MARK\n"), files="demo/b.py")
    series = read(tmp_path, a=bad, b=good)
    tree = {PATH: OLD.encode(), "demo/b.py": b"x = 1\n"}

    found = problems(lambda: patches.apply_series(series, tree.get))

    assert [problem.where for problem in found] == [f"a.patch: {PATH}: hunk #1"]
    assert tree == {PATH: OLD.encode(), "demo/b.py": b"x = 1\n"}


def test_two_patches_for_the_same_lines_are_refused(tmp_path: Path) -> None:
    rival = lab.patch(lab.diff(PATH, OLD, OLD.replace("card == 90", "card >= 90  # MARK")), files=PATH)

    found = problems(lambda: patches.apply_series(read(tmp_path, a=ONE, b=rival), {PATH: OLD.encode()}))

    assert found[0].where.startswith("b.patch")


def test_a_source_that_has_the_change_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    """GNU patch would assume a reversed patch here and take the fix out again."""
    tree = {PATH: NEW.encode()}

    found = problems(lambda: patches.apply_series(read(tmp_path, a=ONE), tree))

    assert "upstream already" in found[0].todo
    assert tree == {PATH: NEW.encode()}


class Source:
    """Counts how often the wheel is asked for."""

    def __init__(self, **files: str) -> None:
        self.asked = 0
        self.files = {"demo/gate.py": files["gate"].encode()}

    def __call__(self) -> Callable[[str], bytes | None]:
        self.asked += 1
        return self.files.get


def test_a_check_is_remembered_until_patch_or_wheel_changes(tmp_path: Path) -> None:
    series, source, cache = read(tmp_path, a=ONE), Source(gate=OLD), tmp_path / "cache"

    first = patches.check(series, source, "1" * 64, cache=cache)
    again = patches.check(series, source, "1" * 64, cache=cache)
    other_wheel = patches.check(series, source, "2" * 64, cache=cache)

    assert (first.cached, again.cached, other_wheel.cached) == (False, True, False)
    assert (again.tree_sha256, again.files, again.offsets) == (first.tree_sha256, (PATH,), ())
    assert source.asked == 2


def test_offsets_are_remembered_too(tmp_path: Path) -> None:
    series, source, cache = read(tmp_path, a=ONE, b=TWO), Source(gate="# head\n" + OLD), tmp_path / "cache"

    first = patches.check(series, source, "1" * 64, cache=cache)

    again = patches.check(series, source, "1" * 64, cache=cache)
    assert again.offsets == first.offsets
    assert [place.offset for place in again.offsets] == [1, 1]
    assert again.builds_on == first.builds_on


def test_a_broken_memory_is_no_answer(tmp_path: Path) -> None:
    series, source, cache = read(tmp_path, a=ONE), Source(gate=OLD), tmp_path / "cache"
    patches.check(series, source, "1" * 64, cache=cache)
    for file in cache.iterdir():
        file.write_text("{")

    assert not patches.check(series, source, "1" * 64, cache=cache).cached


def test_a_failure_is_not_remembered(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    series = read(tmp_path, a=ONE)
    problems(lambda: patches.check(series, Source(gate=NEW), "1" * 64, cache=cache))

    assert patches.check(series, Source(gate=OLD), "1" * 64, cache=cache).tree_sha256


def test_another_tree_than_the_locks_is_refused_even_when_remembered(tmp_path: Path) -> None:
    series, source, cache = read(tmp_path, a=ONE), Source(gate=OLD), tmp_path / "cache"
    right = patches.check(series, source, "1" * 64, cache=cache).tree_sha256

    assert patches.check(series, source, "1" * 64, tree=right, cache=cache).cached
    found = problems(lambda: patches.check(series, source, "1" * 64, tree="0" * 64, cache=cache))
    assert (found[0].found, found[0].expected) == (right, "0" * 64)


def test_without_a_cache_the_source_is_asked_each_time(tmp_path: Path) -> None:
    series, source = read(tmp_path, a=ONE), Source(gate=OLD)

    patches.check(series, source, "1" * 64)
    patches.check(series, source, "1" * 64)

    assert source.asked == 2
