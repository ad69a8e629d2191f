"""Statistics and verdict from the records of a run. Pure: the same records give the same numbers, byte for byte.

The unit is the server start. For each pair of starts and each prompt the log ratio of decode rates is taken; the means
of the pairs are the data of a t interval. Order and reasons: Kalibera & Jones 2013, Georges et al. 2007; simulations
in tests/unit/entrypoints/test_analyse_simulation.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from entrypoints import equivalence, noise, task

Array = NDArray[np.float64]
Record = Mapping[str, Any]
POWER = 0.80
#: an accept length at or below this means that the draft contributes nothing; up to the second, a warning
DEAD_DRAFT, WEAK_DRAFT = 1.02, 1.10
LENGTH_LIMIT = 0.10
OUTLIER = 5 * 1.4826
GARBAGE_SHARE = 0.05
#: sign-flip over more pairs than this is sampled instead of enumerated
EXACT_PAIRS = 16
SHORT_ANSWER = 256
#: log ratios from here on are no effect that anybody looks for
LARGEST = math.log(100.0)
#: a wait between arrival and sending that a reader of an open-loop run should know, ms
QUEUED_MS = 50.0
NO_FLOOR = "so few pairs give a verdict only against a noise floor that an earlier run here kept, and there is none"
ABOVE_FLOOR = "the pairs differ by more than the noise floor of this machine explains: it is not as quiet as then"
#: level of the test whether a run is noisier than the noise floor that it leans on
NOISIER = 0.01


@dataclass(frozen=True)
class Interval:
    """An interval of a mean of logs. `low` and `high` are infinite when there is too little data."""

    mean: float
    low: float
    high: float
    df: float

    def ratio(self) -> list[float | None]:
        """Both ends as ratios; null for an infinite one."""
        return [finite(math.exp(self.low)) if self.low > -700 else None,
                finite(math.exp(self.high)) if self.high < 700 else None]


@dataclass(frozen=True)
class Scale:
    """What the means of pairs are held against: their `own` spread, or with few pairs a noise floor, if there is one.

    `floor` has `sd` (log ratio of one pair) and `df`, see `noise.points`.
    """

    own: bool = True
    floor: Mapping[str, Any] | None = None


OWN = Scale()


def scale_of(plan: Record, concurrency: int) -> Scale:
    """The scale that a plan laid down for one load point."""
    floor = ((plan.get("noise_floor") or {}).get("points") or {}).get(str(concurrency))
    return Scale(own=plan.get("interval_from", "pairs") == "pairs", floor=floor)


def finite(value: float, digits: int = 6) -> float | None:
    """The value rounded, or None when it is not finite: JSON knows no NaN."""
    return round(float(value), digits) if math.isfinite(value) else None


def t_interval(values: Array, alpha: float = 0.05) -> Interval:
    """Two-sided t interval of the mean. One value alone says nothing about its spread."""
    mean = float(np.mean(values))
    if values.size < 2:
        return Interval(mean, -math.inf, math.inf, 0.0)
    if float(np.ptp(values)) == 0.0:
        return Interval(mean, mean, mean, values.size - 1.0)
    found = stats.ttest_1samp(values, 0.0).confidence_interval(1 - alpha)
    return Interval(mean, float(found.low), float(found.high), values.size - 1.0)


def floor_interval(values: Array, floor: Mapping[str, Any], alpha: float = 0.05) -> Interval:
    """Two-sided t interval of the mean with the deviation of a pair from a noise floor (`noise.points`)."""
    mean, unit = float(np.mean(values)), floor["sd"] / math.sqrt(values.size)
    half = float(stats.t.ppf(1 - alpha / 2, floor["df"])) * unit
    return Interval(mean, mean - half, mean + half, float(floor["df"]))


def above_floor(values: Array, floor: Mapping[str, Any]) -> bool:
    """Whether the pairs differ among themselves by more than the noise floor explains (F test at 1 percent)."""
    if values.size < 2 or not floor["sd"]:
        return bool(values.size > 1 and float(np.ptp(values)) > 0)
    found = float(np.var(values, ddof=1)) / floor["sd"] ** 2
    return float(stats.f.sf(found, values.size - 1, floor["df"])) < NOISIER


def general_interval(table: Array, alpha: float = 0.05) -> Interval:
    """Interval when the prompts are a sample too. `table` is pairs x prompts of log ratios (Satterthwaite)."""
    pairs, prompts = table.shape
    mean = float(np.mean(table))
    if pairs < 2 or prompts < 2:
        return Interval(mean, -math.inf, math.inf, 0.0)
    parts = (float(np.var(table.mean(axis=1), ddof=1)) / pairs, float(np.var(table.mean(axis=0), ddof=1)) / prompts)
    total = sum(parts)
    if total == 0.0:
        return Interval(mean, mean, mean, pairs - 1.0)
    df = total ** 2 / (parts[0] ** 2 / (pairs - 1) + parts[1] ** 2 / (prompts - 1))
    half = float(stats.t.ppf(1 - alpha / 2, df)) * math.sqrt(total)
    return Interval(mean, mean - half, mean + half, df)


def p_t(values: Array) -> float | None:
    """p value of the t test against zero; None for less than two values, 0 or 1 for values that do not vary."""
    if values.size < 2:
        return None
    if float(np.ptp(values)) == 0.0:
        return float(values[0] == 0.0)
    return finite(float(stats.ttest_1samp(values, 0.0).pvalue))


def p_floor(values: Array, floor: Mapping[str, Any]) -> float | None:
    """p value of the mean against zero, with the deviation of a noise floor."""
    if not floor["sd"]:
        return None
    found = abs(float(np.mean(values))) * math.sqrt(values.size) / floor["sd"]
    return finite(2 * float(stats.t.sf(found, floor["df"])))


def p_signflip(values: Array, seed: int) -> float | None:
    """Exact sign-flip p value; sampled with a seed above 16 pairs."""
    if values.size < 2:
        return None
    count: float = math.inf if values.size <= EXACT_PAIRS else 99_999
    found = stats.permutation_test((values,), lambda x, axis: np.mean(x, axis=axis), permutation_type="samples",
                                   vectorized=True, n_resamples=count, rng=np.random.default_rng(seed))
    return finite(float(found.pvalue))


def p_mannwhitney(one: Array, other: Array) -> float | None:
    """Exact unpaired rank test on block values."""
    if not one.size or not other.size:
        return None
    return finite(float(stats.mannwhitneyu(one, other, method="exact").pvalue))


def power(effect: float, sd: float, pairs: int, alpha: float = 0.05, df: float = 0.0) -> float:
    """Probability to find a true log ratio `effect` with `pairs` pairs whose means have standard deviation `sd`.

    `df` are the degrees of freedom of `sd` where they are not those of the pairs.
    """
    df = df or pairs - 1
    limit = float(stats.t.ppf(1 - alpha / 2, df))
    shift = abs(effect) * math.sqrt(pairs) / sd
    if shift > 30 and df > 1:  # scipy's noncentral t loses its digits there
        return 1.0
    wrong_side = float(stats.nct.cdf(-limit, df, shift)) if shift < 4 else 0.0  # tiny, and NaN further out
    return float(stats.nct.sf(limit, df, shift)) + wrong_side


def detectable(sd: float, pairs: int, alpha: float = 0.05, wanted: float = POWER, df: float = 0.0) -> float | None:
    """Smallest true log ratio that is found with probability `wanted` (noncentral t)."""
    if (pairs < 2 and not df) or not math.isfinite(sd):
        return None
    if sd == 0:
        return 0.0
    unit = sd / math.sqrt(pairs)
    high = 1.0
    while power(high * unit, sd, pairs, alpha, df) < wanted:
        high *= 2
    root = optimize.brentq(lambda shift: power(shift * unit, sd, pairs, alpha, df) - wanted, 1e-6, high)
    return float(root) * unit


def pairs_needed(mean: float, sd: float, margin: float, alpha: float = 0.05, limit: int = 500) -> int | None:
    """Fewest pairs that would settle it at this noise: find the effect, or show that it lies within the margin."""
    if sd == 0:
        return 2
    room = min(math.log1p(margin) - mean, mean - math.log1p(-margin))
    for pairs in range(2, limit + 1):
        if power(mean, sd, pairs, alpha) >= POWER:
            return pairs
        if room > 0 and float(stats.t.ppf(1 - alpha / 2, pairs - 1)) * sd / math.sqrt(pairs) <= room:
            return pairs
    return None


def classify(interval: Interval, margin: float) -> str:
    """`equivalent` before `win` and `loss`: faster by less than the margin is no win."""
    if interval.low >= math.log1p(-margin) and interval.high <= math.log1p(margin):
        return "equivalent"
    if interval.low > 0:
        return "win"
    if interval.high < 0:
        return "loss"
    return "inconclusive"


def practical(interval: Interval, verdict: str, margin: float) -> bool:
    """Whether a win or a loss is one beyond the margin."""
    return (verdict == "win" and interval.low > math.log1p(margin)) or \
        (verdict == "loss" and interval.high < math.log1p(-margin))


def judge(means: Array, alpha: float, margin: float, scale: Scale) -> tuple[Interval, str, list[str]]:
    """Interval, verdict and remarks for the pair means of one comparison."""
    if scale.own:
        interval = t_interval(means, alpha)
        return interval, classify(interval, margin), []
    if scale.floor is None:
        return t_interval(means, alpha), "inconclusive", [NO_FLOOR]
    interval = floor_interval(means, scale.floor, alpha)
    if above_floor(means, scale.floor):
        return interval, "inconclusive", [ABOVE_FLOOR]
    return interval, classify(interval, margin), []


def outliers(rows: Sequence[Record]) -> dict[int, float]:
    """Index to expected log rate of requests that are far from what their arm, prompt and server start let expect.

    Never deleted. A whole start that is slow is no outlier: that is the variation which the interval is about.
    """
    logs = np.array([math.log(rate(row)) for row in rows])
    residual = logs.copy()
    keys: tuple[Callable[[Record], Hashable], ...] = (lambda row: (row["arm"], row["prompt_id"]),
                                                      lambda row: row["block"])
    for key in keys:
        groups: dict[Hashable, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(key(row), []).append(index)
        for members in groups.values():
            residual[members] -= np.median(residual[members])
    spread = float(np.median(np.abs(residual))) if rows else 0.0
    if spread == 0:
        return {}
    return {index: float(logs[index] - value) for index, value in enumerate(residual) if abs(value) > OUTLIER * spread}


def rate(row: Record) -> float:
    """Decode rate in tokens per second: tokens after the first chunk over the time after the first chunk."""
    return float(row["n_tokens_server"] - row["n_first_chunk"]) / float(row["t_last"] - row["t_first"])


def measurable(row: Record) -> bool:
    """Whether a request has a decode rate."""
    return (not row["error"] and row["n_tokens_server"] is not None and
            row["n_tokens_server"] > row["n_first_chunk"] and row["t_last"] > row["t_first"])


def log_rates(rows: Iterable[Record]) -> dict[tuple[int, str], float]:
    """(pair, prompt) to the mean over passes of the log decode rate, for the rows of one arm and load point."""
    table: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        table.setdefault((row["pair"], row["prompt_id"]), []).append(math.log(rate(row)))
    return {key: float(np.mean(values)) for key, values in table.items()}


def paired(base: Iterable[Record], candidate: Iterable[Record]) -> tuple[list[int], list[str], Array, Array, Array]:
    """Pairs and prompts that both arms have in full, and per pair and prompt: difference, baseline, candidate logs."""
    one, other = log_rates(base), log_rates(candidate)
    both = set(one) & set(other)
    pairs = sorted({pair for pair, _ in both})
    names = sorted(name for name in {name for _, name in both} if all((pair, name) in both for pair in pairs))
    here = np.array([[one[pair, name] for name in names] for pair in pairs]).reshape(len(pairs), len(names))
    there = np.array([[other[pair, name] for name in names] for pair in pairs]).reshape(len(pairs), len(names))
    return pairs, names, there - here, here, there


def comparison(base: Sequence[Record], candidate: Sequence[Record], *, names: tuple[str, str], concurrency: int,
               margin: float, alpha: float, seed: int, scale: Scale = OWN) -> dict[str, Any]:
    """One comparison at one load point: ratio, intervals, tests, noise, and what more data would do."""
    pairs, prompts, table, here, there = paired(base, candidate)
    result: dict[str, Any] = {
        "baseline": names[0], "candidate": names[1], "concurrency": concurrency, "stratum": None, "pairs": len(pairs),
        "prompts": len(prompts), "alpha_used": alpha, "verdict": "inconclusive", "practical": False, "flags": []}
    if not table.size:
        return {**result, "ratio": None, "flags": ["no pair in which both arms answered"]}
    means = table.mean(axis=1)
    main, verdict, flags = judge(means, alpha, margin, scale)
    main95 = judge(means, 0.05, margin, scale)[0]
    floor = None if scale.own else scale.floor
    sd, df = (floor["sd"], floor["df"]) if floor else (float(np.std(means, ddof=1)) if means.size > 1 else math.nan, 0)
    found = detectable(sd, means.size, alpha, df=df)
    strata = {row["prompt_id"]: row["stratum"] for row in base}
    need = pairs_needed(main.mean, sd, margin, alpha) if verdict == "inconclusive" and math.isfinite(sd) else None
    result.update(
        ratio=finite(math.exp(main.mean)), ci=main.ratio(), ci95_pack=main95.ratio(),
        ci95_general=general_interval(table).ratio(), pair_ids=pairs,
        pair_log_ratios=[finite(float(value)) for value in means], df=main.df,
        p_t=p_floor(means, floor) if floor else p_t(means), flags=flags,
        interval_from="noise floor" if floor else "pairs",
        p_signflip=p_signflip(means, seed), p_mannwhitney=p_mannwhitney(there.mean(axis=1), here.mean(axis=1)),
        mde_pct=None if found is None or found > LARGEST else finite(100 * math.expm1(found), 3),
        restart_cv={names[0]: _cv(here), names[1]: _cv(there)}, verdict=verdict,
        practical=practical(main, verdict, margin),
        pairs_needed_estimate=need,
        base_tok_s=finite(math.exp(float(here.mean())), 3), spec_tok_s=finite(math.exp(float(there.mean())), 3),
        prompt_rates={name: [finite(math.exp(float(one)), 3), finite(math.exp(float(other)), 3)]
                      for name, one, other in zip(prompts, here.mean(axis=0), there.mean(axis=0), strict=True)},
        strata=_strata(table, prompts, strata, seed))
    return result


def _cv(logs: Array) -> float | None:
    """Restart-to-restart coefficient of variation: standard deviation of the blocks' mean log rates."""
    return finite(float(np.std(logs.mean(axis=1), ddof=1))) if logs.shape[0] > 1 else None


