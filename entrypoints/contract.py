"""What we use of SGLang, as data (contract.toml), and whether this SGLang has it.

A missing entry is named, and what it feeds becomes `unavailable`: never a wrong number.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from entrypoints.faults import in_range

KINDS = ("endpoint", "field", "metric", "pattern", "kernel")
_KNOWN = frozenset({"name", "literal", "pattern", "since", "before", "when", "consumers", "required", "where", "claim",
                    "state", "backend"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that we use. `literal` is the text that its source must hold ("" for kernels)."""

    kind: str
    name: str
    literal: str
    pattern: re.Pattern[str] | None
    since: str
    before: str
    when: str
    consumers: tuple[str, ...]
    required: bool
    where: str
    claim: str
    state: str
    backend: str

    def applies(self, version: str) -> bool:
        """Whether it is expected of this SGLang version."""
        return in_range(version, self.since, self.before)

    def as_dict(self) -> dict[str, Any]:
        """For the result file: what is missing and what suffers."""
        return {"kind": self.kind, "name": f"{self.where}.{self.name}" if self.where else self.name,
                "consumers": list(self.consumers), "required": self.required}


@cache
def load() -> tuple[Entry, ...]:
    """The shipped contract."""
    return parse(resources.files("entrypoints").joinpath("contract.toml").read_text(encoding="utf-8"))


def parse(text: str) -> tuple[Entry, ...]:
    """Entries of a TOML text. Raises `ValueError` for an unknown key: a mistake of ours."""
    document = tomllib.loads(text)
    entries = []
    for kind in KINDS:
        for row in document.get(kind, ()):
            if unknown := set(row) - _KNOWN:
                raise ValueError(f"contract.toml: {row.get('name')}: unknown keys {sorted(unknown)}")
            entries.append(Entry(
                kind=kind, name=row["name"], literal="" if kind == "kernel" else row.get("literal", row["name"]),
                pattern=re.compile(row["pattern"]) if "pattern" in row else None, since=row.get("since", ""),
                before=row.get("before", ""), when=row.get("when", "always"), consumers=tuple(row.get("consumers", ())),
                required=row.get("required", False), where=row.get("where", ""), claim=row.get("claim", ""),
                state=row.get("state", ""), backend=row.get("backend", "")))
    return tuple(entries)


def select(kind: str, version: str, *, claim: str | None = None) -> list[Entry]:
    """Entries of a kind that hold for a version, of one claim if named."""
    return [one for one in load() if one.kind == kind and one.applies(version) and claim in (None, one.claim)]


def missing_in_source(root: Path, version: str) -> list[Entry]:
    """Entries whose text is nowhere in the Python sources below `root` (the folder `sglang` of site-packages)."""
    wanted = {one for one in load() if one.literal and one.applies(version)}
    for path in sorted(root.rglob("*.py")):
        if not wanted:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        wanted -= {one for one in wanted if one.literal in text}
    return [one for one in load() if one in wanted]


def missing_live(version: str, *, server_info: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None,
                 paths: Collection[str] | None = None, metrics: Collection[str] | None = None,
                 conditions: Iterable[str] = ()) -> list[Entry]:
    """Entries that this server should have and does not. What was not asked for (None) is not judged.

    `paths` are its endpoints, `metrics` the names that it exports, `conditions` which of `speculative` and `metrics`
    hold for it.
    """
    hold = {"always", *conditions}
    tables: dict[tuple[str, str], Collection[str] | None] = {
        ("endpoint", ""): paths, ("metric", ""): metrics, ("field", "server_info"): server_info,
        ("field", "meta_info"): meta_info}
    return [one for one in load()
            if one.when in hold and one.applies(version)
            and (found := tables.get((one.kind, one.where))) is not None and one.name not in found]
