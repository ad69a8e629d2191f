"""Layers on each other: what is on top counts, what is whited out is gone, links lead where the kernel would go."""

from __future__ import annotations

import pytest

from buildctl.errors import AuditError
from buildctl.filesystem import FileSystem
from tests.unit import tars
from tests.unit.tars import item, layer, tar


def system(*layers: dict[str, bytes | str | None] | bytes) -> FileSystem:
    return FileSystem(layer(one) for one in layers)


def paths(files: FileSystem, folder: str = "") -> list[str]:
    return [found.path for found in files.under(folder)]


def test_the_upper_layer_counts() -> None:
    files = system({"a/x": b"old", "a/y": b"same"}, {"a/x": b"new"})
    found = files.find("a/x")
    assert found is not None
    assert (found.layer, found.entry.content) == (1, b"new")
    assert files.content("/a/y") == b"same"
    assert files.content("a/z") is None
    assert files.find("a/x/deeper") is None


def test_whiteouts_take_away_what_lies_below_and_nothing_of_their_own_layer() -> None:
    files = system({"a/x": b"1", "a/d/e": b"2", "b/x": b"3", "c": b"4"},
                   tar([item("a/new", b"5"), item("a/.wh.x", b""), item("a/.wh.d", b""), item("b/.wh..wh..opq", b""),
                        item("b/own", b"6"), item("none/.wh.x", b""), item(".wh.c", b""), item("c", b"7")]))
    assert paths(files) == ["a", "a/new", "b", "b/own", "c"]
    assert files.content("c") == b"7"


def test_a_file_takes_the_place_of_a_folder_and_the_other_way_round() -> None:
    files = system({"a/x": b"1", "b": b"2"}, {"a": b"file", "b/x": b"3"}, tar([item("b"), item("b/y", b"4")]))
    assert paths(files) == ["a", "b", "b/x", "b/y"]
    assert files.content("a") == b"file"


def test_entries_find_their_folder_again_after_it_was_replaced_in_the_same_layer() -> None:
    files = FileSystem([layer(tar([item("a/x", b"1"), item("a", b"file"), item("a"), item("a/y", b"2")]))])
    assert paths(files) == ["a", "a/y"]


def test_links_are_followed_as_the_kernel_would() -> None:
    files = system({"usr/lib/x": b"1", "lib": "usr/lib", "abs": "/usr/lib/x", "up": "usr/../lib/x", "dead": "none",
                    "loop": "loop", "out": "../../../usr/lib/x"})
    for path in ("lib/x", "abs", "up", "out", "usr/lib/../lib/./x"):
        found = files.find(path)
        assert found is not None, path
        assert found.path == "usr/lib/x"
    assert files.find("dead") is files.find("loop") is None
    own = files.own("abs")
    assert own is not None
    assert own.entry.kind == "symlink"
    assert [found.path for found in files.under("lib")] == ["usr/lib/x"]
    assert paths(files, "nowhere") == []


def test_a_layer_writes_through_a_folder_link() -> None:
    files = system({"usr/lib/x": b"1", "lib": "usr/lib"}, {"lib/y": b"2"})
    assert paths(files, "usr/lib") == ["usr/lib/x", "usr/lib/y"]
    with pytest.raises(AuditError, match="through a link that leads nowhere"):
        system({"lib": "nowhere"}, {"lib/y": b"2"})


def test_hard_links_are_the_same_file_also_of_a_lower_layer() -> None:
    files = system({"a": b"1"}, tar([item("b", b"2"), item("c", hard="b"), item("d/e", hard="/a")]))
    assert (files.content("c"), files.content("d/e")) == (b"2", b"1")
    for target in ("nowhere", "d"):
        with pytest.raises(AuditError, match="links to a file that is not there"):
            system({"d": None}, tar([item("x", hard=target)]))
    with pytest.raises(AuditError, match="leads out"):
        system(tar([item("x", hard="../../etc/shadow")]))


def test_a_folder_again_keeps_its_content() -> None:
    files = system(tars.of({"a": None, "a/x": b"1"}), tars.of({"a": None}))
    assert paths(files) == ["a", "a/x"]
    found = files.find("a")
    assert found is not None
    assert found.layer == 1
