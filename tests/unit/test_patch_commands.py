"""`buildctl patch` as a person uses it, on a small package: every command, its output, its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buildctl import cli
from tests.patched import lab

GATE = "demo/gate.py"
OLD = "import os\n\n\ndef gate(card):\n    return card == 90\n\n\ndef other():\n    return 1\n"
NEW = OLD.replace("return card == 90", "return card in (90, 120)  # MARK")
FILES = {"demo/__init__.py": "", GATE: OLD, "demo/free.py": "x = 1\n"}


class Bench:
    """A series of one patch, its wheel and the next release's, and the command line."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = tmp_path, capsys
        self.wheel = lab.wheel(tmp_path / "w", FILES)
        self.series = lab.series(tmp_path / "demo" / "1.0", {
            "0001-gate.patch": lab.patch(lab.diff(GATE, OLD, NEW), files=GATE)})

    def run(self, *words: str, expect: int = 0, wheel: Path | None = None) -> str:
        code = cli.run(["patch", *words, "--series", str(self.series), "--wheel", str(wheel or self.wheel)])
        out, err = self.capsys.readouterr()
        assert code == expect, out + err
        return out + err

    def other(self, gate: str, version: str = "1.1", **more: str) -> Path:
        return lab.wheel(self.root / "w", {**FILES, GATE: gate, **more}, version=version)


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("BUILDCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path, capsys)


def test_check_names_patches_files_and_tree_and_is_quick_the_second_time(bench: Bench) -> None:
    assert "1 patches, 1 files of demo 1.0, tree " in bench.run("check")
    assert "(nothing changed)" in bench.run("check")


def test_check_says_an_offset(bench: Bench) -> None:
    out = bench.run("check", wheel=bench.other("# head\n" + OLD))

    assert f"0001-gate.patch: {GATE} hunk #1 fits at line 3, offset +1" in out


def test_check_on_another_source_fails_with_patch_file_and_hunk_and_changes_nothing(bench: Bench) -> None:
    before = {path: path.read_bytes() for path in bench.series.iterdir()}

    out = bench.run("check", expect=5, wheel=bench.other(OLD.replace("90", "91")))

    assert f"buildctl: 0001-gate.patch: {GATE}: hunk #1: the hunk does not fit" in out
    assert {path: path.read_bytes() for path in bench.series.iterdir()} == before
    assert not [path for path in bench.root.rglob("*") if path.suffix in (".rej", ".orig")]


def test_check_as_json(bench: Bench) -> None:
    (found,) = json.loads(bench.run("check", "--json"))["series"]

    assert (found["package"], found["version"], found["patches"]) == ("demo", "1.0", ["0001-gate.patch"])
    assert (len(found["tree"]), found["offsets"], found["cached"]) == (64, [], False)


def test_list_shows_order_concern_targets_and_what_was_dropped(bench: Bench) -> None:
    with (bench.series / "series").open("a") as file:
        file.write("# dropped 0000-old.patch: applied upstream in 0.9\n")

    out = bench.run("list")

    assert "0001-gate.patch  test  sm120  cpu  forwarded: no" in out
    assert "dropped 0000-old.patch: applied upstream in 0.9" in out


def test_apply_writes_a_whole_patched_tree_and_overwrites_nothing(bench: Bench) -> None:
    bench.run("apply", "--to", "tree")

    assert (bench.root / "tree" / GATE).read_text() == NEW
    assert (bench.root / "tree" / "demo/free.py").read_text() == "x = 1\n"
    assert "is not empty" in bench.run("apply", "--to", "tree", expect=2)


def test_explain_shows_why_and_where_in_the_real_source(bench: Bench) -> None:
    out = bench.run("explain", "0001", wheel=bench.other("# head\n" + OLD))

    assert "with its reason." in out
    assert f"{GATE}:3" in out
    assert "-    return card == 90" in out
    assert "seen at run time by: MARK" in out


def test_edit_and_refresh_keep_the_header_and_change_the_diff(bench: Bench) -> None:
    bench.run("edit", "0001", "--to", "work")
    assert (bench.root / "work" / GATE).read_text() == NEW
    (bench.root / "work" / GATE).write_text(NEW.replace("(90, 120)", "(90, 120, 121)"))
    (bench.root / "work" / "demo/new.py").write_text("y = 1\n")
    (bench.root / "work" / "HEADER").write_text((bench.root / "work" / "HEADER").read_text().replace("reason", "why"))

    assert cli.run(["patch", "refresh", "--from", "work", "--wheel", str(bench.wheel)]) == 0

    text = (bench.series / "0001-gate.patch").read_text()
    assert " with its why.\n" in text
    assert "+    return card in (90, 120, 121)  # MARK\n" in text
    assert "Files: demo/gate.py, demo/new.py\n" in text
    assert "--- /dev/null\n+++ b/demo/new.py\n" in text
    bench.run("check")


def test_refresh_without_a_change_writes_the_same_patch_but_the_date(bench: Bench) -> None:
    bench.run("edit", "0001", "--to", "work")
    bench.run("refresh", "--from", "work")
    first = (bench.series / "0001-gate.patch").read_text()
    bench.run("refresh", "0001")

    assert (bench.series / "0001-gate.patch").read_text() == first


def test_refresh_takes_an_offset_out(bench: Bench) -> None:
    moved = bench.other("# head\n" + OLD)
    bench.run("refresh", "0001", wheel=moved)

    assert "fits at line" not in bench.run("check", wheel=moved)


def test_new_makes_a_numbered_patch_behind_the_others_and_wants_its_header_filled(bench: Bench) -> None:
    bench.run("new", "free-value", "--to", "work")
    (bench.root / "work" / "demo/free.py").write_text("x = 2  # buildctl patch free-value:\n")

    out = bench.run("refresh", "--from", "work", expect=5)
    assert "the header has no Description" in out
    assert (bench.series / "series").read_text() == "0001-gate.patch\n"

    header = bench.root / "work" / "HEADER"
    header.write_text(header.read_text().replace("TODO one line: what it does", "two").replace("TODO why", "because"))
    bench.run("refresh", "--from", "work")
    assert (bench.series / "series").read_text() == "0001-gate.patch\n0002-free-value.patch\n"
    assert "2 patches" in bench.run("check")


def test_new_starts_a_series(bench: Bench) -> None:
    bench.series = bench.root / "demo" / "1.1"

    out = bench.run("new", "first", "--to", "work", wheel=bench.other(OLD))

    assert "0001-first.patch" in out
    assert "not a name" in bench.run("new", "Two Words", "--to", "more", expect=2)


def test_a_refresh_that_breaks_a_later_patch_writes_nothing_unless_forced(bench: Bench) -> None:
    later = lab.patch(lab.diff(GATE, NEW, NEW.replace("(90, 120)", "(90, 120, 121)")), files=GATE)
    lab.series(bench.series, {"0002-more.patch": later}, names="0001-gate.patch\n0002-more.patch\n")
    bench.run("edit", "0001", "--to", "work")
    (bench.root / "work" / GATE).write_text(OLD.replace("== 90", ">= 90  # MARK"))
    before = (bench.series / "0001-gate.patch").read_bytes()

    assert "0002-more.patch" in bench.run("refresh", "--from", "work", expect=5)
    assert (bench.series / "0001-gate.patch").read_bytes() == before

    bench.run("refresh", "--from", "work", "--force")
    assert (bench.series / "0001-gate.patch").read_bytes() != before


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda work: (work / GATE).write_text(OLD), "nothing differs"),
    (lambda work: (work / "demo/free.py").unlink(), "a patch deletes no files"),
    (lambda work: (work / GATE).write_text("a\n<<<<<<< ours\n"), "conflict marks left"),
    (lambda work: (work / GATE).write_text(NEW + "def (\n"), "does not compile"),
    (lambda work: (work / GATE).write_bytes(NEW.encode() + b"# \0\n"), "the patch is binary"),
    (lambda work: (work / "HEADER").write_text("Origin: x\n---\n"), "no Description"),
])
def test_what_cannot_become_a_patch_is_refused(bench: Bench, spoil: object, said: str) -> None:
    bench.run("edit", "0001", "--to", "work")
    spoil(bench.root / "work")  # type: ignore[operator]

    assert said in bench.run("refresh", "--from", "work", expect=5)


