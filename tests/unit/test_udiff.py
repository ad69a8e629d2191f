"""The diff parser and the exact application: every damage has its own refusal, and git is the judge of what fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import udiff
from buildctl.udiff import Diff, DiffError, Fault
from tests.patched import lab

OLD = """\
import os


def ninety(card):
    if card == 90:
        size = 8
        return size
    return 0


def hundred(card):
    if card == 100:
        size = 8
        return size
    return 0
"""
NEW = OLD.replace("    if card == 90:\n        size = 8", "    if card == 90:\n        size = 16  # MARK")
PATH = "demo/gate.py"


def parse(text: str | bytes) -> Diff:
    return udiff.parse(text.encode() if isinstance(text, str) else text, "p.patch")


def faults(text: str | bytes) -> tuple[Fault, ...]:
    with pytest.raises(DiffError) as caught:
        parse(text)
    return caught.value.faults


def apply(text: str, files: dict[str, str]) -> udiff.Result:
    return udiff.apply_patches([("p.patch", parse(text))], {name: text.encode() for name, text in files.items()}.get)


def refused(text: str, files: dict[str, str]) -> tuple[Fault, ...]:
    with pytest.raises(DiffError) as caught:
        apply(text, files)
    return caught.value.faults


GOOD = lab.diff(PATH, OLD, NEW)


def test_what_git_writes_is_applied_as_git_applies_it(tmp_path: Path) -> None:
    result = apply(GOOD, {PATH: OLD})

    assert result.files == {PATH: NEW.encode()}
    assert result.files == lab.git_apply(GOOD.encode(), {PATH: OLD.encode()}, tmp_path)
    assert not result.offsets


def test_text_above_the_diff_is_kept_and_a_format_patch_signature_is_no_error() -> None:
    diff = parse(f"Subject: x\n\n---\n{GOOD}-- \n2.39.5\n")

    assert diff.preamble == "Subject: x\n\n---\n"
    assert [file.path for file in diff.files] == [PATH]


def test_a_new_file_and_a_missing_last_line_end_are_carried_exactly() -> None:
    made = lab.diff("demo/new.json", None, '{"a": 1}')
    changed = lab.diff("demo/end.txt", "a\nb", "a\nb\nc")

    result = apply(made + changed, {"demo/end.txt": "a\nb"})

    assert result.files == {"demo/new.json": b'{"a": 1}', "demo/end.txt": b"a\nb\nc"}


def test_several_hunks_and_files_and_an_offset_after_lines_were_added_above() -> None:
    old = "".join(f"line {n}\n" for n in range(40))
    new = old.replace("line 5\n", "line 5\nextra\n").replace("line 30\n", "other 30\n")
    patch = lab.diff("demo/a.txt", old, new) + GOOD

    result = apply(patch, {"demo/a.txt": "# head\n# head\n" + old, PATH: OLD})

    assert result.files["demo/a.txt"] == b"# head\n# head\n" + new.encode()
    assert [(place.hunk, place.offset) for place in result.offsets] == [(1, 2), (2, 2)]
    assert [place.line for place in result.offsets] == [6, 30]


@pytest.mark.parametrize(("damage", "said"), [
    (b"", "the patch is empty"),
    (b"\n  \n", "the patch is empty"),
    (GOOD.encode() + b"\0\x01", "the patch is binary"),
    (GOOD.encode().replace(b"MARK", b"\xff\xfe"), "the patch is binary"),
    (GOOD.replace("\n", "\r\n").encode(), "CRLF line ends"),
    (GOOD.encode()[:-1], "cut off"),
    (b"only words\n", "there is no diff"),
    (GOOD.encode().rsplit(b"\n", 2)[0] + b"\n", "cut off, or its counts are wrong"),
    (GOOD.replace("@@ -3,", "@@ -3,1").encode(), "cut off, or its counts are wrong"),
    (GOOD.encode() + b"     and = more\n", "cut off, or its counts are wrong"),
    (GOOD.encode() + b"garbage\n", "cut off, or its counts are wrong"),
    (GOOD.split("@@")[0].encode(), "no hunk"),
    (GOOD.split("--- ")[0].encode(), "cut off or has text between its parts"),
    (GOOD.replace("@@ -", "@@ minus ").encode(), "no proper head"),
    (b"@@ -1 +1 @@\n" + GOOD.encode(), "a hunk stands before any file"),
    (GOOD.replace("diff --git a/demo", "diff --git a/other").encode(), "names two files for one part"),
    (GOOD.replace(" 100644", " 120000").encode(), "not supported"),
    ((GOOD + GOOD).encode(), "stands in the patch twice"),
    (GOOD.replace("a/demo", "a/../demo").encode(), "leaves the tree"),
    (GOOD.replace("a/demo", "/demo").encode(), "leaves the tree"),
    (GOOD.replace("a/demo/gate", "a/demo/../../gate").replace("b/demo/gate", "b/demo/../../gate").encode(),
     "leaves the tree"),
    (GOOD.replace("a/demo/gate", "a/demo//gate").encode(), "leaves the tree"),
    (GOOD.replace("a/demo/gate", "a/demo\\gate").encode(), "leaves the tree"),
    (GOOD.replace("b/demo/gate", "b/demo/other").encode(), "renames"),
    (GOOD.replace("+++ b/demo/gate.py", "+++ /dev/null").encode(), "deletes"),
], ids=lambda value: value if isinstance(value, str) else None)
def test_a_damaged_patch_is_refused_with_its_own_message(damage: bytes, said: str) -> None:
    assert any(said in fault.what for fault in faults(damage)), faults(damage)


@pytest.mark.parametrize("line", ["old mode 100644\nnew mode 100755\n", "deleted file mode 100644\n",
                                  "rename from demo/a.py\n", "similarity index 90%\n", "new file mode 120000\n"])
def test_modes_links_renames_and_deletions_are_refused(line: str) -> None:
    head, rest = GOOD.split("\n", 1)

    assert "not supported" in faults(f"{head}\n{line}{rest}")[0].what


def test_a_binary_change_is_refused() -> None:
    text = "diff --git a/x.bin b/x.bin\nGIT binary patch\nliteral 3\nKcmZQzU|?i`\n"
    other = "diff --git a/x.bin b/x.bin\nBinary files a/x.bin and b/x.bin differ\n"

    assert "binary" in faults(text)[0].what
    assert "binary" in faults(other)[0].what


def test_all_faults_of_a_patch_are_told_at_once() -> None:
    bad = GOOD.replace("a/demo", "a/../demo") + lab.diff("demo/b.py", "x = 1\n", "x = 2\n").replace("@@ -", "@@ minus ")

    assert len(faults(bad)) == 2


def test_a_hunk_without_context_or_change_or_out_of_step_is_refused() -> None:
    bare = lab.diff(PATH, OLD, NEW, context=0)
    same = GOOD.replace("-        size = 8\n+        size = 16  # MARK\n", "         size = 8\n")
    shifted = GOOD.replace("+3,", "+9,")
    long = "".join(f"line {n}\n" for n in range(60))
    two = lab.diff("demo/a.txt", long, long.replace("line 9\n", "line 9\nmore\n").replace("line 50\n", "line L\n"))
    dropped = two[:two.index("@@")] + two[two.rindex("\n@@") + 1:]

    assert "no context" in faults(bare)[0].what
    assert "changes nothing" in faults(same)[0].what
    assert "do not add up" in faults(shifted)[0].what
    assert "do not add up" in faults(dropped)[0].what


def test_without_context_a_hunk_may_only_be_the_whole_file() -> None:
    whole = lab.diff("demo/a.txt", "a\n", "b\n")

    assert apply(whole, {"demo/a.txt": "a\n"}).files["demo/a.txt"] == b"b\n"
    assert "does not fit" in refused(whole, {"demo/a.txt": "a\nmore\n"})[0].what


def test_a_new_file_is_one_plain_addition() -> None:
    made = lab.diff("demo/new.py", None, "a = 1\n")

    assert "no plain addition" in faults(made.replace("-0,0 +1", "-0,0 +2"))[0].what
    assert "is there already" in refused(made, {"demo/new.py": "a = 1\n"})[0].what


def test_without_a_match_the_first_line_that_differs_is_named() -> None:
    fault = refused(GOOD, {PATH: OLD.replace("size = 8", "size = 9")})[0]

    assert fault.where == f"p.patch: {PATH}: hunk #1"
    assert fault.found == "line 6: '        size = 9'"
    assert fault.expected == "'        size = 8'"


def test_the_end_of_the_file_is_named_when_the_source_is_shorter() -> None:
    assert "the end of the file" in refused(GOOD, {PATH: "import os\n"})[0].found


def test_a_line_without_end_inside_a_file_is_refused() -> None:
    patch = lab.diff("demo/a.txt", "a\nb", "a\nc").replace("+c\n", "+c\n\\ No newline at end of file\n+d\n")
    patch = patch.replace("-1,2 +1,2", "-1,2 +1,3")

    assert "ends a line of the file before its end" in faults(patch)[0].what


def test_a_hunk_without_a_heading_may_have_an_offset() -> None:
    patch = GOOD.replace("@@ def", "@@").replace("@@ import os", "@@")
    patch = "\n".join("@@".join(line.split("@@")[:2]) + "@@" if line.startswith("@@") else line
                      for line in patch.split("\n"))

    assert apply(patch, {PATH: "# one\n" + OLD}).offsets[0].offset == 1


def test_context_is_never_bent() -> None:
    drifted = OLD.replace("def ninety(card):", "def ninety(card, more):")

    assert "no fuzz" in refused(GOOD, {PATH: drifted})[0].what


def test_a_look_alike_function_is_not_patched_instead(tmp_path: Path) -> None:
    """The function is gone, one that reads the same is left: git takes it, GNU patch with fuzz too."""
    body = "    value = 1\n    other = 2\n    third = 3\n    return value\n"
    hunk = body.replace("    ", "     ").replace("     other = 2\n", "-    other = 2\n+    other = 22\n")
    text = f"--- a/{PATH}\n+++ b/{PATH}\n@@ -2,4 +2,4 @@ def ninety():\n{hunk}"
    there = f"# one\n# two\ndef ninety():\n{body}\n\n# end\n"
    gone = there.replace("ninety", "hundred")

    assert apply(text, {PATH: there}).offsets[0].offset == 2
    assert lab.git_apply(text.encode(), {PATH: gone.encode()}, tmp_path) is not None
    assert "another function" in refused(text, {PATH: gone})[0].what


def test_an_ambiguous_offset_is_refused() -> None:
    block = "begin\nvalue = 1\nend\n"
    patch = lab.diff("demo/a.txt", "head\n" + block + "tail\n", "head\n" + block.replace("1", "2") + "tail\n")
    patch = patch.replace("@@ -1,5 +1,5 @@\n head\n", "@@ -2,4 +2,4 @@\n")
    patch = patch.replace("@@ -2,4 +2,4 @@", "@@ -2,3 +2,3 @@").replace(" tail\n", "")

    fault = refused(patch, {"demo/a.txt": "x\ny\nz\n" + block + "tail\n" + block + "tail\n"})[0]

    assert "several places" in fault.what
    assert fault.found == "lines 4, 8"


def test_a_hunk_at_the_very_start_or_end_stays_there() -> None:
    first = lab.diff("demo/a.txt", "a\nb\nc\nd\n", "A\nb\nc\nd\n")
    last = lab.diff("demo/a.txt", "a\nb\nc\nd\n", "a\nb\nc\nD\n")

    assert "does not fit" in refused(first, {"demo/a.txt": "x\na\nb\nc\nd\n"})[0].what
    assert "does not fit" in refused(last, {"demo/a.txt": "a\nb\nc\nd\nx\n"})[0].what


def test_a_reversed_or_upstreamed_patch_is_recognised() -> None:
    assert "reversed, or the change is upstream already" in refused(GOOD, {PATH: NEW})[0].todo


def test_crlf_source_and_lf_patch_have_their_own_message() -> None:
    assert "CRLF" in refused(GOOD, {PATH: OLD.replace("\n", "\r\n")})[0].todo


def test_crlf_source_and_its_own_patch_fit(tmp_path: Path) -> None:
    old, new = (text.replace("\n", "\r\n") for text in (OLD, NEW))
    patch = lab.diff(PATH, old, new)

    assert apply(patch, {PATH: old}).files[PATH] == new.encode()


def test_a_missing_file_is_said_and_nobody_is_asked() -> None:
    assert refused(GOOD, {})[0].what == "the file to patch is not there"


def test_a_result_that_does_not_compile_is_refused() -> None:
    fault = refused(lab.diff(PATH, OLD, OLD.replace("import os", "import os as")), {PATH: OLD})[0]

    assert fault.what == "the patched file does not compile"
    assert fault.where == f"p.patch: {PATH}:1"


def test_all_hunks_that_fail_are_told_and_those_of_untouched_files_too() -> None:
    second = udiff.parse(lab.diff("demo/b.txt", "1\n2\n3\n", "1\n2\n4\n").encode(), "q.patch")
    first = parse(GOOD)
    files = {PATH: OLD.replace("size = 8", "size = 9").encode(), "demo/b.txt": b"9\n9\n9\n"}

    with pytest.raises(DiffError) as caught:
        udiff.apply_patches([("p.patch", first), ("p2.patch", first), ("q.patch", second)], files.get)

    assert [fault.where.split(":")[0] for fault in caught.value.faults] == ["p.patch", "q.patch"]


def test_it_is_said_which_patch_builds_on_which() -> None:
    third = NEW.replace("size = 16  # MARK", "size = 32  # MARK")
    far = NEW.replace("import os", "import os\nimport sys")
    result = udiff.apply_patches([("1.patch", parse(GOOD)), ("2.patch", parse(lab.diff(PATH, NEW, third)))],
                                 {PATH: OLD.encode()}.get)
    apart = udiff.apply_patches([("1.patch", parse(GOOD)), ("2.patch", parse(lab.diff(PATH, NEW, far, context=1)))],
                                {PATH: OLD.encode()}.get)

    assert result.builds_on == (("2.patch", "1.patch", PATH),)
    assert apart.builds_on == ()


def test_the_effective_tree_depends_on_paths_and_contents_only() -> None:
    tree = udiff.effective_tree({"b": b"2", "a": b"1"})

    assert tree == udiff.effective_tree({"a": b"1", "b": b"2"})
    assert tree != udiff.effective_tree({"a": b"1", "b": b"3"})
    assert tree != udiff.effective_tree({"a": b"1", "c": b"2"})
    assert len(udiff.effective_tree({})) == 64


@pytest.mark.parametrize(("line", "said"), [
    ("https://host/x.patch", "a patch by URL"),
    ("../x.patch", "no plain name"),
    ("x.patch -p0", "no plain name"),
    ("x.diff", "no plain name"),
    ("a.patch", "twice"),
])
def test_a_series_file_names_plain_files_once(line: str, said: str) -> None:
    with pytest.raises(DiffError) as caught:
        udiff.read_series_file(f"# head\n\na.patch\n{line}\n", "series")

    assert said in caught.value.faults[0].what
    assert caught.value.faults[0].where == "series:4"


def test_an_error_reads_in_three_parts() -> None:
    assert str(Fault("it is wrong", "a:1", "this", "that", "do so")).splitlines() == [
        "a:1: it is wrong", "  found:    this", "  expected: that", "  do:       do so"]
