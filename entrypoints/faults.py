"""Known failures of the server: which log line names the cause, for which SGLang versions, and what helps here.

The table is faults.toml. Upstream's hints are often wrong for CUDA 13 on SM120; the remedies in the table are ours.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from entrypoints.logfile import first_exception

_NUMBER = re.compile(r"\d+")
#: the server prints its whole configuration, its requests, models that this image cannot load, what an autotuner
#: (Inductor's, FlashInfer's) tried in vain, and what it does without: no failures
_NOISE = re.compile(r"server_args=|\bINFO: +\d+\.\d+\.\d+\.\d+:\d+ - \"|Ignore import error when loading"
                    r"|select_algorithm\.py:\d+\]|for benchmark choice|(?i:\[autotuner\])"
                    r"|Failed to initialize FlashInfer workspace|[Ff]alling back")


@dataclass(frozen=True, slots=True)
class Fault:
    """One row. `fatal`: the line alone means that the server will never serve (again), even while it still lives.

    `symptom`: the line says that something failed and not why; it is only evidence when no other row matches.
    """

    name: str
    pattern: re.Pattern[str]
    cause: str
    remedy: str
    fatal: bool
    symptom: bool
    since: str
    before: str

    def applies(self, version: str) -> bool:
        """Whether the row holds for this SGLang version; an unknown version ("") matches every row."""
        return in_range(version, self.since, self.before)


@dataclass(frozen=True, slots=True)
class Match:
    """A row and the line that it matched; the names of groups in the pattern fill `{name}` in cause and remedy."""

    fault: Fault
    line: str
    cause: str
    remedy: str


def in_range(version: str, since: str, before: str) -> bool:
    """`since` <= version < `before`; "" is open, and an unknown version ("") is in every range."""
    if not version:
        return True
    key = version_key(version)
    return (not since or key >= version_key(since)) and (not before or key < version_key(before))


def version_key(version: str) -> tuple[int, ...]:
    """Numbers of a release for comparing: `0.5.9` < `0.5.14` < `0.5.14.post1`; local labels (`+cu130`) do not count."""
    return tuple(int(part) for part in _NUMBER.findall(version.partition("+")[0]))


@cache
def load() -> tuple[Fault, ...]:
    """The table. A row that is not well formed is a mistake of ours and fails loudly."""
    text = resources.files("entrypoints").joinpath("faults.toml").read_text(encoding="utf-8")
    return parse(text)


def parse(text: str) -> tuple[Fault, ...]:
    """Rows of a TOML table: `[[fault]]` with name, pattern, cause, remedy; fatal, symptom, since, before optional."""
    known = {"name", "pattern", "cause", "remedy", "fatal", "symptom", "since", "before", "source"}
    rows = []
    for row in tomllib.loads(text)["fault"]:
        if unknown := set(row) - known:
            raise ValueError(f"faults.toml: {row.get('name')}: unknown keys {sorted(unknown)}")
        rows.append(Fault(name=row["name"], pattern=re.compile(row["pattern"]), cause=row["cause"],
                          remedy=row["remedy"], fatal=row.get("fatal", False), symptom=row.get("symptom", False),
                          since=row.get("since", ""), before=row.get("before", "")))
    return tuple(rows)


def match(line: str, faults: Iterable[Fault], version: str = "") -> Match | None:
    """The first row that the line matches; a cause before a symptom."""
    if _NOISE.search(line):
        return None
    best = None
    for fault in faults:
        if fault.applies(version) and (found := fault.pattern.search(line)):
            groups = {key: value or "" for key, value in found.groupdict().items()}
            hit = Match(fault, line.strip(), fault.cause.format_map(groups), fault.remedy.format_map(groups))
            if not fault.symptom:
                return hit
            best = best or hit
    return best


def is_end(line: str, faults: Iterable[Fault], version: str = "") -> bool:
    """Whether the line alone says that the server will never serve again, whatever cause it also names."""
    return not _NOISE.search(line) and any(one.fatal and one.applies(version) and one.pattern.search(line)
                                           for one in faults)


def first_cause(lines: Sequence[str], faults: Iterable[Fault], version: str = "") -> Match | None:
    """The earliest line that names a cause; else the earliest symptom; else None."""
    faults = tuple(faults)
    symptom = None
    for line in lines:
        if hit := match(line, faults, version):
            if not hit.fault.symptom:
                return hit
            symptom = symptom or hit
    return symptom


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a log says about a failure; all "" when nothing. `known`: by a row that names a cause, not a symptom."""

    cause: str = ""
    remedy: str = ""
    fault: str = ""
    evidence: str = ""
    known: bool = False


def explain(lines: Sequence[str], faults: Iterable[Fault], version: str = "") -> Explanation:
    """A cause from the table, else the first exception, else a symptom from the table."""
    hit = first_cause(lines, faults, version)
    exception = first_exception(lines)
    if hit and (not hit.fault.symptom or not exception):
        return Explanation(hit.cause, hit.remedy, hit.fault.name, hit.line, known=not hit.fault.symptom)
    return Explanation(cause=exception, evidence=exception)