def test_refresh_wants_a_name_or_a_folder_that_edit_made(bench: Bench) -> None:
    assert "nothing to refresh" in bench.run("refresh", expect=2)
    (bench.root / "empty").mkdir()
    assert "no patch is being edited there" in bench.run("refresh", "--from", "empty", expect=2)


def test_a_workspace_ignores_bytecode_and_left_overs(bench: Bench) -> None:
    bench.run("edit", "0001", "--to", "work")
    (bench.root / "work/demo/__pycache__").mkdir()
    (bench.root / "work/demo/__pycache__/gate.cpython-311.pyc").write_bytes(b"x")
    (bench.root / "work/demo/gate.py.orig").write_text("x")

    bench.run("refresh", "--from", "work")

    assert "Files: demo/gate.py\n" in (bench.series / "0001-gate.patch").read_text()


def test_without_git_writing_a_patch_says_what_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run("edit", "0001", "--to", "work")
    (bench.root / "work" / GATE).write_text(NEW.replace("90", "91"))
    monkeypatch.setenv("PATH", str(bench.root))

    assert "git is needed to write patches" in bench.run("refresh", "--from", "work", expect=2)
    assert "1 patches" in bench.run("check")


def test_an_unknown_patch_is_named_with_the_series(bench: Bench) -> None:
    assert "no series has a patch '0009'" in bench.run("explain", "0009", expect=2)


