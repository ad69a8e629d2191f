"""Random edits and damage; `git apply` is the judge: we take nothing that git refuses, and make no other bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from buildctl import udiff
from tests.patched import lab

PATH = "demo/mod.txt"
#: few different lines, so that look-alikes are common
LINES = st.sampled_from(["def one():", "def two():", "    return 1", "    return 2", "", "x = 1", "x = 2", "\tend"])
FILES = st.lists(LINES, min_size=1, max_size=40)
ENDS = st.sampled_from(["\n", ""])


def text(lines: list[str], end: str = "\n") -> str:
    return "\n".join(lines) + end


def by_git(patch: bytes, files: dict[str, bytes]) -> dict[str, bytes] | None:
    with tempfile.TemporaryDirectory() as folder:
        return lab.git_apply(patch, files, Path(folder) / "tree")


def by_us(patch: bytes, files: dict[str, bytes]) -> dict[str, bytes] | None:
    try:
        result = udiff.apply_patches([("p.patch", udiff.parse(patch, "p.patch"))], files.get)
    except udiff.DiffError:
        return None
    return {**files, **result.files}


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, str]:
    old = draw(FILES)
    new = list(old)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(new)))
        kind = draw(st.sampled_from(["insert", "delete", "change"]))
        if kind == "insert":
            new.insert(at, draw(LINES) + " # new")
        elif at < len(new):
            new[at:at + 1] = [] if kind == "delete" else [draw(LINES) + " # new"]
    return text(old, draw(ENDS)), text(new, draw(ENDS))


@settings(max_examples=60, deadline=None)
@given(edits())
def test_a_diff_of_git_gives_what_git_makes_of_it(pair: tuple[str, str]) -> None:
    old, new = pair
    if old == new or not old:
        return
    patch = lab.diff(PATH, old, new).encode()
    if not new:  # git calls that a deletion or an empty file; a series has neither
        return
    files = {PATH: old.encode()}

    ours = by_us(patch, files)

    assert ours is None or ours == by_git(patch, files) == {PATH: new.encode()}
    if ours is None:  # refused on purpose only: no line of context around the change
        try:
            udiff.apply_patches([("p.patch", udiff.parse(patch, "p.patch"))], files.get)
        except udiff.DiffError as error:
            assert all("no context" in fault.what for fault in error.faults), error  # noqa: PT017


@settings(max_examples=60, deadline=None)
@given(edits(), FILES, st.booleans())
def test_on_a_source_that_moved_we_take_no_more_than_git(pair: tuple[str, str], more: list[str], above: bool) -> None:
    old, new = (side.rstrip("\n") + "\n" for side in pair)  # git 2.39 glues lines together without a last line end
    if old == new:
        return
    patch = lab.diff(PATH, old, new).encode()
    moved = text(more) + old if above else old + text(more)
    files = {PATH: moved.encode()}

    ours = by_us(patch, files)

    assert ours is None or ours == by_git(patch, files)


@st.composite
def damages(draw: st.DrawFn) -> bytes:
    old = "".join(f"line {n}\n" if n % 3 else "same\n" for n in range(30))
    new = old.replace("line 4\n", "line 4\nadded\n").replace("line 20\n", "changed 20\n").replace("line 28\n", "")
    data = bytearray((lab.diff(PATH, old, new) + lab.diff("demo/b.txt", "1\n2\n3\n", "1\n2\n4\n")).encode())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        lines = data.split(b"\n")
        line = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["flip", "cut", "insert", "line", "twice", "swap", "crlf", "sign"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:at + draw(st.integers(1, 40))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=4))
            case "line":
                data = bytearray(b"\n".join(lines[:line] + lines[line + 1:]))
            case "twice":
                data = bytearray(b"\n".join(lines[:line + 1] + lines[line:]))
            case "swap":
                lines[line], lines[line - 1] = lines[line - 1], lines[line]
                data = bytearray(b"\n".join(lines))
            case "crlf":
                data = bytearray(b"\n".join(lines[:line]) + b"\r\n" + b"\n".join(lines[line:]))
            case "sign":
                lines[line] = bytearray(draw(st.sampled_from([b" ", b"+", b"-"]))) + lines[line][1:]
                data = bytearray(b"\n".join(lines))
        if not data:
            return b""
    return bytes(data)


OLD = {
    PATH: "".join(f"line {n}\n" if n % 3 else "same\n" for n in range(30)).encode(),
    "demo/b.txt": b"1\n2\n3\n",
}


@settings(max_examples=200, deadline=None)
@given(damages())
def test_a_damaged_patch_is_refused_or_does_what_git_does_and_never_passes_for_the_right_tree(damage: bytes) -> None:
    right = {PATH: OLD[PATH].replace(b"line 4\n", b"line 4\nadded\n").replace(b"line 20\n", b"changed 20\n").replace(
        b"line 28\n", b""), "demo/b.txt": b"1\n2\n4\n"}

    ours = by_us(damage, OLD)

    if ours is not None:
        assert ours == by_git(damage, OLD)
        touched = {path: content for path, content in ours.items() if OLD.get(path) != content}
        assert (udiff.effective_tree(touched) == udiff.effective_tree(right)) == (ours == right)
