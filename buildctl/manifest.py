"""YAML manifests with places: every problem names its file and line, and all of them are reported at once.

A manifest is composed into nodes (never constructed, so no tag can run code), then read field by field through a
`Table`, which notes what is wrong and goes on with a harmless value. `Problems.raise_any` ends the reading.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from buildctl.errors import BuildctlError, ManifestError, Problem

Scalar = str | int | float | bool
T = TypeVar("T")

_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KINDS = {"str": "text", "int": "a number", "float": "a number", "bool": "true or false", "null": "nothing",
          "timestamp": "a date", "seq": "a list", "map": "a mapping"}


class Problems:
    """Collects problems and raises them together."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, what: str, where: str = "", *, found: str = "", expected: str = "", todo: str = "") -> None:
        """Note one problem."""
        self.found.append(Problem(what, where, found, expected, todo))

    def raise_any(self, error: type[BuildctlError] = ManifestError) -> None:
        """Raise all noted problems as one `error`, if there are any."""
        if self.found:
            raise error(self.found)


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the known words when none is near."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(words)}" if words else ""


class Table:
    """One mapping of a manifest. Fields that nobody asked for are unknown, and `close` says so."""

    def __init__(self, node: yaml.Node, path: str, problems: Problems, name: str) -> None:
        self.path, self.problems, self.name, self.node = path, problems, name, node
        self._fields: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        self._asked: set[str] = set()
        if not isinstance(node, yaml.MappingNode):
            self._wrong(node, name, "a mapping")
            return
        for key, value in node.value:
            text = key.value if isinstance(key, yaml.ScalarNode) else None
            if text is None:
                problems.add(f"a key of {name} is not a word", self.where(key))
            elif text in self._fields:
                first = self._fields[text][0].start_mark.line + 1
                problems.add(f"'{text}' stands twice in {name}", self.where(key), found=f"first on line {first}",
                             todo="keep one of the two")
            else:
                self._fields[text] = (key, value)

    def where(self, node: yaml.Node | None = None) -> str:
        """`file:line` of a node, or of this table."""
        return f"{self.path}:{(node or self.node).start_mark.line + 1}"

    def place(self, key: str) -> str:
        """`file:line` of a field, or of this table when the field is absent."""
        return self.where(self._fields[key][0] if key in self._fields else None)

    def has(self, key: str) -> bool:
        """Whether the field is written; asking for it makes it a known one."""
        self._asked.add(key)
        return key in self._fields

    def keys(self) -> list[str]:
        """All written keys, for tables whose keys are free; makes them known."""
        self._asked.update(self._fields)
        return list(self._fields)

    def string(self, key: str, default: str | None = None, *, pattern: str | None = None, expected: str = "") -> str:
        """A text field; required when there is no default; `pattern` must match the whole text."""
        node = self._get(key, required=default is None)
        if node is None:
            return default or ""
        return self._text(node, f"'{key}' of {self.name}", pattern, expected)

    def strings(self, key: str, *, required: bool = False, pattern: str | None = None,
                expected: str = "") -> tuple[str, ...]:
        """A list of texts."""
        node = self._get(key, required=required)
        return tuple(self._text(item, f"an entry of '{key}'", pattern, expected)
                     for item in self._items(node, key))

    def placed_strings(self, key: str) -> tuple[tuple[str, str], ...]:
        """A list of texts, each with its `file:line`."""
        node = self._get(key, required=False)
        return tuple((self._text(item, f"an entry of '{key}'"), self.where(item)) for item in self._items(node, key))

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of a few words."""
        value = self.string(key, default)
        if self.has(key) and value and value not in choices:
            self.problems.add(f"'{key}' of {self.name} is not one of the known words", self.place(key), found=value,
                              expected=" | ".join(choices), todo=suggest(value, choices))
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        """true or false."""
        node = self._get(key, required=False)
        if node is None:
            return default
        value = self._scalar(node)
        if isinstance(value, bool):
            return value
        self._wrong(node, f"'{key}' of {self.name}", "true or false")
        return default

    def table(self, key: str, *, required: bool = False) -> Table | None:
        """A nested mapping."""
        node = self._get(key, required=required)
        if node is None:
            return None
        return Table(node, self.path, self.problems, f"'{key}'")

    def tables(self, key: str) -> tuple[Table, ...]:
        """A list of mappings."""
        node = self._get(key, required=False)
        return tuple(Table(item, self.path, self.problems, f"an entry of '{key}'")
                     for item in self._items(node, key))

    def mapping(self, key: str, read: Callable[[Table, str], T]) -> dict[str, T]:
        """A mapping with free keys; `read(table, key)` reads each value."""
        table = self.table(key)
        return {} if table is None else {word: read(table, word) for word in table.keys()}  # noqa: SIM118 - marks known

    def scalars(self, key: str) -> dict[str, Scalar]:
        """A mapping with free keys and scalar values (text, number, true, false)."""
        return self.mapping(key, Table.scalar)

    def scalar(self, key: str) -> Scalar:
        """A text, number or boolean field."""
        node = self._get(key, required=True)
        value = self._scalar(node) if node is not None else None
        if value is None and node is not None:
            self._wrong(node, f"'{key}' of {self.name}", "text, a number, true or false")
        return "" if value is None else value

    def close(self) -> None:
        """Say which written keys nobody knows."""
        for key, (node, _) in self._fields.items():
            if key not in self._asked:
                self.problems.add(f"unknown key '{key}' in {self.name}", self.where(node),
                                  todo=suggest(key, self._asked))

    def _get(self, key: str, *, required: bool) -> yaml.Node | None:
        self._asked.add(key)
        if key in self._fields:
            return self._fields[key][1]
        if required and isinstance(self.node, yaml.MappingNode):
            self.problems.add(f"{self.name} has no '{key}'", self.where(), todo=f"add '{key}:'")
        return None

    def _items(self, node: yaml.Node | None, key: str) -> Iterator[yaml.Node]:
        if node is None:
            return
        if not isinstance(node, yaml.SequenceNode):
            self._wrong(node, f"'{key}' of {self.name}", "a list")
            return
        yield from node.value

    def _text(self, node: yaml.Node, name: str, pattern: str | None = None, expected: str = "") -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.tag.endswith(":str"):
            todo = f'write it in quotes: "{node.value}"' if isinstance(node, yaml.ScalarNode) and node.value else ""
            self._wrong(node, name, "text", todo)
            return ""
        if pattern is not None and not re.fullmatch(pattern, node.value):
            self.problems.add(f"{name} has a form that is not allowed", self.where(node), found=repr(node.value),
                              expected=expected or f"text that matches {pattern}")
            return ""
        return str(node.value)

    def _scalar(self, node: yaml.Node) -> Scalar | None:
        if not isinstance(node, yaml.ScalarNode):
            return None
        kind = node.tag.rsplit(":", 1)[-1]
        try:
            match kind:
                case "bool":
                    return str(node.value).lower() in ("true", "yes", "on")
                case "int":
                    return int(node.value, 0)
                case "float":
                    return float(node.value)
                case "str":
                    return str(node.value)
        except ValueError:
            return str(node.value)
        return None

    def _wrong(self, node: yaml.Node, name: str, expected: str, todo: str = "") -> None:
        kind = node.tag.rsplit(":", 1)[-1]
        shown = _KINDS.get(kind, f"the tag {node.tag}")
        if isinstance(node, yaml.ScalarNode) and node.value:
            shown += f" ({node.value})"
        self.problems.add(f"{name} has the wrong type", self.where(node), found=shown, expected=expected, todo=todo)


def load(path: Path, shown: str, problems: Problems, name: str) -> Table | None:
    """Read one YAML file.

    :param shown: the file's name in messages, relative to the project.
    :returns: None when the file cannot be read at all; the reason is in `problems`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        problems.add(f"cannot read {name}", shown, found=error.strerror or str(error))
        return None
    except UnicodeDecodeError as error:
        problems.add(f"{name} is not UTF-8 text", shown, found=f"byte {error.start}: {error.reason}")
        return None
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problems.add(f"{name} is not valid YAML", f"{shown}:{line}", found=error.problem or str(error),
                     todo="mend the indentation, quotes or colons near this line")
        return None
    except yaml.YAMLError as error:
        problems.add(f"{name} is not valid YAML", shown, found=str(error).splitlines()[0])
        return None
    if node is None:
        problems.add(f"{name} is empty", f"{shown}:1", expected="a mapping")
        return None
    return Table(node, shown, problems, name)