# --- rebase ----------------------------------------------------------------------------------------------------------


def test_rebase_carries_what_fits_and_what_merges(bench: Bench) -> None:
    near = OLD.replace("\n\n\ndef gate", "\n\n# a remark\ndef gate")

    out = bench.run("rebase", "--onto", "1.1", "--onto-wheel", str(bench.other(near)))

    assert "carried  0001-gate.patch: merged" in out
    bench.series = bench.root / "demo" / "1.1"
    assert "1 patches" in bench.run("check", wheel=bench.other(near))
    assert " # a remark\n def gate" in (bench.series / "0001-gate.patch").read_text()


def test_rebase_drops_what_is_upstream_and_writes_the_reason_down(bench: Bench) -> None:
    changed = NEW.replace("  # MARK", "")
    marked = changed.replace("120)\n", "120)\n    # buildctl MARK\n")
    (bench.series / "0001-gate.patch").write_text(lab.patch(lab.diff(GATE, OLD, marked), files=GATE))
    upstream = changed.replace("import os\n", "import os\nimport sys\n")

    out = bench.run("rebase", "--onto", "1.1", "--onto-wheel", str(bench.other(upstream)))

    assert "dropped  0001-gate.patch: applied upstream in 1.1, or before" in out
    assert (bench.root / "demo/1.1/series").read_text() == (
        "# dropped 0001-gate.patch: applied upstream in 1.1, or before\n")


def test_rebase_believes_a_header_that_names_the_release(bench: Bench) -> None:
    path = bench.series / "0001-gate.patch"
    path.write_text(path.read_text().replace("Forwarded: no", "Applied-Upstream: 1.1, by hand"))

    bench.run("rebase", "--onto", "1.2", "--onto-wheel", str(bench.other("import os\n", version="1.2")))

    assert "# dropped 0001-gate.patch: applied upstream in 1.1, by hand" in (bench.root / "demo/1.2/series").read_text()