def _strata(table: Array, prompts: Sequence[str], strata: Mapping[str, str], seed: int) -> dict[str, Any]:
    """Ratio per stratum with a BCa bootstrap interval over its prompts: descriptive, no verdict."""
    found: dict[str, Any] = {}
    for stratum in sorted({strata[name] for name in prompts}):
        columns = [index for index, name in enumerate(prompts) if strata[name] == stratum]
        values = table[:, columns].mean(axis=0)
        ends: list[float | None] = [None, None]
        if values.size > 2 and float(np.ptp(values)) > 1e-12:
            spread = stats.bootstrap((values,), np.mean, n_resamples=2000, method="BCa",
                                     rng=np.random.default_rng(seed)).confidence_interval
            ends = [finite(math.exp(spread.low)), finite(math.exp(spread.high))]
        found[stratum] = {"ratio": finite(math.exp(float(values.mean()))), "ci95": ends, "prompts": len(columns)}
    return found


def holm(comparisons: Sequence[dict[str, Any]], alpha: float) -> list[float]:
    """Level at which each secondary comparison is judged (Holm): alpha/m for the smallest p, then alpha/(m-1), ...

    Once one is not significant, the rest are judged at the level of that one. One without a p value comes last.
    """
    p = [1.0 if one.get("p_t") is None else float(one["p_t"]) for one in comparisons]
    levels = [alpha] * len(p)
    stopped = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        level = stopped or alpha / (len(p) - rank)
        levels[index] = level
        if not stopped and p[index] > level:
            stopped = level
    return levels


