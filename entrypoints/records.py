"""The files of one run: appended line by line, replaced atomically, readable after any interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoints.errors import BadConfig, CannotWrite, InputMissing, Problem

PLAN, BLOCKS, REQUESTS, CONTEXT, TELEMETRY, RESULT, REPORT, PAGE, METRICS = (
    "plan.json", "blocks.jsonl", "requests.jsonl", "context.json", "telemetry.jsonl", "result.json", "report.md",
    "report.html", "metrics.prom")


def dump(value: object) -> str:
    """JSON for people and machines; raises `ValueError` for NaN and infinity, which JSON does not know."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def write(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old or the new one, whole."""
    spare = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with spare.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        spare.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            spare.unlink()
        if isinstance(error, OSError):
            raise _cannot(path, error) from error
        raise


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one line, with one write, so that a kill leaves at most one torn line at the end."""
    line = json.dumps(row, separators=(",", ":"), allow_nan=False, ensure_ascii=False) + "\n"
    try:
        with path.open("ab") as file:
            file.write(line.encode())
    except OSError as error:
        raise _cannot(path, error) from error


def mend(path: Path) -> None:
    """Cut a torn last line off, so that the next one starts on its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a torn last one is left out, a broken one in the middle is an error."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    parts = path.read_bytes().split(b"\n")
    for number, part in enumerate(parts[:-1], 1):  # the last part is empty, or torn
        try:
            rows.append(json.loads(part))
        except ValueError as error:
            raise BadConfig(Problem(what="broken line", where=f"{path}:{number}", found=str(error),
                                    expected="one JSON object", todo="the run's raw data were changed")) from error
    return rows


def document(path: Path) -> dict[str, Any]:
    """One JSON file. Raises `InputMissing` or `BadConfig`."""
    try:
        loaded = json.loads(path.read_bytes())
    except OSError as error:
        raise InputMissing(Problem(what="not a folder of a run", where=str(path), found=error.strerror or str(error),
                                   expected=f"a folder with {PLAN}")) from error
    except ValueError as error:
        raise BadConfig(Problem(what="not JSON", where=str(path), found=str(error))) from error
    if not isinstance(loaded, dict):
        raise BadConfig(Problem(what="not a JSON object", where=str(path)))
    return loaded


def create(results: Path, run_id: str) -> Path:
    """A new folder for a run. Raises `CannotWrite`."""
    folder = results / run_id
    try:
        folder.mkdir(parents=True)
        probe = folder / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise _cannot(folder, error) from error
    return folder


def file_digest(path: Path) -> str | None:
    """SHA-256 of a file, None when there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cannot(path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(Problem(what="cannot write the results", where=str(path), found=error.strerror or str(error),
                               expected="a writable folder with free space",
                               todo=f"mount a volume that user id {os.getuid()} may write: -v DIR:/results"))
