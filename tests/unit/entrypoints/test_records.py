from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoints import records
from entrypoints.errors import BadConfig, CannotWrite, InputMissing


def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    records.append(file, {"a": 1})
    with file.open("ab") as handle:
        handle.write(b'{"a": 2, "b"')
    assert records.lines(file) == [{"a": 1}]
    records.mend(file)
    records.append(file, {"a": 3})
    assert records.lines(file) == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_a_file_cut_anywhere_is_readable(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "x.jsonl"
    for number in range(4):
        records.append(file, {"number": number})
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    assert len(records.lines(file)) == whole[:cut].count(b"\n")


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\nbroken\n{"a": 2}\n')
    with pytest.raises(BadConfig, match=r"x\.jsonl:2"):
        records.lines(file)


def test_writing_replaces_whole_files_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    records.write(file, records.dump({"b": 1, "a": [1.5, None]}))
    records.write(file, records.dump({"a": 2}))
    assert json.loads(file.read_text()) == {"a": 2}
    assert [one.name for one in tmp_path.iterdir()] == ["r.json"]
    with pytest.raises(ValueError, match="Out of range float"):
        records.dump({"a": float("nan")})


def test_a_folder_that_cannot_be_written_is_said_with_the_remedy(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(CannotWrite, match="mount a volume that user id"):
        records.create(blocker, "run")
    with pytest.raises(CannotWrite):
        records.write(blocker / "x", "text")
    with pytest.raises(CannotWrite):
        records.append(blocker / "x", {})
    assert (records.create(tmp_path / "new", "run")).is_dir()


def test_what_is_no_run_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="not a folder of a run"):
        records.document(tmp_path / records.PLAN)
    for text in ("{", "[1]"):
        (tmp_path / records.PLAN).write_text(text)
        with pytest.raises(BadConfig):
            records.document(tmp_path / records.PLAN)
    assert records.lines(tmp_path / "none") == []
    assert records.file_digest(tmp_path / "none") is None
    records.mend(tmp_path / "none")
