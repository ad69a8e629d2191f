"""Dockerfile fragments: what buildctl has to know of a Dockerfile to join several into one.

Only stage names, the places that a stage reads from and the variables that it sets are understood; everything else
passes through as written.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from buildctl.manifest import Problems

_FROM = re.compile(r"^FROM\s+(?P<base>\S+)(?:\s+AS\s+(?P<name>[a-z][a-z0-9-]*))?\s*$", re.IGNORECASE)
_HEREDOC = re.compile(r"<<-?\s*[\"']?([A-Za-z_][A-Za-z0-9_]*)[\"']?")
_COPY_FROM = re.compile(r"--from=([^\s]+)")
_MOUNT = re.compile(r"--mount=(\S+)")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a fragment: its name, what it stands on, and its text without the FROM line."""

    name: str
    base: str
    body: str

    def stages_used(self) -> tuple[str, ...]:
        """Names of the stages that this one stands on, copies from or mounts, in order of appearance."""
        names = [self.base]
        for instruction in instructions(self.body):
            if instruction.upper().startswith("COPY"):
                names += _COPY_FROM.findall(instruction)
            names += [fields["from"] for fields in _mounts(instruction) if "from" in fields]
        return tuple(dict.fromkeys(names))

    def paths_used(self) -> tuple[str, ...]:
        """Paths of the build context that this stage mounts or copies; `.` is all of it."""
        paths: list[str] = []
        for instruction in instructions(self.body):
            word, rest = split(instruction)
            if word in ("COPY", "ADD") and "--from=" not in instruction:
                paths += _sources(rest)
            paths += [fields.get("source") or fields.get("src") or "." for fields in _mounts(instruction)
                      if fields.get("type", "bind") == "bind" and "from" not in fields]
        return tuple(dict.fromkeys(posixpath.normpath(path.strip("/")) for path in paths))

    def renamed(self, names: dict[str, str]) -> Stage:
        """The stage with every stage name replaced that `names` knows."""
        def known(name: str) -> str:
            return names.get(name, name)

        body = _COPY_FROM.sub(lambda match: f"--from={known(match[1])}", self.body)
        body = re.sub(r"(--mount=\S*?\bfrom=)([a-z][a-z0-9-]*)", lambda match: match[1] + known(match[2]), body)
        return Stage(known(self.name), known(self.base), body)

    def text(self) -> str:
        """The stage as Dockerfile text."""
        return f"FROM {self.base} AS {self.name}\n{self.body}"


#: instructions that make a layer
_LAYERS = ("RUN", "COPY", "ADD", "WORKDIR")


def below(stages: Iterable[Stage], target: str) -> list[Stage]:
    """A stage with those that it stands on, the lowest first."""
    by_name = {stage.name: stage for stage in stages}
    found: list[Stage] = []
    while target in by_name:
        found.insert(0, by_name[target])
        target = by_name[target].base
    return found


def layers(stages: Iterable[Stage], target: str) -> int:
    """How many layers the steps of a stage and of those that it stands on make; those of a base image not counted."""
    return sum(split(instruction)[0] in _LAYERS for stage in below(stages, target)
               for instruction in instructions(stage.body))


def parse(text: str, where: str, problems: Problems) -> tuple[Stage, ...]:
    """Split a fragment into its stages; what does not fit goes to `problems`."""
    stages: list[Stage] = []
    name = base = ""
    body: list[str] = []
    started, first = False, 0

    def end() -> None:
        stage = Stage(name, base, "".join(body))
        stages.append(stage)
        _check_variables(stage.body, where, first, problems)

    for number, line, inside in _lines(text):
        match = None if inside else _FROM.match(line)
        if match is None:
            if not inside and line.upper().startswith("FROM "):
                problems.add("a FROM line that cannot be joined", f"{where}:{number}", found=line.strip(),
                             expected="FROM NAME AS STAGE, without platform or variables")
            if started:
                body.append(line)
            elif line.strip() and not line.startswith("#"):
                problems.add("an instruction before the first FROM", f"{where}:{number}", found=line.strip(),
                             todo="move it below a FROM line")
            continue
        if started:
            end()
        if not match["name"]:
            problems.add("a stage without a name", f"{where}:{number}", expected="FROM NAME AS STAGE")
        if match["name"] in [stage.name for stage in stages]:
            problems.add(f"two stages are called '{match['name']}'", f"{where}:{number}")
        started, first, name, base, body = True, number, match["name"] or f"line{number}", match["base"], []
    if started:
        end()
    else:
        problems.add("a Dockerfile without FROM", where, expected="FROM parent AS layer")
    return tuple(stages)


