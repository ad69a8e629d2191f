"""Do two arms give the same answers? Greedy output compared token by token, with a base-against-base reference.

Exact equality is the wrong gate (kernels that depend on the batch size change rounding) and no gate is wrong too;
see SafeAILab/EAGLE #212 and the vLLM and SGLang notes on determinism for the orders of magnitude.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

#: alarm: this many times the reference's hazard and this many divergences per token compared
HAZARD_FACTOR, HAZARD_LIMIT = 5.0, 5e-3
#: alarm: share of prompts that split within the first tokens
EARLY_TOKENS, EARLY_SHARE = 8, 0.05
#: largest gap between the two best tokens (in nats) that rounding can bridge: bf16 logits between 16 and 32 are
#: 0.125 apart, quantised weights twice as coarse; beyond the last value it is a defect for certain
TIE_GAP, TIE_GAP_QUANTISED, DEFECT_GAP = 0.25, 0.5, 1.0
TIE_SHARE = 0.95
#: how many of the best next tokens are asked for at a split: three-way near-ties are common exactly there
TOP = 8
#: level at which too few near-ties are more than bad luck with a few splits
UNTIED = 0.01
#: an answer with less than this share of different bigrams, or of one token only, is garbage
BIGRAM_SHARE, GARBAGE_TOKENS = 0.2, 16


def garbage(ids: Sequence[int]) -> str:
    """Why an answer is no sane text, or ""."""
    if not ids:
        return "empty"
    if len(ids) < GARBAGE_TOKENS:
        return ""
    if len(set(ids)) == 1:
        return "one token repeated"
    pairs = list(itertools.pairwise(ids))
    share = len(set(pairs)) / len(pairs)
    return f"only {share:.0%} of its bigrams differ" if share < BIGRAM_SHARE else ""


def split(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None; a shorter answer that agrees so far differs at its end."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def compare(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Any] | None:
    """Exact share, hazard per token (splits over tokens compared, censored at the end) and where answers split.

    None when there is nothing to compare.
    """
    splits: list[int] = []
    total = tokens = 0
    for one, other in pairs:
        total += 1
        at = split(one, other)
        tokens += min(len(one), len(other)) if at is None else at + 1
        if at is not None:
            splits.append(at)
    if not total:
        return None
    points = [int(value) for value in np.percentile(splits, [10, 50, 90])] if splits else None
    return {"compared": total, "exact_share": round(1 - len(splits) / total, 6),
            "hazard_per_token": len(splits) / max(tokens, 1), "splits": len(splits),
            "early_split_share": round(sum(at < EARLY_TOKENS for at in splits) / total, 6),
            "first_split_index": points and dict(zip(("p10", "p50", "p90"), points, strict=True))}


def forks(base: Mapping[str, Sequence[int]], candidate: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Where answers to the same prompt split: common prefix and both next tokens; not where one just ends."""
    found = []
    for prompt, ids in base.items():
        other = candidate.get(prompt, ())
        at = split(ids, other)
        if at is not None and at < min(len(ids), len(other)):
            found.append({"prompt_id": prompt, "index": at, "prefix": list(ids[:at]), "base": ids[at],
                          "candidate": other[at]})
    return found