def quantiles(values: Sequence[float], points: Sequence[int], digits: int = 6) -> dict[str, float | None]:
    """Percentiles by name, `{"p50": ...}`; nulls for no data."""
    if not values:
        return {f"p{point}": None for point in points}
    return {f"p{point}": finite(float(value), digits)
            for point, value in zip(points, np.percentile(values, points), strict=True)}


def spread(values: Sequence[float]) -> list[float | None]:
    """21 quantiles from the least to the greatest value, for a plot; empty for no data."""
    return [finite(float(value), 3) for value in np.percentile(values, range(0, 101, 5))] if values else []


def steady_rate(rows: Sequence[Record]) -> float | None:
    """Tokens per second of all streams while all run, for one pass.

    The window opens when as many requests as there are streams have their first token and closes at the end after
    which fewer are left than there are streams; a pass without such a window counts whole.
    """
    if not rows:
        return None
    streams = min(len(rows), int(rows[0]["concurrency"]))
    low = sorted(row["t_first"] for row in rows)[streams - 1]
    high = sorted(row["t_last"] for row in rows)[-streams]
    if high <= low:
        low, high = min(row["t_send"] for row in rows), max(row["t_last"] for row in rows)
    tokens = 0
    for row in rows:
        before = 0
        for moment, total in row["chunks"]:
            if low < row["t_send"] + moment <= high:
                tokens += total - before
            before = total
    return finite(tokens / (high - low), 3) if high > low else None


