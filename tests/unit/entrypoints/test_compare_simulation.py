"""False verdicts of comparisons between runs, by simulation: at the declared level under the declared assumptions.

Truth: no difference between the images. A run has 4 blocks; a block's mean log rate varies with standard deviation
1.5 % (restarts), a run's level with `session`; a drift of 3 % is spread over the whole session, as in the simulations
of the benchmark itself.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from entrypoints import analyse, compare
from tests.unit.entrypoints.test_analyse_simulation import RESTART, share, within

Array = NDArray[np.float64]
TRIALS, BLOCKS = 1000, 4
#: of a share of 5 % over all trials
NOISE = 3 * math.sqrt(0.05 * 0.95 / TRIALS)


def runs(dice: np.random.Generator, order: str, *, drift: float = 0.0, session: float = 0.0, shift: float = 0.0,
         effect: float = 0.0, restart: float = RESTART) -> tuple[list[Array], list[Array]]:
    """Block means of the runs of A and of B; to B the machine adds `shift` and the image `effect`."""
    found: dict[str, list[Array]] = {"A": [], "B": []}
    inside = np.arange(BLOCKS) / BLOCKS
    for place, image in enumerate(order):
        level = -drift * (place + inside) / len(order) + dice.normal(0, session)
        own = shift + effect if image == "B" else 0.0
        found[image].append(level + own + dice.normal(0, restart, BLOCKS))
    return found["A"], found["B"]


def wrong(order: str, basis: str, allowance: float = 0.0, **truth: float) -> float:
    """Share of verdicts that see an effect."""
    dice = np.random.default_rng(len(order))
    hits = 0
    for _ in range(TRIALS):
        interval = compare.estimate(*runs(dice, order, **truth), basis).interval(0.05, math.log1p(allowance))
        hits += analyse.classify(interval, 0.0) in {"win", "loss"}
    return share(hits, TRIALS)


@pytest.mark.parametrize("session", [0.0, 0.02])
@pytest.mark.parametrize("order", ["ABBAABBA", "ABBAABBAABBA"])
def test_alternating_runs_hold_the_level_under_drift_and_run_to_run_variation(order: str, session: float) -> None:
    assert compare.rounds(order)
    found = wrong(order, compare.INTERLEAVED, drift=0.03, session=session)
    assert found <= 0.05 + NOISE, found
    assert found > 0.005, "nor is it blind"


def test_an_odd_number_of_rounds_holds_it_too() -> None:
    assert compare.rounds("ABBAAB")
    assert wrong("ABBAAB", compare.INTERLEAVED, drift=0.03, session=0.01) <= 0.05 + NOISE


def test_alternating_in_one_order_would_not() -> None:
    """This is why A B A B does not count as interleaved: a drift favours the same image in each round."""
    assert not compare.rounds("AB" * 8)
    assert wrong("AB" * 8, compare.INTERLEAVED, drift=0.15, restart=0.01) > 0.3


def test_means_of_runs_hold_the_level_when_runs_differ() -> None:
    assert within(wrong("ABAABBAB", compare.RUNS, session=0.02), 0.05, TRIALS)


def test_starts_as_units_would_not_when_runs_differ() -> None:
    """This is why several runs of an image are compared by their means."""
    assert wrong("ABAABBAB", compare.BLOCKS, session=0.02) > 0.2


def test_starts_of_single_runs_hold_the_level_on_a_machine_that_does_not_change() -> None:
    assert within(wrong("AB", compare.BLOCKS), 0.05, TRIALS)


def test_one_after_the_other_under_drift_is_wrong_too_often_without_the_allowance() -> None:
    assert wrong("AB", compare.BLOCKS, drift=0.03) > 0.12
    assert wrong("AAAABBBB", compare.RUNS, drift=0.03) > 0.12


@pytest.mark.parametrize("order", ["AB", "AAAABBBB"])
@pytest.mark.parametrize("shift", [0.0, 0.03, compare.DRIFT])
def test_with_the_allowance_a_shift_up_to_it_makes_no_more_false_verdicts(order: str, shift: float) -> None:
    basis = compare.BLOCKS if order == "AB" else compare.RUNS
    found = wrong(order, basis, compare.DRIFT, shift=math.log1p(shift), session=0.005 if len(order) > 2 else 0.0)
    assert found <= 0.05 + NOISE, found


def test_with_the_allowance_a_drift_over_the_session_makes_none_either() -> None:
    assert wrong("AB", compare.BLOCKS, compare.DRIFT, drift=0.03) <= 0.05
    assert wrong("AAAABBBB", compare.RUNS, compare.DRIFT, drift=0.03, session=0.01) <= 0.05


def test_a_gain_within_runs_holds_the_level_whatever_the_machine_does_between_them() -> None:
    dice = np.random.default_rng(3)
    hits = 0
    for _ in range(TRIALS):
        sides = [[dice.normal(math.log(1.2), math.sqrt(2) * RESTART, BLOCKS)] for _ in "AB"]  # pair log ratios
        one = compare.estimate(sides[0], sides[1], compare.BLOCKS)
        hits += analyse.classify(one.interval(0.05), 0.0) != "inconclusive"
    assert within(share(hits, TRIALS), 0.05, TRIALS)


@pytest.mark.parametrize(("order", "basis", "allowance", "effect", "least"), [
    ("ABBAABBA", compare.INTERLEAVED, 0.0, 0.05, 0.95), ("ABBAABBAABBA", compare.INTERLEAVED, 0.0, 0.03, 0.90),
    ("AB", compare.BLOCKS, compare.DRIFT, 0.15, 0.95), ("AAAABBBB", compare.RUNS, compare.DRIFT, 0.10, 0.95)])
def test_a_true_effect_is_found(order: str, basis: str, allowance: float, effect: float, least: float) -> None:
    session = 0.0 if basis == compare.BLOCKS else 0.005
    assert wrong(order, basis, allowance, effect=math.log1p(effect), session=session) >= least


def test_the_p_value_agrees_with_the_interval() -> None:
    dice = np.random.default_rng(5)
    for _ in range(300):
        here, there = runs(dice, "AB", effect=0.06)
        one = compare.estimate(here, there, compare.BLOCKS)
        interval, p = one.interval(0.05, 0.03), one.p(0.03)
        assert p is not None
        assert (p < 0.05) == (interval.low > 0 or interval.high < 0)
