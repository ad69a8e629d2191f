"""Model and draft folders: there, complete, and made for each other."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoints.errors import Problem

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


def is_local(name: str) -> bool:
    """Whether a model is meant as a folder of this machine and not as a name on the hub."""
    return name.startswith(("/", ".", "~")) or Path(name).exists()


def problems(model: str, draft: str, environ: Mapping[str, str], cache: Path | None = None) -> list[Problem]:
    """What is wrong with the model files, before a server looks for them; empty when nothing is.

    Hub names can only be checked when the hub is switched off: then they must be in the cache.
    """
    found = _folder(model, "model", environ, cache)
    if draft:
        found += _folder(draft, "draft", environ, cache)
    if not found and draft and is_local(model) and is_local(draft):
        found += fit(config(Path(model)), config(Path(draft)), draft)
    return found


def config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; {} when it cannot be read."""
    try:
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def fit(target: Mapping[str, Any], draft: Mapping[str, Any], where: str) -> list[Problem]:
    """Whether an EAGLE-3 draft belongs to its target: architecture, hidden size and vocabulary.

    A draft may have fewer layers, a smaller draft vocabulary (`draft_vocab_size`) and any number of heads.
    """
    target = target.get("text_config") or target
    wrong = []
    architecture = " ".join(draft.get("architectures") or [])
    if "eagle" not in architecture.lower():
        wrong.append(Problem(what="the draft is no EAGLE-3 head", where=f"{where}/config.json",
                             found=architecture or "no architectures", expected="an architecture such as "
                             "LlamaForCausalLMEagle3", todo="name the EAGLE-3 draft that was trained for this model"))
    theirs = draft.get("target_hidden_size", draft.get("hidden_size"))
    for key, mine, other in (("hidden_size", target.get("hidden_size"), theirs),
                             ("vocab_size", target.get("vocab_size"), draft.get("vocab_size"))):
        if mine is not None and other is not None and mine != other:
            wrong.append(Problem(what=f"the draft does not fit the model: {key}", where=f"{where}/config.json",
                                 found=str(other), expected=str(mine),
                                 todo="name the EAGLE-3 draft that was trained for this model"))
    return wrong


def _folder(name: str, role: str, environ: Mapping[str, str], cache: Path | None) -> list[Problem]:
    if not name:
        return [Problem(what=f"no {role}", where=f"--{role}", expected="a folder or a name on the hub",
                        todo=f"--{role} /models/NAME, or ENTRYPOINT_{role.upper()}")]
    if not is_local(name):
        return _offline(name, role, environ, cache)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return [Problem(what=f"the {role} folder is not there", where=name, expected="a folder with config.json",
                        todo="mount it: -v /host/path:/models:ro")]
    if (folder / "config.json").exists() and not os.access(folder / "config.json", os.R_OK):
        return [Problem(what=f"the {role}'s config.json cannot be read", where=name,
                        expected=f"readable by user {os.getuid()}", todo="on the host: chmod -R a+rX FOLDER")]
    if not config(folder):
        return [Problem(what=f"the {role} folder has no readable config.json", where=name,
                        found=", ".join(sorted(one.name for one in folder.iterdir())[:8]) or "an empty folder",
                        expected="config.json", todo="name the folder that holds config.json itself")]
    weights = [one for pattern in _WEIGHTS for one in folder.glob(pattern)]
    closed = sorted(one.name for one in weights if not os.access(one, os.R_OK))
    if closed:
        return [Problem(what=f"the {role}'s weights cannot be read", where=name, found=", ".join(closed[:4]),
                        expected=f"readable by user {os.getuid()}", todo="on the host: chmod -R a+rX FOLDER")]
    if not weights:
        return [Problem(what=f"the {role} folder has no weights", where=name, expected=" or ".join(_WEIGHTS),
                        todo="the download is not complete, or git-lfs left pointers")]
    return []


def _offline(name: str, role: str, environ: Mapping[str, str], cache: Path | None) -> list[Problem]:
    """A hub name while the hub is off must be in the cache."""
    if environ.get("HF_HUB_OFFLINE", "").lower() not in {"1", "true", "yes", "on"}:
        return []
    root = Path(environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or cache or Path.home() /
                                                    ".cache/huggingface") / "hub")
    folder = root / f"models--{name.replace('/', '--')}" / "snapshots"
    if folder.is_dir() and any(folder.glob("*/config.json")):
        return []
    return [Problem(what=f"HF_HUB_OFFLINE is set and the {role} is not in the cache", where=name,
                    found=f"nothing at {folder}", expected="a downloaded snapshot",
                    todo=f"download it into {root}, or give a folder: --{role} /models/NAME")]
