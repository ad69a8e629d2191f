"""The rules as data: `buildctl/data/rules.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

_COMMON = ("id", "kind", "level", "reason", "source", "advice")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; `options` is what its kind needs."""

    id: str
    kind: str
    level: str
    reason: str
    source: str
    advice: str
    options: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: about which package, variable or flag, and in words.

    `where` defaults to the stack, `level` to the rule's.
    """

    subject: str
    what: str
    found: str = ""
    expected: str = ""
    where: str = ""
    level: str = ""


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((files("buildctl") / "data" / "rules.toml").read_text(encoding="utf-8"))


def _rules() -> tuple[Rule, ...]:
    return tuple(Rule(**{name: entry[name] for name in _COMMON},
                      options={name: value for name, value in entry.items() if name not in _COMMON})
                 for entry in _data()["rule"])


def driver_floors() -> dict[str, str]:
    """CUDA major -> lowest branch of the NVIDIA driver."""
    return dict(_data()["driver"])


RULES = _rules()
