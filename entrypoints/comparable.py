"""Runs that are to be compared with each other: read, grouped, and held against each other.

What is under test may differ: the image with its packages, patches and environment. Whatever else differs is refused by
name, all of it at once. Differences of machine and flags can be accepted one by one; those of the work cannot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrypoints import records, result
from entrypoints.errors import EntrypointError, Invalid, Problem, Usage
from entrypoints.plan import flags_of

#: entries of the plan that say what work was done and how it is judged; the number of pairs is free
_WORK = ("load_points", "rate", "passes", "max_tokens", "temperature", "ignore_eos", "warmup", "client", "order_seed",
         "margin", "alpha_total", "primary_endpoint", "half")
_MACHINE = ("cpu", "cores_usable", "ram_gb", "kernel", "driver", "numa_nodes", "gpus", "p2p", "topology")
#: flags that name files or ports; models are compared by content
_PLACES = frozenset({"model-path", "speculative-draft-model-path", "host", "port", "nccl-port"})
#: differences that a user may accept, and what to do about each kind
_REMEDIES: Mapping[str, str] = {
    "machine.": "measure both on one machine in one state, or accept it: --allow {name}",
    "arms.": "give the same words after -- to both; if the flag belongs to what is under test: --allow {name}",
    "model.": "benchmark both with the same model files",
    "": "benchmark both with the same options (`buildctl bench IMAGE IMAGE` does)"}
ACCEPTABLE = ("machine.", "arms.")
OVERLAP = "machine.overlap"


@dataclass(frozen=True)
class Run:
    """One run: its folder, the group that it belongs to, its result and its requests."""

    folder: Path
    group: str
    result: Mapping[str, Any] = field(repr=False)
    requests: Sequence[Mapping[str, Any]] = field(repr=False)

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan of the run."""
        found: Mapping[str, Any] = self.result["plan"]
        return found

    @property
    def begin(self) -> str:
        """When it started, as text that sorts by time."""
        return str(self.result.get("started_at") or "")

    @property
    def end(self) -> str:
        """When it ended."""
        return str(self.result.get("ended_at") or "")

    @property
    def arms(self) -> list[str]:
        """Its arms without controls, the baseline first."""
        return [arm["name"] for arm in self.plan["arms"] if not arm["control"]]


def read(words: Sequence[str]) -> list[Run]:
    """Runs from `DIR` and `NAME=DIR`. A folder without a name belongs to the group of its image.

    Raises `Usage`, `InputMissing` or `BadConfig`, with every folder that cannot be read.
    """
    runs: list[Run] = []
    failed: list[EntrypointError] = []
    for word in words:
        name, given, rest = word.partition("=")
        named = bool(given) and not Path(word).is_dir()
        folder = Path(rest if named else word)
        try:
            found = result.assemble(folder)
            requests = records.lines(folder / records.REQUESTS)
        except EntrypointError as error:
            failed.append(error)
            continue
        runs.append(Run(folder, name if named else image_name(found["plan"]["image"]), found, requests))
    if failed:
        raise type(failed[0])(problem for error in failed for problem in error.problems)
    _refuse_words(runs, words)
    return runs


def _refuse_words(runs: Sequence[Run], words: Sequence[str]) -> None:
    seen: dict[str, Path] = {}
    problems = []
    for run in runs:
        number = run.plan["run_id"]
        if number in seen:
            problems.append(Problem(what="the same run twice", where=f"{seen[number]} and {run.folder}", found=number,
                                    expected="each run once"))
        seen.setdefault(number, run.folder)
    if len(dict.fromkeys(run.group for run in runs)) < 2:
        problems.append(Problem(
            what="nothing to compare", where="compare", found=f"{len(words)} runs of {runs[0].group if runs else '-'}",
            expected="runs of two images or more",
            todo="name runs of different images; for other things under test name the groups: old=DIR new=DIR"))
    if problems:
        raise Usage(problems)


def image_name(image: Mapping[str, Any]) -> str:
    """An image for people: name, version, stack and the head of its content key."""
    return f"{image['image']} {image['version']} ({image['stack']}, {image['key'][:12]})"


