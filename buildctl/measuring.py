"""Runs of the image's own benchmark from container to bound folder, and their comparison in a container of an image."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildctl import bench, binding
from buildctl.bench import Wanted
from buildctl.container import Container, Ended, Output, Spec, hardened
from buildctl.engine import Engine, LocalImage
from buildctl.errors import AuditError, Interrupted, Problem, UsageError

Say = Callable[[str], None]
#: what `compare` needs of a run
#: exit code of a shell and of our entrypoint for a word that is neither mode nor command
_UNKNOWN_WORD = 127


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: the entrypoint's exit code and the run's folder, None when it did not come to one."""

    reference: str
    image: LocalImage
    code: int
    folder: Path | None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        verdict = _verdict(self.folder)
        return {"image": self.reference, "digest": self.image.digest or self.image.id, "exit_code": self.code,
                "folder": str(self.folder) if self.folder else None, "verdict": verdict.get("class"),
                "headline": verdict.get("headline"), "causes": verdict.get("invalid_causes", [])}


def measure(engine: Engine, spec: Spec, image: LocalImage, wanted: Wanted, out: Path, output: Output,
            say: Say) -> Measured:
    """Run one benchmark to its end, fetch its folder and bind it to the image.

    :param out: where run folders go; it exists.
    :raises Interrupted: by the user; the folder, with what was measured, is there and named.
    :raises AuditError: the entrypoint claims a verdict and left no run, or the run is of another image.
    :raises BuildctlError: the container could not be run, or its results not be fetched.
    """
    facts = engine.info()
    with Container(engine, spec, say) as box:
        if files := bench.uploads(wanted):
            box.put(files, bench.RESULTS)
        try:
            ended = box.run(output)
        except Interrupted:
            folder = fetch(box, out, spec.image, image, facts)
            raise Interrupted(Problem(
                "the benchmark was interrupted", str(folder or spec.name),
                "what was measured is kept" if folder else "no run had begun", "",
                f"go on with --resume {folder}" if folder else "run the same command again")) from None
        folder = fetch(box, out, spec.image, image, facts)
    if ended.out_of_memory:
        say("the engine ended a process of the container: out of memory")
    if ended.code in bench.VERDICTS and folder is None:
        raise AuditError(Problem("the entrypoint ended with a verdict and left no run", spec.image,
                                 f"exit code {ended.code}, nothing in {bench.RESULTS}", "a run folder",
                                 "see what it printed"))
    return Measured(spec.image, image, ended.code, folder)


def fetch(box: Container, out: Path, reference: str, image: LocalImage, facts: Mapping[str, Any]) -> Path | None:
    """Copy the run folders out of a container and bind them; the last run, which a sweep's verdict is in.

    :param facts: the engine's own words.
    """
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=out) as spare:
        box.collect(bench.RESULTS, Path(spare))
        found = sorted((path for path in Path(spare).iterdir() if (path / "plan.json").is_file()), key=_made)
        for folder in found:
            binding.write(folder, reference, image, facts)
        kept = [_keep(folder, out) for folder in found]
    return kept[-1] if kept else None


def _made(folder: Path) -> str:
    return str(json.loads((folder / "plan.json").read_text(encoding="utf-8")).get("created_at"))


def _keep(folder: Path, out: Path) -> Path:
    """Move a run to its place. A resumed run replaces what there was of it, which is part of it."""
    target = out / folder.name
    if target.exists():
        target.rename(folder.parent / f"{folder.name}.before")  # goes with the temporary folder
    return Path(shutil.move(folder, target))


def _verdict(folder: Path | None) -> dict[str, Any]:
    try:
        found = json.loads(((folder or Path()) / "result.json").read_text(encoding="utf-8"))["verdict"]
    except (OSError, ValueError, KeyError):
        return {}
    return found if isinstance(found, dict) else {}


def compare(engine: Engine, words: Sequence[str], image: str, options: Sequence[str], output: Output,
            say: Say) -> Ended:
    """Compare runs in a container of an image, without network; the folders are copied into it.

    :param words: `DIR` or `NAME=DIR`.
    :param options: further words for the entrypoint.
    :raises UsageError: the image's entrypoint knows no `compare`.
    :raises BuildctlError: the container could not be run.
    """
    inside, files = _inside(words)
    spec = Spec(bench.new_name("compare"), image, (*hardened(), "--network", "none"), ("compare", *inside, *options))
    with Container(engine, spec, say) as box:
        box.put(files, bench.RESULTS)
        ended = box.run(output)
    if ended.code == _UNKNOWN_WORD:
        raise UsageError(Problem("this image's entrypoint knows no `compare`", image, "an older entrypoint",
                                 "an image built since", "build it again, or name another: --image IMAGE"))
    return ended


def folder_of(word: str) -> tuple[str, Path]:
    """Group name (or nothing) and folder of `DIR` or `NAME=DIR`, read as the entrypoint does."""
    name, given, rest = word.partition("=")
    return (name, Path(rest)) if given and not Path(word).is_dir() else ("", Path(word))


def _inside(words: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """The words as the container sees them, and the files to put there."""
    inside: list[str] = []
    files: dict[str, Path] = {}
    used: set[str] = set()
    for number, word in enumerate(words):
        group, folder = folder_of(word)
        name = folder.resolve().name
        name = f"{number}-{name}" if name in used else name
        used.add(name)
        inside.append(f"{group}={bench.RESULTS}/{name}" if group else f"{bench.RESULTS}/{name}")
        files.update({f"{name}/{file}": folder / file for file in binding.RAW if (folder / file).is_file()})
    return inside, files
