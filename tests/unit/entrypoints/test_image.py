"""image.json: read whole or refused whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from entrypoints.errors import BadConfig, Unusable
from entrypoints.image import load, parse
from entrypoints.version import describe, of, render
from tests.unit.entrypoints.image import document, write


def test_a_whole_image(tmp_path: Path) -> None:
    patch = {"package": "sglang", "name": "0001-x.patch", "sha256": "ef", "concern": "x", "marker": None}
    image = load(write(tmp_path, patches=[patch], targets=["sm120"], cuda="13.0", trees={"sglang": "12"}))
    assert image.short_key == "abababababababab"
    assert image.python == Path(sys.executable)
    assert image.patches[0].marker == ""
    assert image.profile.arms["eagle3"]["speculative-num-steps"] == 3
    assert image.cuda == "13.0"


def test_outside_an_image(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="not an image built by buildctl"):
        load(tmp_path / "none.json")


def test_the_variable_names_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRYPOINT_IMAGE_FILE", str(write(tmp_path, stack="other")))
    assert load().stack == "other"


def test_no_json(tmp_path: Path) -> None:
    path = tmp_path / "image.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(BadConfig, match="not JSON"):
        load(path)


def test_all_problems_at_once() -> None:
    broken = document(schema=2, key="", patches={}, packages=[],
                      profile={"arms": {"a": {"x": [1]}}, "environment": 3, "server": None})
    with pytest.raises(BadConfig) as caught:
        parse(broken, "image.json")
    assert {problem.what.removeprefix("image.json: ") for problem in caught.value.problems} == {
        "schema", "key", "patches", "packages", "profile.arms.a.x", "profile.environment", "profile.server"}


def test_version_inside_and_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTRYPOINT_IMAGE_FILE", str(write(tmp_path, patches=[
        {"package": "sglang", "name": "0001-x.patch", "sha256": "ef" * 32}])))
    text = render(describe())
    assert "sglang 0.5.23  stack cpu-demo  key abababababababab" in text
    assert "patch sglang/0001-x.patch  efefefefefef" in text
    assert of(load()) == "0.5.23"
    monkeypatch.setenv("ENTRYPOINT_IMAGE_FILE", str(tmp_path / "none"))
    assert "not inside an image" in render(describe())
