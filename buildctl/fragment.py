"""Dockerfile fragments: what buildctl has to know of a Dockerfile to join several into one.

Only stage names and the places that a stage reads from are understood; everything else passes through as written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
        """Paths of the build context that this stage mounts or copies."""
        paths: list[str] = []
        for instruction in instructions(self.body):
            word, _, rest = instruction.partition(" ")
            if word.upper() in ("COPY", "ADD") and "--from=" not in instruction:
                words = [part for part in rest.split() if not part.startswith("--")]
                paths += words[:-1]
            paths += [fields["source"] for fields in _mounts(instruction)
                      if fields.get("type", "bind") == "bind" and "from" not in fields and "source" in fields]
        return tuple(dict.fromkeys(path.strip("/") for path in paths))

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


def parse(text: str, where: str, problems: Problems) -> tuple[Stage, ...]:
    """Split a fragment into its stages; what does not fit goes to `problems`."""
    stages: list[Stage] = []
    name = base = ""
    body: list[str] = []
    started = False
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
            stages.append(Stage(name, base, "".join(body)))
        if not match["name"]:
            problems.add("a stage without a name", f"{where}:{number}", expected="FROM NAME AS STAGE")
        if match["name"] in [stage.name for stage in stages]:
            problems.add(f"two stages are called '{match['name']}'", f"{where}:{number}")
        started, name, base, body = True, match["name"] or f"line{number}", match["base"], []
    if started:
        stages.append(Stage(name, base, "".join(body)))
    else:
        problems.add("a Dockerfile without FROM", where, expected="FROM parent AS layer")
    return tuple(stages)


def instructions(body: str) -> Iterator[str]:
    """The instructions of a stage, each on one line, without comments and heredoc bodies."""
    current = ""
    for _, line, inside in _lines(body):
        if inside or not line.strip() or line.lstrip().startswith("#"):
            continue
        stripped = line.strip()
        if stripped.endswith("\\"):
            current += stripped[:-1].rstrip() + " "
        else:
            yield (current + stripped).strip()
            current = ""
    if current:
        yield current.strip()


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


def _mounts(instruction: str) -> Iterator[dict[str, str]]:
    for text in _MOUNT.findall(instruction):
        yield dict(part.split("=", 1) if "=" in part else (part, "") for part in text.split(","))
