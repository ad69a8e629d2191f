"""The task check: word problems with known answers, asked in both arms: a fast kernel that computes nonsense shows.

Written by us and generated from a seed, so no model has seen these numbers. It catches disasters, not subtleties: with
200 problems a loss of about four points is seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

NAME = "word problems"
#: level of the test of a drop (two-sided McNemar): a false alarm throws a whole run away
ALPHA = 0.01
#: an arm that gets none of so many right is not asked further
PROBE = 16
#: below this share of right answers the model cannot do the task, and nothing can be said
WEAK = 0.10

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MARKED = re.compile(r"answer\s*(?:is)?\s*:?[\s*$\\({a-z]*?(-?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)
ASK = "Work it out step by step. End with one line of the form 'Answer: NUMBER'."


@dataclass(frozen=True)
class Problem:
    """One word problem and its answer, a whole number."""

    id: str
    text: str
    answer: int

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        """The problem as a conversation of one turn."""
        return ({"role": "user", "content": f"{self.text} {ASK}"},)


_Dice = Callable[[int, int], int]


def _bakery(roll: _Dice, name: str) -> tuple[str, int]:
    trays, each, share = roll(6, 24), roll(8, 24), roll(3, 19)
    sold = roll(10, trays * each // 2)
    return (f"{name} bakes {trays} trays of {each} rolls. In the morning {sold} rolls are sold, and {share} go to a "
            "neighbour. How many rolls are left?", trays * each - sold - share)


def _train(roll: _Dice, name: str) -> tuple[str, int]:
    first, off, on, last = roll(120, 380), roll(15, 90), roll(12, 95), roll(10, 40)
    return (f"{name} conducts a train that starts with {first} passengers. At the first stop {off} get off and {on} "
            f"get on; at the second {last} get off and nobody gets on. How many passengers are on the train then?",
            first - off + on - last)


def _wages(roll: _Dice, name: str) -> tuple[str, int]:
    hours, pay, extra, more = roll(18, 39), roll(12, 31), roll(2, 9), roll(3, 8)
    return (f"{name} works {hours} hours a week for {pay} dollars an hour. In one week {extra} hours of overtime are "
            f"paid with {more} dollars an hour on top. What does {name} earn in that week, overtime included, in "
            "dollars?", hours * pay + extra * (pay + more))


def _shelves(roll: _Dice, name: str) -> tuple[str, int]:
    boxes, each, people = roll(4, 15), roll(9, 28), roll(3, 9)
    spare = (boxes * each) % people or people
    return (f"{name} unpacks {boxes} boxes of {each} books, puts {spare} of them on a desk and shares the rest equally "
            f"among {people} shelves. How many books stand on each shelf?", (boxes * each - spare) // people)


def _fence(roll: _Dice, name: str) -> tuple[str, int]:
    long, wide, price = roll(20, 90), roll(10, 60), roll(6, 17)
    return (f"A garden is {long} metres long and {wide} metres wide. {name} fences it all around; a metre of fence "
            f"costs {price} dollars. What does the fence cost in dollars?", 2 * (long + wide) * price)


def _ages(roll: _Dice, name: str) -> tuple[str, int]:
    young, factor, years = roll(5, 14), roll(2, 4), roll(3, 12)
    return (f"{name} is {young} years old, and an aunt is {factor} times as old. How old are both together in {years} "
            "years?", young + factor * young + 2 * years)


def _water(roll: _Dice, name: str) -> tuple[str, int]:
    rate, minutes, leak = roll(14, 45), roll(20, 70), roll(2, 9)
    return (f"{name} fills a tank with {rate} litres a minute, while {leak} litres a minute leak out. How many litres "
            f"are in the tank, empty at first, after {minutes} minutes?", (rate - leak) * minutes)


def _market(roll: _Dice, name: str) -> tuple[str, int]:
    apples, pears, cost, price = roll(5, 19), roll(4, 16), roll(2, 7), roll(3, 9)
    note = (apples * cost + pears * price) // 50 * 50 + 50
    return (f"{name} buys {apples} kilograms of apples at {cost} dollars a kilogram and {pears} kilograms of pears at "
            f"{price} dollars a kilogram, and pays with {note} dollars. How much change is there, in dollars?",
            note - apples * cost - pears * price)


_KINDS = (_bakery, _train, _wages, _shelves, _fence, _ages, _water, _market)
_NAMES = ("Ada", "Bruno", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kaya", "Liam")


def problems(seed: int, count: int) -> tuple[Problem, ...]:
    """`count` problems, the same for the same seed; the first ones of a longer list."""
    made = []
    for number in range(count):
        dice = np.random.default_rng((seed, number))

        def roll(low: int, high: int, dice: np.random.Generator = dice) -> int:
            return int(dice.integers(low, high + 1))

        text, answer = _KINDS[number % len(_KINDS)](roll, _NAMES[roll(0, len(_NAMES) - 1)])
        made.append(Problem(f"task-{number + 1:03}", text, answer))
    return tuple(made)


def extract(text: str) -> int | None:
    """The number that an answer gives: the last one marked as the answer, else the last of all; None without one."""
    found = _MARKED.findall(text) or _NUMBER.findall(text)
    if not found:
        return None
    value = float(found[-1].replace(",", "").rstrip("."))
    return int(value) if value.is_integer() and abs(value) < 1e15 else None


def results(blocks: Sequence[Mapping[str, Any]], arm: str) -> dict[str, bool] | None:
    """Problem to right or wrong, as the first valid start of an arm that was asked has answered; None without one."""
    asked = next((block["task"] for block in blocks
                  if block["arm"] == arm and block["validity"]["ok"] and block.get("task")), None)
    return None if asked is None else {one: right for one, _, _, right in asked["answers"]}


def compare(base: Mapping[str, bool] | None, candidate: Mapping[str, bool] | None) -> dict[str, Any] | None:
    """Right and wrong answers of both arms by problem, paired: accuracy, discordant problems, exact McNemar test.

    State: `same` (no significant drop), `drop`, or `unavailable` with its reason. None when no arm was asked.
    `discordant` is (right in the baseline only, right in the candidate only); `diff_ci` the 95 % interval of the
    difference of accuracies, candidate less baseline.
    """
    if base is None and candidate is None:
        return None
    found: dict[str, Any] = {"name": NAME, "n": 0, "acc_base": None, "acc_spec": None, "discordant": None,
                             "p_value": None, "diff_ci": None, "state": "unavailable", "reason": ""}
    both = sorted(set(base or ()) & set(candidate or ()))
    if base is None or candidate is None or not both:
        return {**found, "reason": "only one arm was asked"}
    here, there = [base[one] for one in both], [candidate[one] for one in both]
    total = len(both)
    found.update(n=total, acc_base=round(sum(here) / total, 6), acc_spec=round(sum(there) / total, 6))
    if sum(base.values()) < WEAK * len(base):
        return {**found, "reason": f"the baseline answers {sum(base.values())} of {len(base)} rightly: this model is "
                                   "too weak for the task"}
    lost = sum(one and not other for one, other in zip(here, there, strict=True))
    won = sum(other and not one for one, other in zip(here, there, strict=True))
    p_value = float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0
    mean = (won - lost) / total
    half = float(stats.norm.ppf(0.975)) * math.sqrt(max((lost + won) / total - mean * mean, 0.0) / total)
    drop = p_value < ALPHA and lost > won
    return {**found, "discordant": [lost, won], "p_value": round(p_value, 6),
            "diff_ci": [round(max(mean - half, -1.0), 6), round(min(mean + half, 1.0), 6)],
            "state": "drop" if drop else "same"}


def hopeless(right: Sequence[bool]) -> bool:
    """Whether an arm that has answered so far need not be asked further."""
    return len(right) >= PROBE and not any(right)


def line(found: Mapping[str, Any], baseline: str, candidate: str) -> str:
    """What came of it, in a sentence."""
    if found["state"] == "unavailable":
        return f"Task check ({found['name']}): unavailable, {found['reason']}."
    low, high = (100 * end for end in found["diff_ci"])
    return (f"Task check: {baseline} answers {100 * found['acc_base']:.1f} % of {found['n']} {found['name']} rightly, "
            f"{candidate} {100 * found['acc_spec']:.1f} % (95 % interval of the difference {low:+.1f} to {high:+.1f} "
            f"points, exact McNemar p {found['p_value']:.3f}).")
