"""`compare`: decode rates of one image against another's, from whole runs. Pure but for reading and printing.

Runs of different images are never interleaved block by block, so the design of the runs decides what can be said:

- `interleaved`: the runs of the images alternate (A B B A ...). Neighbouring runs are a pair, a t interval over the
  pairs, as within a run.
- `runs`: several runs of each image, in another order. Welch's t interval over the means of the runs.
- `blocks`: a single run of some image. Welch's t interval over the server starts.

In the last two a shift of the machine between the runs looks like an effect. The interval is therefore wider by a
declared allowance for it; without one such comparisons find an effect where there is none in 19 to 43 % of all cases
under a drift of 3 % (tests/unit/entrypoints/test_compare_simulation.py). The gain of a candidate over its baseline is
taken within each run, where both arms are interleaved: a shift of the machine cancels out in it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
from scipy import stats

from entrypoints import analyse, comparable, equivalence, records
from entrypoints.analyse import Array, Interval, finite
from entrypoints.comparable import Run
from entrypoints.errors import VERDICT_CODES, Problem, Usage
from entrypoints.report import interval as shown_interval
from entrypoints.report import number, table
from entrypoints.result import percent
from entrypoints.settings import Parser

SCHEMA_VERSION = 1
#: shift of a machine between two runs that is allowed for: more than the drift of 3 % that ABBA is designed against
DRIFT = 0.05
INTERLEAVED, RUNS, BLOCKS = "interleaved", "runs", "blocks"
#: row kinds: the rate of an arm, and the candidate's gain over the baseline of its own run
RATE, GAIN = "rate", "gain"


@dataclass(frozen=True)
class Estimate:
    """A difference of means of logs with its standard error; `df` 0 when the spread is not known."""

    mean: float
    error: float
    df: float

    def interval(self, alpha: float, allowance: float = 0.0) -> Interval:
        """Two-sided t interval, wider by `allowance` (a log ratio) at both ends."""
        if self.df <= 0:
            return Interval(self.mean, -math.inf, math.inf, 0.0)
        half = (float(stats.t.ppf(1 - alpha / 2, self.df)) * self.error if self.error else 0.0) + allowance
        return Interval(self.mean, self.mean - half, self.mean + half, self.df)

    def p(self, allowance: float = 0.0) -> float | None:
        """p value against a true difference of at most `allowance`; 0 or 1 where every value was the same."""
        if self.df <= 0:
            return 1.0
        if self.error == 0:
            return float(abs(self.mean) <= allowance)
        return finite(min(1.0, 2 * float(stats.t.sf((abs(self.mean) - allowance) / self.error, self.df))))


def paired(values: Array) -> Estimate:
    """The mean of differences of pairs."""
    if values.size < 2:
        return Estimate(float(values.mean()), 0.0, 0.0)
    return Estimate(float(values.mean()), float(np.std(values, ddof=1)) / math.sqrt(values.size), values.size - 1.0)


def welch(reference: Array, other: Array) -> Estimate:
    """The difference of the means of two samples of unequal variance (degrees of freedom by Satterthwaite)."""
    mean = float(other.mean() - reference.mean())
    if reference.size < 2 or other.size < 2:
        return Estimate(mean, 0.0, 0.0)
    parts = [float(np.var(one, ddof=1)) / one.size for one in (reference, other)]
    total = sum(parts)
    if total == 0:
        return Estimate(mean, 0.0, float(reference.size + other.size - 2))
    df = total ** 2 / (parts[0] ** 2 / (reference.size - 1) + parts[1] ** 2 / (other.size - 1))
    return Estimate(mean, math.sqrt(total), df)


def rounds(order: Sequence[str]) -> bool:
    """Whether groups, in the order of time, alternate: each round has every group once, and who is first changes.

    Of any two groups each goes first equally often, but for one round at most: then a slow drift cancels out.
    """
    names = list(dict.fromkeys(order))
    size = len(names)
    parts = [list(order[place:place + size]) for place in range(0, len(order), size)]
    if len(parts) < 2 or any(sorted(part) != sorted(names) for part in parts):
        return False
    return all(abs(sum(1 if part.index(one) < part.index(other) else -1 for part in parts)) <= 1
               for one in names for other in names if one != other)


def design(runs: Sequence[Run]) -> str:
    """How the runs were taken: `interleaved`, `runs` or `blocks`."""
    if all(run.begin for run in runs) and rounds([run.group for run in sorted(runs, key=lambda run: run.begin)]):
        return INTERLEAVED
    return RUNS if all(len(members) > 1 for members in comparable.groups(runs).values()) else BLOCKS


#: one run's server starts: pair and prompt to log rate
Rates = Mapping[tuple[int, str], float]


def rates(run: Run, arm: str, point: int) -> Rates:
    """Log decode rates of an arm at a load point, from the blocks that count."""
    usable = {block["index"] for block in run.result["blocks"] if block["validity"]["ok"]}
    return analyse.log_rates(row for row in run.requests if row["block"] in usable and row["arm"] == arm
                             and row["concurrency"] == point and analyse.measurable(row))


def gains(base: Rates, candidate: Rates) -> Rates:
    """Log ratios of two arms of one run, for pairs and prompts that both have."""
    return {key: candidate[key] - base[key] for key in base if key in candidate}


def matched(samples: Sequence[Rates]) -> list[Array]:
    """For each run the means of its blocks, over the prompts that every block of every run has."""
    common: set[str] | None = None
    for sample in samples:
        for pair in {pair for pair, _ in sample}:
            mine = {prompt for other, prompt in sample if other == pair}
            common = mine if common is None else common & mine
    prompts = sorted(common or ())
    return [np.array([np.mean([sample[pair, prompt] for prompt in prompts]) for pair in
                      sorted({pair for pair, _ in sample})]) if prompts else np.array([]) for sample in samples]


def estimate(reference: Sequence[Array], other: Sequence[Array], basis: str) -> Estimate:
    """The difference between two groups, each a list of runs in the order of time, each run the means of its blocks."""
    if basis == BLOCKS:
        return welch(np.concatenate(list(reference)), np.concatenate(list(other)))
    here = np.array([float(blocks.mean()) for blocks in reference])
    there = np.array([float(blocks.mean()) for blocks in other])
    return paired(there - here) if basis == INTERLEAVED else welch(here, there)


def row(kind: str, arm: str, point: int, names: tuple[str, str], samples: tuple[Sequence[Rates], Sequence[Rates]],
        basis: str, allowance: float) -> dict[str, Any]:
    """One comparison without its verdict, see `judge`."""
    blocks = matched([*samples[0], *samples[1]])
    found: dict[str, Any] = {
        "kind": kind, "arm": arm, "concurrency": point, "reference": names[0], "image": names[1],
        "runs": [len(side) for side in samples], "allowance": allowance if kind == RATE else 0.0}
    if not blocks or any(not one.size for one in blocks):
        return {**found, "ratio": None, "levels": None, "blocks": None, "estimate": None, "p_t": 1.0}
    here, there = blocks[:len(samples[0])], blocks[len(samples[0]):]
    one = estimate(here, there, basis)
    return {**found, "ratio": finite(math.exp(one.mean)), "estimate": one,
            "levels": [finite(math.exp(float(np.concatenate(side).mean())), 4) for side in (here, there)],
            "blocks": [sum(part.size for part in side) for side in (here, there)],
            "p_t": one.p(math.log1p(found["allowance"]))}


def judge(one: dict[str, Any], alpha: float, margin: float, basis: str) -> None:
    """Interval and verdict of a row at a level."""
    estimated: Estimate | None = one.pop("estimate")
    one.update(alpha_used=alpha, verdict="inconclusive", ci=[None, None], bears=None, rounds_needed=None)
    if estimated is None:
        return
    interval = estimated.interval(alpha, math.log1p(one["allowance"]))
    one.update(ci=interval.ratio(), verdict=analyse.classify(interval, margin))
    plain = estimated.interval(alpha)
    if basis != INTERLEAVED and one["kind"] == RATE and not plain.low <= 0 <= plain.high:
        one["bears"] = finite(math.expm1(min(abs(plain.low), abs(plain.high))))
    if basis == INTERLEAVED and one["verdict"] == "inconclusive" and estimated.df > 0 and estimated.error:
        sd = estimated.error * math.sqrt(estimated.df + 1)
        one["rounds_needed"] = analyse.pairs_needed(estimated.mean, sd, margin, alpha)


def compare(runs: Sequence[Run], *, drift: float = DRIFT, allow: Sequence[str] = ()) -> dict[str, Any]:
    """The whole comparison as a document. Raises `Usage` and `Invalid` for runs that cannot be compared."""
    accepted = comparable.refuse(runs, allow)
    members = comparable.groups(runs)
    reference, *others = members
    plan, basis = runs[0].plan, design(runs)
    allowance = 0.0 if basis == INTERLEAVED else drift
    primary: list[dict[str, Any]] = []
    secondary: list[dict[str, Any]] = []
    end = plan["primary_endpoint"]
    # runs of the baseline against itself have no candidate: then the baseline's rate is the question
    asked = end["candidate"] if end["candidate"] in runs[0].arms else end["baseline"]
    for other in others:
        for one in _rows(members, (reference, other), basis, allowance):
            first = (one["kind"], one["arm"], one["concurrency"]) == (RATE, asked, end["concurrency"])
            (primary if first else secondary).append(one)
    for family in (primary, secondary):
        levels = analyse.holm(family, plan["alpha_total"])
        for one, level in zip(family, levels, strict=True):
            judge(one, level, plan["margin"], basis)
    lengths = {other: _lengths(members[reference], members[other], runs[0].arms) for other in others}
    causes = [f"{arm} of {other} answers {change:+.0%} longer than that of {reference}: not the same work"
              for other, found in lengths.items() for arm, change in found.items()
              if abs(change) > analyse.LENGTH_LIMIT]
    verdict = "invalid" if causes else overall([one["verdict"] for one in primary])
    return {
        "schema_version": SCHEMA_VERSION, "verdict": verdict, "exit_code": VERDICT_CODES[verdict],
        "headline": headline(verdict, primary, basis), "invalid_causes": causes, "basis": basis,
        "allowance": allowance, "margin": plan["margin"], "alpha_total": plan["alpha_total"], "reference": reference,
        "groups": {name: [{"folder": str(run.folder), "run_id": run.plan["run_id"], "started_at": run.begin,
                           "ended_at": run.end, "image": dict(run.plan["image"]),
                           "raw_sha256": run.result["raw_sha256"], "verdict": run.result["verdict"]["class"]}
                          for run in found] for name, found in members.items()},
        "under_test": {other: comparable.under_test(members[reference][0], members[other][0]) for other in others},
        "accepted": accepted, "output": {other: _output(members[reference], members[other]) for other in others},
        "comparison": [*primary, *secondary]}


def _rows(members: Mapping[str, Sequence[Run]], names: tuple[str, str], basis: str,
          allowance: float) -> list[dict[str, Any]]:
    first = members[names[0]][0]
    base, *candidates = first.arms
    found = []
    for point in first.plan["load_points"]:
        by_arm = {arm: tuple([rates(run, arm, point) for run in members[name]] for name in names)
                  for arm in (base, *candidates)}
        found += [row(RATE, arm, point, names, (sides[0], sides[1]), basis, allowance) for arm, sides in by_arm.items()]
        for arm in candidates:
            sides = [[gains(one, other) for one, other in zip(by_arm[base][side], by_arm[arm][side], strict=True)]
                     for side in (0, 1)]
            found.append(row(GAIN, arm, point, names, (sides[0], sides[1]), basis, allowance))
    return found


def overall(verdicts: Sequence[str]) -> str:
    """One verdict for several images: a loss of any counts, a win needs all."""
    if "loss" in verdicts:
        return "loss"
    if "inconclusive" in verdicts or not verdicts:
        return "inconclusive"
    return "equivalent" if "equivalent" in verdicts else "win"


def _lengths(reference: Sequence[Run], other: Sequence[Run], arms: Sequence[str]) -> dict[str, float]:
    """Relative change of the mean answer length, by arm."""
    def mean(runs: Sequence[Run], arm: str) -> float:
        return float(np.mean([one["n_tokens_server"] for run in runs for one in run.requests
                              if one["arm"] == arm and analyse.measurable(one)] or [math.nan]))

    changes = {arm: mean(other, arm) / mean(reference, arm) - 1 for arm in arms}
    return {arm: round(change, 6) for arm, change in changes.items() if math.isfinite(change)}


def _output(reference: Sequence[Run], other: Sequence[Run]) -> dict[str, Any]:
    """Do both images say the same under greedy decoding? Baseline arms, with the reference against itself beside it."""
    def answers(run: Run) -> list[dict[str, Sequence[int]]]:
        arm, point = run.plan["primary_endpoint"]["baseline"], run.plan["load_points"][0]
        blocks: dict[int, dict[str, Sequence[int]]] = {}
        for one in run.requests:
            if one["arm"] == arm and one["pass"] == 0 and one["concurrency"] == point and not one["error"]:
                blocks.setdefault(one["block"], {})[one["prompt_id"]] = one["output_ids"]
        return list(blocks.values())

    def against(one: Mapping[str, Sequence[int]], two: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
        return equivalence.compare((ids, two[prompt]) for prompt, ids in one.items() if prompt in two)

    here = [block for run in reference for block in answers(run)]
    there = [block for run in other for block in answers(run)]
    return {"itself": against(here[0], here[1]) if len(here) > 1 else None,
            "against": against(here[0], there[0]) if here and there else None}


# ---------------------------------------------------------------------------------------------------------------- words

_HOW = {INTERLEAVED: "The runs of the images alternate: pairs of neighbouring runs are compared.",
        RUNS: "Not interleaved: the means of whole runs are compared (Welch's t).",
        BLOCKS: "Not interleaved: server starts of different runs are compared (Welch's t)."}


def headline(verdict: str, primary: Sequence[Mapping[str, Any]], basis: str) -> str:
    """One sentence; never a change without its interval, never a verdict without what it rests on."""
    if verdict == "invalid":
        return "INVALID: these runs say nothing about each other."
    parts = []
    for one in primary:
        if one["ratio"] is None or None in one["ci"]:
            parts.append(f"too little data for an interval of {one['image']} against {one['reference']}")
            continue
        word = {"win": "decodes faster than", "loss": "decodes slower than",
                "equivalent": "is within the margin of"}.get(one["verdict"], "against")
        parts.append(f"{one['image']} {word} {one['reference']} ({one['arm']}, concurrency {one['concurrency']}): "
                     f"{percent(one['ratio'])} ({100 * (1 - one['alpha_used']):g} % interval "
                     f"{shown_interval(one['ci'])})")
    allowed = f" (not interleaved, {100 * primary[0]['allowance']:g} % of drift allowed for)" \
        if basis != INTERLEAVED else ""
    return f"{verdict.upper()}{allowed}: {'; '.join(parts)}."


def notes(found: Mapping[str, Any]) -> list[str]:
    """What a reader must know to read the table."""
    first = found["comparison"][0]
    said = [_HOW[found["basis"]]]
    if found["basis"] != INTERLEAVED:
        said.append(
            f"Drift between the runs is not controlled. Intervals of rates are {100 * found['allowance']:g} % wider at "
            "both ends (--drift) for a machine that was that much faster in one of the runs; gains are taken within "
            "runs and need no such allowance. `buildctl bench IMAGE IMAGE` takes runs alternately.")
        if first["bears"] is not None:
            said.append(f"In the first line the image is {'faster' if first['ratio'] > 1 else 'slower'} as long as the "
                        f"machine shifted by less than {100 * first['bears']:.1f} % between the runs.")
    elif first["rounds_needed"]:
        said.append(f"About {max(first['rounds_needed'] - first['runs'][0], 1)} more rounds would settle the first "
                    "line at this noise.")
    for other, output in found["output"].items():
        if output["against"]:
            itself = f", {100 * output['itself']['exact_share']:.0f} % between two starts of the reference" \
                if output["itself"] else ""
            said.append(f"Greedy answers of {other} equal those of the reference in "
                        f"{100 * output['against']['exact_share']:.0f} % of the prompts{itself}.")
    said += [f"accepted difference: {name}: {' | '.join(map(str, dict.fromkeys(map(str, values))))}"
             for name, values in found["accepted"].items()]
    return said


def render(found: Mapping[str, Any]) -> str:
    """The comparison for people, as Markdown."""
    rows = []
    for one in found["comparison"]:
        levels = one["levels"] or [None, None]
        digits = 2 if one["kind"] == RATE else 3
        rows.append((one["image"], one["arm"] if one["kind"] == RATE else f"gain of {one['arm']}", one["concurrency"],
                     number(levels[0], digits), number(levels[1], digits), number(one["ratio"], 4),
                     shown_interval(one["ci"]), f"{100 * (1 - one['alpha_used']):.4g} %", number(one["p_t"], 4),
                     one["verdict"]))
    head = ("image", "tok/s, or gain over the baseline", "concurrency", "reference", "image", "ratio", "interval",
            "level", "p (t)", "verdict")
    shown: dict[str, int | None] = {"key": 16}  # the head of a hash is enough for people
    under = [(other, name, *(str(value)[:shown.get(name)] for value in values))
             for other, differs in found["under_test"].items() for name, values in differs.items()]
    runs = [(name, one["folder"], one["started_at"], one["ended_at"], one["verdict"])
            for name, members in found["groups"].items() for one in members]
    parts = [f"# {found['headline']}", "\n".join(f"- **invalid**: {cause}" for cause in found["invalid_causes"]),
             f"Reference: {found['reference']}.", table(head, rows),
             "\n".join(f"- {line}" for line in notes(found)),
             "## Under test", table(("image", "", "reference", "image"), under) if under else "The same image.",
             "## Runs", table(("group", "folder", "start", "end", "its own verdict"), runs)]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(words: Sequence[str], out: TextIO | None = None) -> int:
    """The mode `compare`: prints, and the exit code says the verdict. Raises the errors of `comparable`."""
    parser = Parser(prog="entrypoint compare", allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="DIR|NAME=DIR", help="run folders; the first one's group is the "
                        "reference. Without a name the image is the group")
    parser.add_argument("--drift", type=_share, default=DRIFT, metavar="SHARE", help="shift of the machine that is "
                        "allowed for between runs that are not interleaved (default: %(default)s)")
    parser.add_argument("--allow", action="append", default=[], metavar="NAME",
                        help="accept a difference of machine or flags by its name")
    parser.add_argument("--exit-zero-on-valid", action="store_true", help="exit with 0 for every verdict but invalid")
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")
    chosen = parser.parse_args(list(words))
    if len(chosen.folders) < 2:
        raise Usage(Problem(what="compare takes two run folders or more", found=" ".join(chosen.folders) or "nothing",
                            todo="entrypoint compare /results/RUN /results/OTHER"))
    found = compare(comparable.read(chosen.folders), drift=chosen.drift, allow=chosen.allow)
    (out or sys.stdout).write(records.dump(found) if chosen.json else render(found))
    zero = chosen.exit_zero_on_valid and found["verdict"] != "invalid"
    return 0 if zero else int(found["exit_code"])


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("a share from 0 up to 1")
    return value
