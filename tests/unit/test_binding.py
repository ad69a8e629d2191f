"""Whose result it is: what a binding says is held against the result, its raw files and the image in a registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from buildctl import binding
from entrypoints import records, result

FILES = {"plan.json": b"{}", "context.json": b"{}", "blocks.jsonl": b"", "requests.jsonl": b"{}\n"}
RAW = binding.raw_digest(FILES)
RESULT = {"run_id": "r", "raw_sha256": RAW}
BOUND = binding.Binding("r", RAW, frozenset({"sha256:a", "sha256:config"}))


def whats(bound: binding.Binding | None = BOUND, said: dict[str, Any] | None = None,
          files: dict[str, bytes] | None = None, digests: tuple[str, ...] = ("sha256:a",)) -> list[str]:
    found = binding.problems(bound, said or RESULT, FILES if files is None else files, digests, "x")
    assert all(one.found and one.expected and one.todo for one in found)
    return [one.what for one in found]


def test_the_hash_is_the_one_of_the_entrypoint(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    assert result._raw_digest(tmp_path) == RAW
    (tmp_path / records.REQUESTS).unlink()
    assert result._raw_digest(tmp_path) == binding.raw_digest(
        {name: data for name, data in FILES.items() if name != records.REQUESTS})


def test_a_result_of_the_image_passes() -> None:
    assert whats() == []
    assert whats(digests=("sha256:manifest", "sha256:config")) == [], "an engine may know an image by its config"


def test_a_result_without_a_binding_is_held_to_its_own_files() -> None:
    assert whats(None) == []
    assert whats(None, files={}) == []
    for name in FILES:  # one that was taken away is no way around the hash
        less = {other: data for other, data in FILES.items() if other != name}
        assert whats(None, files=less) == ["the run's raw files are not those that the result was computed from"]


@pytest.mark.parametrize(("more", "what"), [
    ({"digests": ("sha256:b",)}, "the result is of another image"),
    ({"bound": binding.Binding("r", RAW, frozenset())}, "the result is of another image"),
    ({"bound": binding.Binding("other", RAW, BOUND.digests)}, "binding.json belongs to another run"),
    ({"bound": binding.Binding("r", "0" * 64, BOUND.digests)}, "binding.json belongs to another run"),
    ({"files": {**FILES, "requests.jsonl": b"faster"}},
     "the run's raw files are not those that the result was computed from"),
    ({"bound": None, "files": {**FILES, "plan.json": b"[]"}},
     "the run's raw files are not those that the result was computed from")])
def test_what_speaks_against_a_result(more: dict[str, Any], what: str) -> None:
    assert whats(**more) == [what]


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 2}', '{"schema": 1, "image": 1}', "{"])
def test_what_is_no_binding(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        binding.parse(text.encode())


def test_a_binding_is_read_as_written() -> None:
    document = {"schema": 1, "run_id": "r", "raw_sha256": RAW, "image": {"digest": "sha256:a", "id": "sha256:config"}}
    assert binding.parse(json.dumps(document).encode()) == BOUND
    document["image"] = {"digest": None, "id": "sha256:config"}
    assert binding.parse(json.dumps(document).encode()).digests == {"sha256:config"}
