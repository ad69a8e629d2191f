"""The contract while an image is built, against made-up sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoints import agreement, contract
from tests.unit.entrypoints.image import write

ENTRIES = [one for one in contract.load() if one.literal and one.applies("0.5.23")]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """An image.json whose interpreter says that its packages are in `site`."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '[{{}}, \"{tmp_path / 'site'}\"]'\n")
    python.chmod(0o755)
    return write(tmp_path, packages={"sglang": "0.5.23"}, python=str(python))


def source(folder: Path, *literals: str) -> None:
    (folder / "site" / "sglang" / "srt").mkdir(parents=True, exist_ok=True)
    (folder / "site" / "sglang" / "srt" / "all.py").write_text("\n".join(literals), encoding="utf-8")


def test_everything_is_there(tmp_path: Path, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source(tmp_path, *(one.literal for one in ENTRIES))
    assert agreement.main([str(built), str(tmp_path / "contract.json")]) == 0
    assert json.loads((tmp_path / "contract.json").read_text()) == {"sglang": "0.5.23", "missing": []}
    assert capsys.readouterr().err == ""


def test_what_only_feeds_something_is_said(tmp_path: Path, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source(tmp_path, *(one.literal for one in ENTRIES if one.required))
    assert agreement.main([str(built), str(tmp_path / "contract.json")]) == 0
    assert "SGLang 0.5.23 lacks endpoint /start_profile; unavailable: trace\n" in capsys.readouterr().err
    missing = json.loads((tmp_path / "contract.json").read_text())["missing"]
    assert {"kind": "endpoint", "name": "/start_profile", "consumers": ["trace"], "required": False} in missing


def test_what_nothing_works_without_ends_the_build(tmp_path: Path, built: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    for installed, count in ((False, 1), (True, sum(one.required for one in ENTRIES))):
        if installed:
            source(tmp_path)
        assert agreement.main([str(built), str(tmp_path / "contract.json")]) == 1
        said = capsys.readouterr().err
        assert [said.count(part) for part in ("found:", "expected:", "do:")] == [count] * 3
    assert "does not work without endpoint /generate of SGLang" in said
    assert not (tmp_path / "contract.json").exists()


def test_an_interpreter_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = write(tmp_path, packages={"sglang": "0.5.23"}, python="/no/python")
    assert agreement.main([str(facts), str(tmp_path / "contract.json")]) == 1
    assert "No such file or directory: '/no/python'" in capsys.readouterr().err


def test_an_image_below_sglang_has_nothing_to_judge(tmp_path: Path) -> None:
    (tmp_path / "image.json").write_text(json.dumps({"packages": {"torch": "2.9.1"}, "profile": None}))
    assert agreement.main([str(tmp_path / "image.json"), str(tmp_path / "contract.json")]) == 0
    assert not (tmp_path / "contract.json").exists()