def judge(fork: Mapping[str, Any], top: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """A fork with the baseline's best next tokens after the common prefix, as (logprob, token), best first.

    `gap`: by how much the worse of the two tokens that were taken falls short of the best, in nats; None when one of
    them is not among the best. `span` is then what its gap is at least.
    """
    known = {token: value for value, token in top}
    taken = [known.get(fork["base"]), known.get(fork["candidate"])]
    best = top[0][0]
    gaps = [best - value for value in taken if value is not None]
    return {"prompt_id": fork["prompt_id"], "index": fork["index"], "base": fork["base"],
            "candidate": fork["candidate"], "top": [[round(value, 5), token] for value, token in top],
            "gap": round(max(gaps), 5) if len(gaps) == 2 else None, "span": round(best - top[-1][0], 5)}


def ties(judged: Sequence[Mapping[str, Any]], limit: float) -> dict[str, Any] | None:
    """Share of forks that are near-ties on the baseline; None when none was looked at.

    `untied`: there are fewer than `TIE_SHARE` of them, and that is no bad luck (binomial test at 1 %).
    """
    if not judged:
        return None
    gaps = [one["gap"] for one in judged]
    near = sum(gap is not None and gap <= limit for gap in gaps)
    known = [gap for gap in gaps if gap is not None]
    defects = sum((one["span"] if one["gap"] is None else one["gap"]) > DEFECT_GAP for one in judged)
    chance = float(stats.binom.sf(len(gaps) - near - 1, len(gaps), 1 - TIE_SHARE))
    return {"checked": len(gaps), "ok": near, "max_gap_nat": max(known, default=None), "limit_nat": limit,
            "defects": defects, "untied": near < len(gaps) and chance < UNTIED,
            "passed": defects == 0 and near >= TIE_SHARE * len(gaps)}


def assess(answers: Mapping[tuple[str, int, str], Sequence[int]], baseline: str, candidate: str,
           lossy: Mapping[str, Any] | None = None, tied: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Equivalence of two arms from answers by (arm, block, prompt).

    Base against base uses neighbouring blocks of the baseline; base against candidate the blocks of the same rank.
    `lossy` holds switches that make speculation lossy by configuration, `tied` the outcome of the tie test. State:
    `equivalent`, `equivalent-up-to-ties` (the splits looked at are near-ties), `equivalent-within-noise` (splits are
    rare, and none or too few were looked at to say more), `different`, `lossy-by-config`, `not-checked`.
    """
    blocks = {arm: sorted({block for name, block, _ in answers if name == arm}) for arm in (baseline, candidate)}

    def both(left: tuple[str, int], right: tuple[str, int]) -> list[tuple[Sequence[int], Sequence[int]]]:
        return [(ids, answers[(*right, prompt)]) for (arm, block, prompt), ids in answers.items()
                if (arm, block) == left and (*right, prompt) in answers]

    reference = compare(itertools.chain.from_iterable(
        both((baseline, one), (baseline, other)) for one, other in itertools.pairwise(blocks[baseline])))
    against = compare(itertools.chain.from_iterable(
        both((baseline, one), (candidate, other))
        for one, other in zip(blocks[baseline], blocks[candidate], strict=False)))
    alarms = []
    if against:
        floor = reference["hazard_per_token"] if reference else 0.0
        if against["hazard_per_token"] > max(HAZARD_FACTOR * floor, HAZARD_LIMIT):
            alarms.append(f"answers split {against['hazard_per_token']:.1e} times per token, "
                          f"two baseline starts {floor:.1e}")
        if against["early_split_share"] > EARLY_SHARE + (reference["early_split_share"] if reference else 0.0):
            alarms.append(f"{against['early_split_share']:.0%} of the answers split within {EARLY_TOKENS} tokens")
    if tied and tied["defects"]:
        alarms.append(f"{tied['defects']} of {tied['checked']} splits are no near-ties on the baseline: a defect, not "
                      "rounding")
    elif tied and tied["untied"]:
        alarms.append(f"only {tied['ok']} of {tied['checked']} splits are near-ties on the baseline (at most "
                      f"{tied['limit_nat']:g} nat apart): more than rounding")
    elif tied and tied["passed"]:  # explained token by token: how often and how early it happens is only a number
        alarms = []
    if against is None:
        state = "not-checked"
    elif lossy:
        state = "lossy-by-config"
    elif alarms:
        state = "different"
    elif against["splits"] == 0:
        state = "equivalent"
    else:
        state = "equivalent-up-to-ties" if tied and tied["passed"] else "equivalent-within-noise"
    return {"state": state, "lossy_flags": dict(lossy or {}), "aa": reference, "ab": against, "alarms": alarms,
            "ties": dict(tied) if tied else None, "task": None}
