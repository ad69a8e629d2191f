"""Side-by-side measurement: alternatives take turns in one run, so that what slows the machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Wall seconds of one alternative, in the order of the rounds."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """Alternatives measured in one run; the first one is what the others are compared with."""

    timings: tuple[Timing, ...]

    def ratio(self, timing: Timing) -> float:
        """Median of the ratios of the rounds: each round's two times were taken next to each other."""
        return statistics.median(mine / first for mine, first in
                                 zip(timing.seconds, self.timings[0].seconds, strict=True))

    def lines(self) -> list[str]:
        """The comparison as a table."""
        width = max(len(timing.name) for timing in self.timings)
        return [f"{timing.name:<{width}}  {timing.median:8.3f} s  "
                f"[{min(timing.seconds):.3f} .. {max(timing.seconds):.3f}]  x{self.ratio(timing):.2f}  "
                f"n={len(timing.seconds)}" for timing in self.timings]

    def as_dict(self) -> dict[str, object]:
        """All times, for a file."""
        return {timing.name: {"median": timing.median, "ratio": self.ratio(timing), "seconds": list(timing.seconds)}
                for timing in self.timings}


def compare(alternatives: Mapping[str, Callable[[], object]], rounds: int, *, warmups: int = 1,
            clock: Callable[[], float] = time.perf_counter) -> Comparison:
    """Time the alternatives in turn, in reversed order every second round, so that neither is always the first."""
    names = list(alternatives)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warmups):
        for name in names:
            alternatives[name]()
    for number in range(rounds):
        for name in reversed(names) if number % 2 else names:
            start = clock()
            alternatives[name]()
            seconds[name].append(clock() - start)
    return Comparison(tuple(Timing(name, tuple(values)) for name, values in seconds.items()))