def groups(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group to its runs in the order of time; the group of the first run named is the reference and comes first."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.group, []).append(run)
    return {name: sorted(members, key=lambda run: run.begin) for name, members in found.items()}


def facts(run: Run) -> dict[str, Any]:
    """Everything that must be the same in all runs, flat, by the names that are shown."""
    plan, machine = run.plan, run.result.get("machine") or {}
    found: dict[str, Any] = {name: plan.get(name) for name in _WORK}
    found["prompts.sha256"] = plan["prompts"].get("sha256")
    found["prompts.ids"] = plan["prompts"].get("ids")
    found["prompts.rendered_ids_sha256"] = run.result["prompts"].get("rendered_ids_sha256")
    found.update({f"machine.{name}": machine.get(name) for name in _MACHINE})
    if not machine.get("gpus"):  # GPUs have numbers of their own; without any only the machine's identity is left
        found["machine.id"] = machine.get("id")
    models = (run.result.get("software") or {}).get("models") or {}
    for role in ("model", "draft"):
        one = models.get(role) or {}
        found[f"model.{role}"] = one.get("sha256") or one.get("revision") or one.get("name")
    found["arms.names"] = run.arms
    for arm in plan["arms"]:
        if arm["control"]:
            continue
        given = flags_of(arm["argv"])
        found.update({f"arms.{arm['name']}.{flag}": value for flag, value in given.items() if flag not in _PLACES})
    return found


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Name to the value in each run, for everything that is not the same in all."""
    found = _unequal([facts(run) for run in runs])
    if pairs := overlaps(runs):
        found[OVERLAP] = [f"{one.folder} {one.begin} to {one.end}" for pair in pairs for one in pair]
    return found


def overlaps(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Runs that were under way at the same time."""
    timed = sorted((run for run in runs if run.begin and run.end), key=lambda run: run.begin)
    return [(one, other) for one, other in itertools.combinations(timed, 2) if other.begin < one.end]


def refuse(runs: Sequence[Run], allow: Iterable[str] = ()) -> dict[str, list[Any]]:
    """Refuse runs that cannot be compared; the accepted differences with their values.

    Raises `Usage` for names in `allow` that may not be accepted and `Invalid` with every reason.
    """
    accepted = set(allow)
    wrong = sorted(name for name in accepted if not name.startswith(ACCEPTABLE))
    if wrong:
        raise Usage(Problem(what="this difference cannot be accepted", where="--allow", found=", ".join(wrong),
                            expected=" or ".join(f"{one}NAME" for one in ACCEPTABLE),
                            todo="runs that did other work say nothing about each other: measure again"))
    found = differences(runs)
    problems = [Problem(what="the run is invalid, and so is a comparison with it", where=str(run.folder),
                        found="; ".join(run.result["verdict"]["invalid_causes"]), expected="a valid run",
                        todo="see its report.md; measure again")
                for run in runs if run.result["verdict"]["class"] == "invalid"]
    problems += mixed(runs)
    for name, values in found.items():
        if name not in accepted:
            remedy = next(text for prefix, text in _REMEDIES.items() if name.startswith(prefix))
            problems.append(Problem(
                what=f"the runs cannot be compared: {name} differs", where=", ".join(str(run.folder) for run in runs),
                found=_listed(values), expected="the same in all runs" if name != OVERLAP else "one after the other",
                todo=remedy.format(name=name)))
    if problems:
        raise Invalid(problems)
    return {name: values for name, values in found.items() if name in accepted}


def _listed(values: Iterable[Any]) -> str:
    texts = ["absent" if value is None else str(value) or "given" for value in values]  # a flag without a value
    return " | ".join(text if len(text) <= 60 else f"{text[:57]}..." for text in dict.fromkeys(texts))


def mixed(runs: Sequence[Run]) -> list[Problem]:
    """Groups whose runs are not all of one image in one environment."""
    problems = []
    for name, members in groups(runs).items():
        wrong = _unequal([identity(run) for run in members])
        if "key" in wrong:  # the packages say nothing new then
            wrong = {"key": wrong["key"]}
        problems += [Problem(what=f"the runs of a group differ: {key}", where=name, found=_listed(values),
                             expected="one image in one environment", todo="give them groups of their own: NAME=DIR")
                     for key, values in wrong.items()]
    return problems


def _unequal(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name to the value in each table, for everything that is not the same in all."""
    names = dict.fromkeys(itertools.chain.from_iterable(tables))
    found = {name: [table.get(name) for table in tables] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def identity(run: Run) -> dict[str, Any]:
    """What may be under test, flat: the image with its packages and patches, and the servers' environment."""
    image = run.plan["image"]
    found = {key: image.get(key) for key in ("key", "stack", "version", "cuda")}
    for name, table in (("packages", image.get("packages")), ("trees", image.get("trees")),
                        ("environment", run.plan.get("environment"))):
        found.update({f"{name}.{key}": value for key, value in (table or {}).items()})
    return found


def under_test(reference: Run, other: Run) -> dict[str, list[Any]]:
    """What differs between two groups: what a comparison is about."""
    return _unequal([identity(reference), identity(other)])
