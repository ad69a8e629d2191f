"""Model and draft folders, before a server looks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoints import models
from entrypoints.models import problems

TARGET = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "vocab_size": 2048}
DRAFT = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 256, "vocab_size": 2048, "draft_vocab_size": 512}


def folder(path: Path, config: Any = TARGET, weights: bool = True) -> str:
    path.mkdir(parents=True)
    if config is not None:
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    if weights:
        (path / "model.safetensors").touch()
    return str(path)


def said(model: str, draft: str = "", **environ: str) -> list[str]:
    return [problem.what for problem in problems(model, draft, environ)]


def test_a_pair_that_fits(tmp_path: Path) -> None:
    assert said(folder(tmp_path / "m"), folder(tmp_path / "d", DRAFT)) == []
    multimodal = {"architectures": ["X"], "text_config": TARGET}
    assert said(folder(tmp_path / "mm"), str(tmp_path / "d")) == []
    assert said(folder(tmp_path / "mm2", multimodal), str(tmp_path / "d")) == []


def test_a_folder_that_is_not_there_or_not_whole(tmp_path: Path) -> None:
    """K6-5."""
    (tmp_path / "empty").mkdir()
    assert said(str(tmp_path / "none"), str(tmp_path / "empty")) == [
        "the model folder is not there", "the draft folder has no readable config.json"]
    assert said(folder(tmp_path / "a", "{")) == ["the model folder has no readable config.json"]
    assert said(folder(tmp_path / "b", "[]")) == ["the model folder has no readable config.json"]
    assert said(folder(tmp_path / "c", weights=False)) == ["the model folder has no weights"]
    assert said("") == ["no model"]
    pointer = folder(tmp_path / "lfs")
    (tmp_path / "lfs" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert said(pointer) == ["the model's weights are git-lfs pointers"]


def test_where_the_files_of_a_model_are(tmp_path: Path) -> None:
    here = folder(tmp_path / "m")
    assert models.folder(here, {}) == tmp_path / "m"
    assert models.folder("org/name", {}, tmp_path) is None
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    assert models.folder("org/name", {}, tmp_path) is None, "named, and not downloaded"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    assert models.folder("org/name", {}, tmp_path) == cached / "snapshots" / "abc"


def test_files_that_the_user_of_the_container_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights written by root with mode 600."""
    model = folder(tmp_path / "m")
    monkeypatch.setattr("entrypoints.models.os.access", lambda path, _: path.suffix != ".safetensors")
    assert said(model) == ["the model's weights cannot be read"]
    monkeypatch.setattr("entrypoints.models.os.access", lambda *_: False)
    assert said(model) == ["the model's config.json cannot be read"]


@pytest.mark.parametrize(("change", "what"), [
    ({"architectures": ["LlamaForCausalLM"]}, "the draft is no EAGLE-3 head"),
    ({"architectures": None}, "the draft is no EAGLE-3 head"),
    ({"hidden_size": 512}, "the draft does not fit the model: hidden_size"),
    ({"vocab_size": 1024}, "the draft does not fit the model: vocab_size"),
])
def test_a_draft_of_another_model(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    assert said(folder(tmp_path / "m"), folder(tmp_path / "d", {**DRAFT, **change})) == [what]


def test_a_draft_may_name_its_targets_width(tmp_path: Path) -> None:
    narrow = {**DRAFT, "hidden_size": 64, "target_hidden_size": 256}
    assert said(folder(tmp_path / "m"), folder(tmp_path / "d", narrow)) == []


def test_a_folder_that_is_not_there_has_no_identity() -> None:
    """`plan` may be asked on a machine without the models."""
    assert models.identity("/none", {}) == {"name": "/none", "sha256": None, "revision": None}


def test_hub_names_are_checked_only_offline(tmp_path: Path) -> None:
    """K6-5."""
    assert said("org/model", "org/draft") == []
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    assert said("org/model", "", **offline) == ["HF_HUB_OFFLINE is set and the model is not in the cache"]
    folder(tmp_path / "hub/models--org--model/snapshots/abc")
    assert said("org/model", "", **offline) == []
    assert said("org/model", "", HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hub")) == []


def test_models_are_told_apart_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same names, shapes and sizes, other training: the first and the last bytes of the weights differ."""
    monkeypatch.setattr("entrypoints.models._WHOLE", 8)
    monkeypatch.setattr("entrypoints.models._END", 4)
    found = set()
    for name, weights in (("a", b"headXXXXXXtail"), ("b", b"headXXXXXXtaiL"), ("c", b"Headxxxxxxtail")):
        folder(tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / ".cache").mkdir()
        found.add(models.identity(str(tmp_path / name), {})["sha256"])
    assert len(found) == 3
    again = folder(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").write_bytes(b"headXXXXXXtail")
    assert models.identity(again, {}) == {"name": again, "sha256": models.identity(str(tmp_path / "a"), {})["sha256"],
                                          "revision": None}
    (tmp_path / "d" / "closed").symlink_to("/proc/self/mem")
    (tmp_path / "d" / "notes.txt").touch()
    assert models.identity(again, {})["sha256"] not in found


def test_a_hub_name_has_the_revision_that_the_cache_has(tmp_path: Path) -> None:
    assert models.identity("org/model", {}, tmp_path) == {"name": "org/model", "sha256": None, "revision": None}
    refs = tmp_path / "hub" / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0123abc\n")
    assert models.identity("org/model", {}, tmp_path)["revision"] == "0123abc"
    assert models.identity("org/model", {"HF_HOME": str(tmp_path)})["revision"] == "0123abc"