def _check_variables(body: str, where: str, first: int, problems: Problems) -> None:
    for number, instruction in _numbered(body):
        word, rest = split(instruction)
        try:
            if word == "ENV":
                variables(rest)
        except ValueError as error:
            problems.add("an ENV line that nobody can read", f"{where}:{first + number}",
                         found=f"{instruction}: {error}",
                         expected="ENV NAME=VALUE, the value in quotes where it has spaces")


def instructions(body: str) -> Iterator[str]:
    """The instructions of a stage, each on one line, without comments and heredoc bodies."""
    return (instruction for _, instruction in _numbered(body))


def _numbered(body: str) -> Iterator[tuple[int, str]]:
    """Each instruction with the line that it begins on."""
    current, first = "", 0
    for number, line, inside in _lines(body):
        if inside or not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first or number
        stripped = line.strip()
        if stripped.endswith("\\"):
            current += stripped[:-1].rstrip() + " "
        else:
            yield first, (current + stripped).strip()
            current, first = "", 0
    if current:
        yield first, current.strip()


def split(instruction: str) -> tuple[str, str]:
    """The word that an instruction begins with, in capitals, and the rest."""
    word, *rest = instruction.split(None, 1)
    return word.upper(), rest[0] if rest else ""


def variables(rest: str) -> dict[str, str]:
    """What an ENV instruction sets, as Docker reads its two forms: `NAME=VALUE ...` and the older `NAME VALUE`, where
    the value goes to the end of the line. Variables in values are not expanded.

    :param rest: what follows ENV.
    :raises ValueError: Docker takes it in neither form.
    """
    words = rest.split(None, 1)
    if len(words) < 2 and "=" not in rest:
        raise ValueError("no value")
    if "=" not in words[0]:
        name, value = words
        line = shlex.shlex(value, posix=True)
        line.whitespace, line.commenters, line.whitespace_split = "", "", True  # one word, without its quotes
        return {name: line.read_token() or ""}
    found = {}
    for pair in shlex.split(rest):
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"no NAME= in '{pair}'")
        found[name] = value
    return found


def heredocs(body: str) -> Iterator[str]:
    """The lines of a stage's heredocs, which `instructions` leaves out."""
    return (line for _, line, inside in _lines(body) if inside)


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Number, line, and whether the line belongs to a heredoc's body."""
    waiting: list[str] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if waiting:
            if line.strip() == waiting[0]:
                waiting.pop(0)
            yield number, line, True
            continue
        if not line.lstrip().startswith("#"):
            waiting = _HEREDOC.findall(line)
        yield number, line, False


def _sources(rest: str) -> list[str]:
    """What a COPY or ADD takes from the context; heredocs and addresses are not in it."""
    words = [part for part in rest.split() if not part.startswith("--")]
    if words and words[0].startswith("["):
        with contextlib.suppress(ValueError):  # then it is no list for Docker, either
            words = [str(word) for word in json.loads(rest[rest.index("["):])]
    return [word for word in words[:-1] if not word.startswith("<<") and "://" not in word]


def _mounts(instruction: str) -> Iterator[dict[str, str]]:
    for text in _MOUNT.findall(instruction):
        yield dict(part.split("=", 1) if "=" in part else (part, "") for part in text.split(","))
