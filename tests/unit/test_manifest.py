"""Manifests: places, types, unknown keys, all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildctl import manifest
from buildctl.errors import ManifestError, PatchError
from buildctl.manifest import Problems, Table, suggest


def read(tmp_path: Path, text: str) -> tuple[Table, Problems]:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    problems = Problems()
    table = manifest.load(path, "file.yaml", problems, "the file")
    assert table is not None
    return table, problems


def said(problems: Problems) -> list[str]:
    return [f"{problem.where}: {problem.what}" for problem in problems.found]


def test_reads_every_kind_of_field(tmp_path: Path) -> None:
    table, problems = read(tmp_path, "a: text\nb: [x, y]\nc: true\nd: {e: 1, f: 2.5, g: no, h: 0x10, i: word}\n"
                                     "k: [{name: n}]\nm: 7\n")
    assert table.string("a") == "text"
    assert table.strings("b") == ("x", "y")
    assert table.placed_strings("b") == (("x", "file.yaml:2"), ("y", "file.yaml:2"))
    assert table.boolean("c") is True
    assert table.boolean("absent") is False
    assert table.scalars("d") == {"e": 1, "f": 2.5, "g": False, "h": 16, "i": "word"}
    assert [one.string("name") for one in table.tables("k")] == ["n"]
    assert table.scalar("m") == 7
    assert table.string("absent", "default") == "default"
    assert table.table("absent") is None
    assert table.has("a")
    table.close()
    assert said(problems) == []


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    table, problems = read(tmp_path, "a: 3.11\nb: text\nc: maybe\nd: [1]\ne: {}\nf: x y\ng: [k]\nh: [1]\n")
    table.string("a")
    table.strings("b")
    table.boolean("c")
    table.strings("d")
    table.string("e")
    table.string("f", pattern="[a-z]+", expected="one word")
    table.tables("g")
    table.scalar("h")
    table.string("missing")
    table.close()
    assert said(problems) == [
        "file.yaml:1: 'a' of the file has the wrong type",
        "file.yaml:2: 'b' of the file has the wrong type",
        "file.yaml:3: 'c' of the file has the wrong type",
        "file.yaml:4: an entry of 'd' has the wrong type",
        "file.yaml:5: 'e' of the file has the wrong type",
        "file.yaml:6: 'f' of the file has a form that is not allowed",
        "file.yaml:7: an entry of 'g' has the wrong type",
        "file.yaml:8: 'h' of the file has the wrong type",
        "file.yaml:1: the file has no 'missing'",
    ]
    assert 'write it in quotes: "3.11"' in problems.found[0].todo
    with pytest.raises(ManifestError) as error:
        problems.raise_any()
    assert len(error.value.problems) == len(problems.found)
    with pytest.raises(PatchError):
        problems.raise_any(PatchError)


def test_unknown_key_is_named_with_a_suggestion(tmp_path: Path) -> None:
    table, problems = read(tmp_path, "descriptoin: x\n")
    table.string("description", "")
    table.close()
    assert said(problems) == ["file.yaml:1: unknown key 'descriptoin' in the file"]
    assert problems.found[0].todo == "did you mean 'description'?"


def test_a_key_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    _, problems = read(tmp_path, "a: 1\nb: 2\na: 3\n")
    assert said(problems) == ["file.yaml:3: 'a' stands twice in the file"]
    assert problems.found[0].found == "first on line 1"


def test_a_choice_takes_only_its_words(tmp_path: Path) -> None:
    table, problems = read(tmp_path, "a: wheel\n")
    table.choice("a", ("wheels", "base"))
    table.choice("b", ("x",), "x")
    assert problems.found[0].todo == "did you mean 'wheels'?"
    assert len(problems.found) == 1


@pytest.mark.parametrize(("text", "what"), [
    ("a: [1\n", "is not valid YAML"), ("", "is empty"), ("- a\n", "has the wrong type"), ("? [a]\n: b\n", "not a word"),
    ("a: !!python/object:os.system x\n", "")])
def test_what_is_no_manifest(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    problems = Problems()
    table = manifest.load(path, "file.yaml", problems, "the file")
    if what:
        assert what in problems.found[0].what
        assert problems.found[0].where.startswith("file.yaml:")
    else:  # a tag runs nothing, and is of the wrong type
        assert table is not None
        table.string("a")
        assert "python/object" in problems.found[0].found


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    problems = Problems()
    assert manifest.load(tmp_path / "none.yaml", "none.yaml", problems, "it") is None
    (tmp_path / "bin.yaml").write_bytes(b"a: \xff\n")
    assert manifest.load(tmp_path / "bin.yaml", "bin.yaml", problems, "it") is None
    (tmp_path / "bad.yaml").write_text("a: \x01\n")
    assert manifest.load(tmp_path / "bad.yaml", "bad.yaml", problems, "it") is None
    assert [problem.what for problem in problems.found] == ["cannot read it", "it is not UTF-8 text",
                                                            "it is not valid YAML"]


def test_numbers_that_yaml_reads_oddly_stay_text(tmp_path: Path) -> None:
    table, _ = read(tmp_path, "a: 1:30\n")
    assert table.scalar("a") == "1:30"


def test_suggestions() -> None:
    assert suggest("torch", ["torch", "cuda"]) == "did you mean 'torch'?"
    assert suggest("zzz", ["b", "a"]) == "known: a, b"
    assert suggest("zzz", []) == ""