def speculation(rows: Sequence[Record]) -> dict[str, Any]:
    """Accept length (accepted + rounds over rounds), accept rate, histogram and cycle time from per-request counts."""
    counted = [row for row in rows if row.get("spec_verify_ct") and row.get("spec_accepted") is not None]
    if not counted:
        return {"source": "unavailable", "requests": 0, "accept_length": None, "accept_rate": None,
                "verify_rounds": None, "drafted": None, "accepted": None, "histogram": None, "cycle_ms": None}
    rounds = sum(row["spec_verify_ct"] for row in counted)
    accepted = sum(row["spec_accepted"] for row in counted)
    drafted = sum(row.get("spec_proposed") or 0 for row in counted)
    width = max(len(row.get("accept_histogram") or []) for row in counted)
    histogram = [sum((row.get("accept_histogram") or [])[place:place + 1] or [0])
                 for row in counted for place in range(width)]
    summed = [int(value) for value in np.reshape(histogram, (len(counted), width)).sum(axis=0)] if width else None
    tau = (accepted + rounds) / rounds
    speeds = [rate(row) for row in counted if measurable(row)]
    return {"source": "per-request meta_info", "requests": len(counted), "accept_length": finite(tau),
            "accept_rate": finite(accepted / drafted) if drafted else None, "verify_rounds": rounds,
            "drafted": drafted or None, "accepted": accepted, "histogram": summed,
            "cycle_ms": finite(1e3 * tau / float(np.median(speeds)), 4) if speeds else None}