def test_rebase_stops_at_a_conflict_and_goes_on_after_it_is_resolved(bench: Bench) -> None:
    later = lab.patch(lab.diff("demo/free.py", "x = 1\n", "x = 2  # MARK\n"), files="demo/free.py")
    lab.series(bench.series, {"0002-free.patch": later}, names="0001-gate.patch\n0002-free.patch\n")
    clash = bench.other(OLD.replace("card == 90", "card >= 90"))
    onto = ("rebase", "--onto", "1.1", "--onto-wheel", str(clash), "--work", "conflict")

    out = bench.run(*onto, expect=5)
    assert f"0001-gate.patch: {GATE}: upstream changed the same lines" in out
    marked = (bench.root / "conflict" / GATE).read_text()
    assert "<<<<<<< 0001-gate.patch\n" in marked
    assert ">>>>>>> 1.1\n" in marked

    (bench.root / "conflict" / GATE).write_text(OLD.replace("card == 90", "card >= 90 or card in (120,)  # MARK"))
    assert cli.run(["patch", "refresh", "--from", "conflict", "--wheel", str(clash)]) == 0
    out = bench.run(*onto)
    assert "carried  0002-free.patch: applies" in out
    assert (bench.root / "demo/1.1/series").read_text() == "0001-gate.patch\n0002-free.patch\n"


def test_rebase_drops_what_the_merge_leaves_nothing_of(bench: Bench) -> None:
    """The same lines in other words around them: nothing proves it upstream but the merge."""
    shorter = OLD.replace("\n\ndef other():\n    return 1\n", "")
    (bench.series / "0001-gate.patch").write_text(
        lab.patch(lab.diff(GATE, OLD, shorter + "# MARK\n"), files=GATE))
    upstream = "import sys\n" + shorter + "# MARK\n"

    out = bench.run("rebase", "--onto", "1.1", "--onto-wheel", str(bench.other(upstream)))

    assert "dropped  0001-gate.patch: applied upstream in 1.1" in out


def test_a_merge_that_does_not_compile_is_laid_out_like_a_conflict(bench: Bench) -> None:
    """Each side is right alone: upstream made an expression of the function, the patch adds a statement to it."""
    body = "def gate(card):\n    a = 1\n    b = 2\n    c = 3\n    d = 4\n    e = 5\n    f = 6\n    return a\n"
    ours = body.replace("    f = 6\n", "    f = 6\n    f += 1  # MARK\n")
    theirs = body.replace("def gate(card):\n    a = 1\n    b = 2\n", "VALUE = [\n").replace("    c = 3\n", "    1,\n")
    theirs = theirs.replace("    d = 4\n", "    4,\n") + "]\n"
    (bench.series / "0001-gate.patch").write_text(lab.patch(lab.diff(GATE, body, ours), files=GATE))

    out = bench.run("rebase", "--onto", "1.1", "--onto-wheel", str(bench.other(theirs)), "--work", "conflict",
                    wheel=bench.other(body, version="1.0"), expect=5)

    assert "its result does not compile" in out
    assert "f += 1  # MARK" in (bench.root / "conflict" / GATE).read_text()


def test_rebase_says_when_the_file_is_gone(bench: Bench) -> None:
    wheel = lab.wheel(bench.root / "w", {"demo/__init__.py": ""}, version="1.1")

    out = bench.run("rebase", "--onto", "1.1", "--onto-wheel", str(wheel), "--work", "conflict", expect=5)

    assert f"{GATE} is not in the new release" in out


# --- matrix ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def releases(bench: Bench, tmp_path: Path) -> Bench:
    """Three releases in the cache, so that nothing is fetched."""
    texts = {"1.0": OLD, "1.1": "# head\n" + OLD, "1.2": OLD.replace("90", "91")}
    for version, gate in texts.items():
        wheel = bench.other(gate, version=version)
        place = tmp_path / "cache" / "wheels" / f"demo-{version}"
        place.mkdir(parents=True)
        (place / wheel.name).write_bytes(wheel.read_bytes())
    return bench


def test_matrix_prints_the_fate_per_release(releases: Bench) -> None:
    out = releases.run("matrix", "--versions", "1.0,1.1,1.2")

    assert "0001-gate.patch  applies  offset +1  fails #1  broken by 1.2 (gate.py: hunk #1)" in out
    assert f"fails: {GATE}: hunk #1" in releases.run("matrix", "--versions", "1.2", "--full")
    assert "| 0001-gate.patch | applies | none |" in releases.run("matrix", "--versions", "1.0", "--markdown")


