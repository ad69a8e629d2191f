"""Model and draft folders: there, complete, and made for each other."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoints.errors import Problem

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
#: files up to this many bytes are hashed whole; of larger ones the size and so many bytes of either end
_WHOLE, _END = 32 * 2**20, 2**20


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


def identity(name: str, environ: Mapping[str, str], cache: Path | None = None) -> dict[str, str | None]:
    """What tells two models apart: `sha256` of a folder, or the `revision` of a hub name that the cache has by now.

    Weights are hashed at both ends only, so that 200 GB cost a second: a header, the first and the last tensors.
    """
    if not is_local(name):
        return {"name": name, "sha256": None, "revision": _revision(name, environ, cache)}
    if not Path(name).expanduser().is_dir():  # `plan` may be asked where the models are not
        return {"name": name, "sha256": None, "revision": None}
    total = hashlib.sha256()
    for path in sorted(Path(name).expanduser().iterdir()):
        if path.is_file() and not path.name.startswith("."):
            total.update(f"{path.name} {_part_digest(path)}\n".encode())
    return {"name": name, "sha256": total.hexdigest(), "revision": None}


def _part_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _WHOLE:
                return f"{size} {hashlib.file_digest(file, 'sha256').hexdigest()}"
            ends = hashlib.sha256(file.read(_END))
            file.seek(size - _END)
            ends.update(file.read(_END))
            return f"{size} {ends.hexdigest()}"
    except OSError as error:  # no file that a server needs: those were looked at before
        return error.strerror or "unreadable"


def _revision(name: str, environ: Mapping[str, str], cache: Path | None) -> str | None:
    """The commit that a hub name stands for in the cache, None when it is not there."""
    try:
        return (_in_cache(name, environ, cache) / "refs" / "main").read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def folder(name: str, environ: Mapping[str, str], cache: Path | None = None) -> Path | None:
    """Where a model's files are: its folder, or the snapshot of a hub name in the cache; None when not here (yet)."""
    if is_local(name):
        return Path(name).expanduser()
    revision = _revision(name, environ, cache)
    snapshot = _in_cache(name, environ, cache) / "snapshots" / (revision or "none")
    return snapshot if snapshot.is_dir() else None


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
    if pointers := sorted(one.name for one in weights if _is_pointer(one)):
        return [Problem(what=f"the {role}'s weights are git-lfs pointers", where=name, found=", ".join(pointers[:4]),
                        expected="the weights themselves", todo="git lfs pull in that folder")]
    if not weights:
        return [Problem(what=f"the {role} folder has no weights", where=name, expected=" or ".join(_WEIGHTS),
                        todo="the download is not complete")]
    return []


def _is_pointer(file: Path) -> bool:
    """Whether git-lfs left a text in place of a file (its specification: version first, below 1,024 bytes)."""
    if file.stat().st_size >= 1024:
        return False
    return file.read_bytes().startswith(b"version https://git-lfs.github.com/spec/")


def _offline(name: str, role: str, environ: Mapping[str, str], cache: Path | None) -> list[Problem]:
    """A hub name while the hub is off must be in the cache."""
    if environ.get("HF_HUB_OFFLINE", "").lower() not in {"1", "true", "yes", "on"}:
        return []
    folder = _in_cache(name, environ, cache) / "snapshots"
    if folder.is_dir() and any(folder.glob("*/config.json")):
        return []
    return [Problem(what=f"HF_HUB_OFFLINE is set and the {role} is not in the cache", where=name,
                    found=f"nothing at {folder}", expected="a downloaded snapshot",
                    todo=f"download it into {folder.parents[1]}, or give a folder: --{role} /models/NAME")]


def _in_cache(name: str, environ: Mapping[str, str], cache: Path | None) -> Path:
    """The folder of a hub name in the cache (huggingface_hub's layout)."""
    root = Path(environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or cache or Path.home() /
                                                    ".cache/huggingface") / "hub")
    return root / f"models--{name.replace('/', '--')}"