def arm_summary(rows: Sequence[Record]) -> dict[str, Any]:
    """What one arm did at one load point; seconds in ms, rates in tokens per second."""
    good = [row for row in rows if measurable(row)]
    rates = [rate(row) for row in good]
    gaps: list[float] = []
    sizes: list[int] = []
    for row in good:
        chunks = row["chunks"]
        gaps += [1e3 * (after[0] - before[0]) for before, after in itertools.pairwise(chunks)]
        sizes += [after[1] - before[1] for before, after in itertools.pairwise(chunks)]
    passes: dict[tuple[int, int], list[Record]] = {}
    for row in good:
        passes.setdefault((row["block"], row["pass"]), []).append(row)
    totals = [value for group in passes.values() if (value := steady_rate(group)) is not None]
    lengths = [row["n_tokens_server"] for row in good]
    return {
        "requests": len(rows), "errors": sum(bool(row["error"]) for row in rows),
        "decode_rate": {"median": finite(float(np.median(rates)), 3) if rates else None,
                        "geomean": finite(math.exp(float(np.mean(np.log(rates)))), 3) if rates else None,
                        **quantiles(rates, (10, 90), 3)},
        "total_tok_s": finite(float(np.mean(totals)), 3) if totals else None,
        "e2e_tok_s": quantiles([row["n_tokens_server"] / (row["t_last"] - row["t_send"]) for row in good], (50,), 3),
        "ttft_ms": quantiles([1e3 * (row["t_first"] - row["t_send"]) for row in good], (50, 90, 99), 3),
        "interchunk_ms": quantiles(gaps, (50, 99), 3),
        "tokens_per_chunk": finite(float(np.mean(sizes)), 4) if sizes else None,
        "output_tokens": {"mean": finite(float(np.mean(lengths)), 2) if lengths else None, "total": sum(lengths)},
        "distributions": {"decode_rate": spread(rates), "ttft_ms": spread(
            [1e3 * (row["t_first"] - row["t_send"]) for row in good])},
        "cached_tokens_max": max((row["cached_tokens"] or 0 for row in good), default=None),
        "spec": speculation(good)}


