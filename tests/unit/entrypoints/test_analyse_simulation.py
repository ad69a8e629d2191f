"""False verdicts and power of the design, by simulation: the table that the design rests on, within its own error.

Truth: 48 prompts whose log rates differ with standard deviation 25 %, an interaction of prompt and arm of 8 %, restarts
1.5 %, requests 1 %. Only the analysis functions of the product are used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from entrypoints import analyse, noise, plan

Array = NDArray[np.float64]
PROMPTS, TRIALS = 48, 1000
RESTART, REQUEST, INTERACTION, SPREAD = 0.015, 0.01, 0.08, 0.25


def blocks(dice: np.random.Generator, arms: list[str], *, drift: float = 0.0, effect: float = 0.0,
           interaction: Array | None = None, restart: float = RESTART) -> dict[str, list[Array]]:
    """Log rates per prompt of each block in the given order; `drift` is spread over the whole session."""
    prompts = dice.normal(0, SPREAD, PROMPTS)
    made: dict[str, list[Array]] = {"A": [], "B": []}
    for place, arm in enumerate(arms):
        level = dice.normal(0, restart) - drift * place / max(1, len(arms) - 1)
        own = (effect + (interaction if interaction is not None else 0.0)) if arm == "B" else 0.0
        made[arm].append(prompts + level + own + dice.normal(0, REQUEST, PROMPTS))
    return made


def abba(dice: np.random.Generator, pairs: int) -> list[str]:
    return [block.arm for block in plan.order(("A", "B"), pairs, int(dice.integers(2**31)))]


def pair_table(made: dict[str, list[Array]]) -> Array:
    return np.array(made["B"]) - np.array(made["A"])


def share(hits: int, trials: int = TRIALS) -> float:
    return hits / trials


def within(found: float, truth: float, trials: int = TRIALS) -> bool:
    """Within three standard errors of a share."""
    return abs(found - truth) <= 3 * math.sqrt(truth * (1 - truth) / trials)


@pytest.mark.parametrize("drift", [0.0, 0.03])
@pytest.mark.parametrize("pairs", [4, 6, 8])
def test_interleaved_pairs_hold_the_nominal_level_with_and_without_drift(pairs: int, drift: float) -> None:
    dice = np.random.default_rng(pairs * 10 + round(drift * 100))
    wrong = 0
    for _ in range(TRIALS):
        means = pair_table(blocks(dice, abba(dice, pairs), drift=drift)).mean(axis=1)
        wrong += analyse.classify(analyse.t_interval(means), 0.0) in {"win", "loss"}
    assert within(share(wrong), 0.05), share(wrong)


@pytest.mark.parametrize(("pairs", "published"), [(4, 0.20), (6, 0.35), (8, 0.44)])
def test_all_of_one_arm_first_fails_under_the_same_drift(pairs: int, published: float) -> None:
    dice = np.random.default_rng(pairs)
    wrong = 0
    for _ in range(TRIALS):
        means = pair_table(blocks(dice, ["A"] * pairs + ["B"] * pairs, drift=0.03)).mean(axis=1)
        wrong += analyse.classify(analyse.t_interval(means), 0.0) in {"win", "loss"}
    assert share(wrong) == pytest.approx(published, abs=0.06)
    assert share(wrong) > 0.12, "this is why the order is ABBA"


def test_one_start_per_arm_paired_by_prompt_is_wrong_far_too_often() -> None:
    dice = np.random.default_rng(1)
    wrong = 0
    for _ in range(TRIALS):
        table = pair_table(blocks(dice, ["A", "B"], interaction=dice.normal(0, INTERACTION, PROMPTS)))
        wrong += stats.ttest_1samp(table[0], 0.0).pvalue < 0.05
    assert share(wrong) > 0.20


@pytest.mark.parametrize("pairs", [4, 6, 8])
def test_the_general_interval_holds_its_level_when_prompts_are_a_sample_too(pairs: int) -> None:
    dice = np.random.default_rng(pairs + 100)
    general = main = 0
    for _ in range(TRIALS):
        table = pair_table(blocks(dice, abba(dice, pairs), interaction=dice.normal(0, INTERACTION, PROMPTS)))
        wide, narrow = analyse.general_interval(table), analyse.t_interval(table.mean(axis=1))
        general += not wide.low <= 0 <= wide.high
        main += not narrow.low <= 0 <= narrow.high
    assert within(share(general), 0.05), share(general)
    assert share(main) > 0.09, "the main interval speaks of these prompts only, and must not be read as general"


@pytest.mark.parametrize("count", [3, 5])
def test_looking_several_times_keeps_five_percent_with_the_corrected_level(count: int) -> None:
    looks = plan.LOOKS["standard"] if count == 3 else plan.LOOKS["thorough"]
    assert len(looks) == count
    dice = np.random.default_rng(count)
    trials = 4 * TRIALS
    corrected = naive = 0
    for _ in range(trials):
        means = dice.normal(0, math.sqrt(2) * RESTART, looks[-1])
        found = [_p(means[:look]) for look in looks]
        corrected += min(found) < plan.LOOK_ALPHA[count - 1]
        naive += min(found) < 0.05
    assert share(corrected, trials) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials), share(corrected, trials)
    assert share(naive, trials) > 0.085


def _p(values: Array) -> float:
    found = analyse.p_t(values)
    return 1.0 if found is None else found


@pytest.mark.parametrize(("effect", "cv", "least"), [(0.05, 0.02, 0.98), (0.038, 0.02, 0.90)])
def test_a_true_effect_is_found_within_twelve_pairs(effect: float, cv: float, least: float) -> None:
    looks, alpha = plan.LOOKS["thorough"], plan.LOOK_ALPHA[4]
    dice = np.random.default_rng(9)
    found = used = 0
    for _ in range(TRIALS):
        means = dice.normal(math.log1p(effect), math.sqrt(2) * cv, looks[-1])
        at = next((look for look in looks if _p(means[:look]) < alpha and means[:look].mean() > 0), None)
        found += at is not None
        used += at or looks[-1]
    assert share(found) >= least
    assert used / TRIALS < 9


def floor_of(dice: np.random.Generator, drift: float) -> dict[str, Any]:
    """A noise floor as a run keeps it: control against baseline in the first four pairs, ABC CBA."""
    order = plan.control_blocks(plan.order(("A", "B", "C"), noise.CONTROL_PAIRS, int(dice.integers(2**31))), "C")
    while True:
        pairs = np.zeros(noise.CONTROL_PAIRS)
        for block in order:
            level = dice.normal(0, math.hypot(RESTART, REQUEST / math.sqrt(PROMPTS))) - drift * block.index / len(order)
            pairs[block.pair] += {"A": -level, "B": 0.0, "C": level}[block.arm]
        if analyse.classify(analyse.t_interval(pairs, plan.LOOK_ALPHA[2]), 0.0) == "inconclusive":  # else: not kept
            one = {"candidate": "C", "pair_log_ratios": list(pairs), "concurrency": 1, "ratio": 1.0, "ci": None}
            return dict(noise.points([one], "C")["1"])


@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_two_pairs_against_a_kept_noise_floor_hold_the_nominal_level(drift: float) -> None:
    """`--effort quick` without a true effect, each time with a noise floor of its own."""
    dice = np.random.default_rng(22)
    wrong = 0
    for _ in range(TRIALS):
        scale = analyse.Scale(own=False, floor=floor_of(dice, drift))
        means = pair_table(blocks(dice, abba(dice, 2), drift=drift)).mean(axis=1)
        wrong += analyse.judge(means, 0.05, 0.0, scale)[1] in {"win", "loss"}
    assert share(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / TRIALS), share(wrong)
    assert drift or share(wrong) > 0.02, "not blind either"


def test_two_pairs_against_a_kept_noise_floor_find_what_two_pairs_alone_never_would() -> None:
    dice = np.random.default_rng(23)
    found = alone = 0
    for _ in range(TRIALS):
        scale = analyse.Scale(own=False, floor=floor_of(dice, 0.0))
        means = pair_table(blocks(dice, abba(dice, 2), effect=math.log1p(0.08))).mean(axis=1)
        found += analyse.judge(means, 0.05, 0.02, scale)[1] == "win"
        alone += analyse.classify(analyse.t_interval(means), 0.02) == "win"
    assert share(found) > 0.80, share(found)
    assert share(alone) < 0.45, share(alone)


def test_a_machine_that_became_noisier_than_its_noise_floor_is_noticed_more_often_than_not_believed() -> None:
    """Three times the deviation: the F test takes back a good part of what the old floor would have let through."""
    dice = np.random.default_rng(24)
    blind = wrong = 0
    for _ in range(TRIALS):
        floor = floor_of(dice, 0.0)
        means = pair_table(blocks(dice, abba(dice, 2), restart=3 * RESTART)).mean(axis=1)
        blind += analyse.classify(analyse.floor_interval(means, floor), 0.0) in {"win", "loss"}
        wrong += analyse.judge(means, 0.05, 0.0, analyse.Scale(own=False, floor=floor))[1] in {"win", "loss"}
    assert share(wrong) < 0.8 * share(blind), (share(wrong), share(blind))


def test_power_by_the_noncentral_t_is_what_simulation_finds() -> None:
    dice = np.random.default_rng(4)
    sd = math.sqrt(2) * 0.02
    hits = sum(_p(dice.normal(math.log1p(0.041), sd, 6)) < 0.05 for _ in range(TRIALS))
    assert within(share(hits), analyse.power(math.log1p(0.041), sd, 6))


#: a machine: standard deviation of a restart, drift over the session, (share, factor) of restarts in another mode
MACHINES = {"quiet": (0.007, 0.0, (0.0, 1.0)), "noisy": (0.02, 0.0, (0.0, 1.0)), "drifting": (0.007, 0.03, (0.0, 1.0)),
            "bimodal": (0.005, 0.0, (0.3, 0.96))}


def verdict_after_looks(dice: np.random.Generator, ratio: float, machine: str) -> str:
    """The sequential procedure of `--effort thorough` on a made-up machine."""
    sd, drift, (odd, factor) = MACHINES[machine]
    looks, alpha = plan.LOOKS["thorough"], plan.LOOK_ALPHA[4]
    blocks_ = abba(dice, looks[-1])
    levels = dice.normal(0, sd, len(blocks_)) - drift * np.arange(len(blocks_)) / len(blocks_)
    levels += np.where(dice.random(len(blocks_)) < odd, math.log(factor), 0.0)
    means = np.zeros(looks[-1])
    for place, arm in enumerate(blocks_):
        means[place // 2] += (levels[place] + math.log(ratio)) if arm == "B" else -levels[place]
    for look in looks:
        verdict = analyse.classify(analyse.t_interval(means[:look], alpha), 0.02)
        if verdict != "inconclusive":
            return verdict
    return "inconclusive"


@pytest.mark.parametrize(("ratio", "machine", "right", "least"), [
    (0.95, "quiet", {"loss"}, 0.98), (0.95, "drifting", {"loss"}, 0.98), (0.95, "noisy", {"loss"}, 0.90),
    (1.00, "quiet", {"equivalent", "inconclusive"}, 0.94), (1.00, "noisy", {"equivalent", "inconclusive"}, 0.93),
    (1.00, "drifting", {"equivalent", "inconclusive"}, 0.94), (1.00, "bimodal", {"equivalent", "inconclusive"}, 0.92),
    (1.02, "quiet", {"win", "equivalent", "inconclusive"}, 0.999), (1.02, "noisy", {"win", "inconclusive"}, 0.90),
    (1.038, "quiet", {"win"}, 0.98), (1.038, "drifting", {"win"}, 0.95), (1.038, "noisy", {"win"}, 0.85),
    (1.10, "quiet", {"win"}, 0.99), (1.10, "bimodal", {"win"}, 0.98), (1.10, "noisy", {"win"}, 0.99)])
def test_the_verdict_about_a_known_truth_is_right_at_the_designed_rate(
        ratio: float, machine: str, right: set[str], least: float) -> None:
    dice = np.random.default_rng(round(ratio * 1000))
    found = [verdict_after_looks(dice, ratio, machine) for _ in range(400)]
    assert sum(verdict in right for verdict in found) / len(found) >= least, {one: found.count(one) for one in found}