def test_matrix_writes_its_table_between_its_marks_and_nowhere_else(releases: Bench) -> None:
    document = releases.root / "doc.md"
    mark = f"<!-- matrix {releases.series}: generated by `buildctl patch matrix --write` -->"
    document.write_text(f"before\n\n{mark}\nold\n<!-- end -->\n\nafter\n")

    releases.run("matrix", "--versions", "1.0", "--write", str(document))

    assert document.read_text() == (f"before\n\n{mark}\n| patch | 1.0 | first change |\n| --- | --- | --- |\n"
                                    "| 0001-gate.patch | applies | none |\n<!-- end -->\n\nafter\n")
    document.write_text("no marks\n")
    assert "no place for the table" in releases.run("matrix", "--versions", "1.0", "--write", str(document), expect=2)


# --- which series ----------------------------------------------------------------------------------------------------


def test_a_wheel_that_is_none_is_said(bench: Bench) -> None:
    (bench.root / "bad-1.0-py3-none-any.whl").write_text("no zip")

    assert "the wheel cannot be read" in bench.run("check", expect=3, wheel=bench.root / "bad-1.0-py3-none-any.whl")


@pytest.fixture
def checkout(bench: Bench) -> Bench:
    """A checkout with two series, and no stack."""
    (bench.root / "images/stacks").mkdir(parents=True)
    gate = lab.patch(lab.diff(GATE, OLD, NEW), files=GATE)
    lab.series(bench.root / "patches/demo/1.0", {"0001-gate.patch": gate})
    lab.series(bench.root / "patches/demo/1.0-cpu", {"0001-gate.patch": gate, "0002-free.patch": lab.patch(
        lab.diff("demo/free.py", "x = 1\n", "x = 2  # MARK\n"), files="demo/free.py")})
    place = bench.root / "cache/wheels/demo-1.0"
    place.mkdir(parents=True)
    (place / bench.wheel.name).write_bytes(bench.wheel.read_bytes())
    return bench


def test_in_a_checkout_check_means_all_series(checkout: Bench) -> None:
    assert cli.run(["patch", "check"]) == 0
    out = checkout.capsys.readouterr().out.splitlines()
    heads = [line.split(":")[0] for line in out if not line.startswith(" ")]
    assert heads == ["patches/demo/1.0", "patches/demo/1.0-cpu"]
    assert "  no stack with a readable manifest uses this series" in out


def test_an_edit_by_shell_in_an_image_is_warned_about(checkout: Bench) -> None:
    (checkout.root / "images/demo").mkdir()
    (checkout.root / "images/demo/Dockerfile").write_text("FROM base\nRUN sed -i s/90/120/ gate.py\n")

    assert cli.run(["patch", "check"]) == 0
    assert "warning: images/demo/Dockerfile:2: text is edited by a command" in checkout.capsys.readouterr().err


def test_every_bad_series_is_told_after_the_good_ones(checkout: Bench) -> None:
    (checkout.root / "patches/demo/1.0/left.rej").write_text("x")

    assert cli.run(["patch", "check"]) == 5
    out, err = checkout.capsys.readouterr()
    assert "patches/demo/1.0-cpu: 2 patches" in out
    assert "left.rej: the file is not in the series" in err


def test_a_patch_is_found_in_the_only_series_that_has_it(checkout: Bench) -> None:
    assert cli.run(["patch", "explain", "0002"]) == 0
    assert cli.run(["patch", "explain", "0001"]) == 2
    assert "more than one series has a patch '0001'" in checkout.capsys.readouterr().err
    assert cli.run(["patch", "apply", "--to", "tree"]) == 2
    assert "more than one series is meant" in checkout.capsys.readouterr().err


def test_outside_a_checkout_the_series_must_be_named(bench: Bench) -> None:
    assert cli.run(["patch", "check"]) == 2
    assert "no project here" in bench.capsys.readouterr().err