def gates(plan: Record, blocks: Sequence[Record], rows: Sequence[Record], *, evidence: Sequence[Record],
          same: Mapping[str, Any] | None, arms_diff: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Why the run cannot count, and what to be careful about. Causes only, never the speed itself."""
    causes: list[str] = []
    notes: list[str] = []
    for key, pair in (arms_diff.get("forbidden") or {}).items():
        causes.append(f"the arms differ in {key}: {pair[0]} and {pair[1]}")
    errors = [row for row in rows if row["error"]]
    if errors:
        causes.append(f"{len(errors)} of {len(rows)} requests failed, first: {errors[0]['error']}")
    repeated = {block["slot"] for block in blocks if block["validity"]["ok"]}
    for block in blocks:
        if not block["validity"]["ok"] and block["slot"] not in repeated:
            causes.append(f"block {block['index']} ({block['arm']}): {'; '.join(block['validity']['causes'])}")
    kept = [flush for block in blocks for flush in block.get("flush") or [] if not flush["ok"]]
    if kept:
        notes.append(f"the prefix cache was not flushed (HTTP {kept[0]['status']}) before {len(kept)} passes; the "
                     "cached tokens of each request show whether that mattered")
    few = [point for point in plan["load_points"] if point > 1 and plan["prompts"]["count"] < 2 * point]
    if few:
        notes.append(f"concurrency {', '.join(map(str, few))} with {plan['prompts']['count']} prompts: fewer than two "
                     "requests for each stream, most of the pass is its beginning and its end")
    changed = {(block["arm"], one) for block in blocks for one in block.get("changed_arguments") or []}
    notes += [f"{arm}: the server changed an argument: {one}" for arm, one in sorted(changed)]
    shaky = [block["index"] for block in blocks
             if block["validity"]["ok"] and not (block["warmup"] or {}).get("stable", True)]
    if shaky:
        notes.append(f"the rate had not become steady when block {', '.join(map(str, shaky))} was measured: a noisy "
                     "machine")
    seen = [warning for block in blocks for warning in (block.get("telemetry") or {}).get("warnings", [])]
    notes += [f"{warning} (in {seen.count(warning)} blocks)" for warning in dict.fromkeys(seen)]
    good = [row for row in rows if measurable(row)]
    arms = [arm["name"] for arm in plan["arms"]]
    lengths = {arm: float(np.mean([row["n_tokens_server"] for row in good if row["arm"] == arm] or [math.nan]))
               for arm in arms}
    for arm in plan["arms"]:
        mine = [row for row in good if row["arm"] == arm["name"]]
        if not mine:
            continue
        name = arm["name"]
        if arm["speculative"]:
            _speculation_gate(name, speculation(mine), causes, notes)
        drift = lengths[name] / lengths[arms[0]] - 1 if lengths[arms[0]] > 0 else 0.0
        if abs(drift) > LENGTH_LIMIT:
            causes.append(f"{name} answers {drift:+.0%} longer than {arms[0]}: not the same work")
        bad = [row for row in mine if equivalence.garbage(row["output_ids"])]
        if len(bad) > GARBAGE_SHARE * len(mine):
            causes.append(f"{name}: {len(bad)} of {len(mine)} answers are garbage, first: "
                          f"{bad[0]['prompt_id']} {equivalence.garbage(bad[0]['output_ids'])}")
        elif bad:
            notes.append(f"{name}: {len(bad)} of {len(mine)} answers look like garbage")
    short = [f"{name} {value:.0f}" for name, value in lengths.items() if value < SHORT_ANSWER]
    if short:
        notes.append(f"short answers ({', '.join(short)} tokens; {SHORT_ANSWER} are wanted): the last verify round is "
                     "cut, which makes the rate a little wrong")
    waits = [one["client"]["queue_ms_p99"] or 0.0 for block in blocks for one in block.get("passes") or []]
    if plan.get("rate") and max(waits, default=0.0) > QUEUED_MS:
        notes.append(f"requests waited up to {max(waits):.0f} ms (p99) in the client after their arrival, because only "
                     f"{max(plan['load_points'])} may be in flight; times to first token begin at the sending")
    known = {claim["claim"] for claim in evidence}
    causes += [f"required evidence: no server start says anything about {name}"
               for name in plan.get("required_evidence", ()) if rows and name not in known]
    for claim in evidence:
        if claim.get("required") and claim.get("state") != "active":
            causes.append(f"required evidence: {claim['claim']} is {claim['state']}"
                          f"{' (' + claim['reason'] + ')' if claim.get('reason') else ''}")
    if same and same["alarms"]:
        causes += [f"output differs: {alarm}" for alarm in same["alarms"]]
    checked = same and same["task"]
    if checked and checked["state"] != "same":
        end = plan["primary_endpoint"]
        (causes if checked["state"] == "drop" else notes).append(
            task.line(checked, end["baseline"], end["candidate"]).removesuffix(".") +
            (": a defect, not rounding" if checked["state"] == "drop" else ""))
    return causes, notes


def _speculation_gate(name: str, spec: Mapping[str, Any], causes: list[str], notes: list[str]) -> None:
    tau = spec["accept_length"]
    if tau is None:
        causes.append(f"{name}: accept length unavailable, nothing shows that it speculates")
    elif tau <= DEAD_DRAFT:
        causes.append(f"{name}: accept length {tau:.2f}, the draft contributes nothing")
    elif tau <= WEAK_DRAFT:
        notes.append(f"{name}: accept length {tau:.2f} is at most {WEAK_DRAFT}: is this the right draft for the model?")


def analyse(plan: Record, blocks: Sequence[Record], requests: Sequence[Record], *, evidence: Sequence[Record] = (),
            arms_diff: Mapping[str, Any] | None = None, lossy: Mapping[str, Any] | None = None,
            quantised: bool = False) -> dict[str, Any]:
    """Everything that the result says about the data. Blocks that are invalid for a cause do not enter the numbers."""
    usable = {block["index"] for block in blocks if block["validity"]["ok"]}
    rows = [row for row in requests if row["block"] in usable]
    kept = [row for row in rows if measurable(row)]
    names = [arm["name"] for arm in plan["arms"]]
    alpha = plan["alpha_per_look"]
    table: list[dict[str, Any]] = []
    first = plan["primary_endpoint"]["candidate"]
    controls = [arm["name"] for arm in plan["arms"] if arm.get("control")]
    for candidate in sorted(names[1:], key=lambda name: name != first):
        for point in plan["load_points"]:
            sides = [[row for row in kept if row["arm"] == name and row["concurrency"] == point]
                     for name in (names[0], candidate)]
            scale = OWN if candidate in controls else scale_of(plan, point)
            table.append(comparison(sides[0], sides[1], names=(names[0], candidate), concurrency=point,
                                    margin=plan["margin"], alpha=alpha, seed=plan["order_seed"], scale=scale))
    _secondary([one for one in table[1:] if one["candidate"] not in controls], plan, alpha)
    primary = table[0] if table else {"verdict": "inconclusive", "ratio": None}
    judged = [one for block in blocks for one in block.get("ties") or []]
    limit = equivalence.TIE_GAP_QUANTISED if quantised else equivalence.TIE_GAP
    same = _equivalence(rows, (names[0], first), plan, lossy, equivalence.ties(judged, limit))
    if same is not None:
        same["task"] = task.compare(task.results(blocks, names[0]), task.results(blocks, first))
    causes, notes = gates(plan, blocks, rows, evidence=evidence, same=same, arms_diff=arms_diff or {})
    floor = _noise(table, controls, plan)
    if floor["significant"]:
        causes.append(f"the control arm differs from the baseline by a factor of {floor['aa_ratio']:.4f}: this machine "
                      "is not quiet enough")
    notes += primary.get("flags") or []
    flagged = _without_outliers(kept, plan, primary, notes)
    verdict = "invalid" if causes else primary["verdict"]
    if verdict in {"win", "loss", "equivalent"} and flagged["verdict"] != verdict:
        verdict = "inconclusive"
        notes.append(f"with the {flagged['requests']} flagged requests at the rate of the others the verdict would be "
                     f"{flagged['verdict']}")
    arms = {name: {str(point): arm_summary([row for row in rows if row["arm"] == name and row["concurrency"] == point])
                   for point in plan["load_points"]} for name in names}
    excluded = [{"block": block["index"], "arm": block["arm"], "causes": list(block["validity"]["causes"])}
                for block in blocks if not block["validity"]["ok"]]
    return {
        "comparison": table, "arms": arms, "equivalence": same, "outliers": flagged,
        "noise_floor": floor, "break_even": _break_even(arms, (names[0], first), plan["load_points"][0]),
        "verdict": {"class": verdict, "reasons": notes, "invalid_causes": causes, "excluded_blocks": excluded}}


def _secondary(table: Sequence[dict[str, Any]], plan: Record, alpha: float) -> None:
    for one, level in zip(table, holm(table, alpha), strict=True):
        logs = np.array(one.get("pair_log_ratios") or [], dtype=np.float64)
        if logs.size:
            interval, verdict, _ = judge(logs, level, plan["margin"], scale_of(plan, one["concurrency"]))
            one.update(alpha_used=level, ci=interval.ratio(), verdict=verdict,
                       practical=practical(interval, verdict, plan["margin"]))


def _equivalence(rows: Sequence[Record], names: Sequence[str], plan: Record,
                 lossy: Mapping[str, Any] | None, tied: Mapping[str, Any] | None) -> dict[str, Any] | None:
    point = plan["load_points"][0]
    answers = {(row["arm"], row["block"], row["prompt_id"]): row["output_ids"] for row in rows
               if row["pass"] == 0 and row["concurrency"] == point and not row["error"]}
    return equivalence.assess(answers, names[0], names[1], lossy, tied)


def _without_outliers(rows: Sequence[Record], plan: Record, primary: Mapping[str, Any],
                      notes: list[str]) -> dict[str, Any]:
    point = plan["load_points"][0]
    mine = [row for row in rows if row["concurrency"] == point]
    far = outliers(mine)
    verdict = primary["verdict"]
    ratio = primary["ratio"]
    if far:
        # at the rate to be expected, not left out: a prompt that is missing once would be missing in every pair
        clean = [{**row, "t_last": row["t_first"] + (row["n_tokens_server"] - row["n_first_chunk"]) /
                  math.exp(far[index])} if index in far else row for index, row in enumerate(mine)]
        names = (primary["baseline"], primary["candidate"])
        again = comparison([row for row in clean if row["arm"] == names[0]],
                           [row for row in clean if row["arm"] == names[1]], names=names, concurrency=point,
                           margin=plan["margin"], alpha=primary["alpha_used"], seed=plan["order_seed"],
                           scale=scale_of(plan, point))
        verdict, ratio = again["verdict"], again["ratio"]
        notes.append(f"{len(far)} of {len(mine)} requests are far from the others of their arm and prompt; kept")
    return {"requests": len(far), "verdict": verdict, "ratio": ratio}


def _noise(table: Sequence[Mapping[str, Any]], controls: Sequence[str], plan: Record) -> dict[str, Any]:
    """How much the baseline differs from itself: by a control arm of this run, or as an earlier run found it."""
    found: dict[str, Any] = {
        "source": "restarts of this run", "restart_cv": table[0].get("restart_cv") if table else None,
        "aa_ratio": None, "aa_ci": None, "pair_sd": None, "pairs": None, "measured_at": None, "age_days": None,
        "run_id": None, "significant": False}
    here = [one for one in table if one["candidate"] in controls and one["ratio"]]
    kept = plan.get("noise_floor")
    if here:
        points = noise.points(here, here[0]["candidate"])
        first = points.get(str(here[0]["concurrency"]), {})
        found.update(source="control arm", aa_ratio=here[0]["ratio"], aa_ci=here[0]["ci"], pair_sd=first.get("sd"),
                     pairs=here[0]["pairs"], significant=here[0]["verdict"] in {"win", "loss"})
    elif kept:
        first = kept["points"].get(str(plan["load_points"][0]), {})
        found.update(source="kept from an earlier run", aa_ratio=first.get("ratio"), aa_ci=first.get("ci"),
                     pair_sd=first.get("sd"), pairs=first.get("df"), measured_at=kept["measured_at"],
                     age_days=kept["age_days"], run_id=kept["run_id"])
    return found


def _break_even(arms: Mapping[str, Any], names: Sequence[str], point: int) -> dict[str, Any] | None:
    """What the accept length would have to be: cycle time over the baseline's time per token."""
    base = arms[names[0]][str(point)]["decode_rate"]["median"]
    spec = arms[names[1]][str(point)]["spec"]
    if not base or not spec["cycle_ms"]:
        return None
    per_token = 1e3 / base
    need = spec["cycle_ms"] / per_token
    return {"t_base_ms": finite(per_token, 4), "t_cycle_ms": spec["cycle_ms"], "tau": spec["accept_length"],
            "tau_break_even": finite(need, 4), "tau_for_plus_10pct": finite(1.1 * need, 4),
            "cycle_ms_for_plus_10pct": finite(spec["accept_length"] * per_token / 1.1, 4)}
