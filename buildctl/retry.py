"""How often and how long to repeat what may pass: bounded, jittered, obeying Retry-After (tenacity)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from buildctl.fault import Fault, Kind

T = TypeVar("T")


class Failed(Exception):
    """An attempt failed; carries the fault to whoever decides, is never shown."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Retry:
    """Announced to the caller before each wait."""

    attempt: int
    attempts: int
    seconds: float
    fault: Fault


@dataclass(frozen=True, slots=True)
class Policy:
    """Attempts in all, the first wait in seconds (doubled each time, with as much jitter), and the longest wait.

    A registry that asks for a longer wait than `longest` is not waited for: its fault becomes final.
    """

    attempts: int = 6
    first: float = 1.0
    longest: float = 120.0

    def run(self, attempt: Callable[[], T], announce: Callable[[Retry], None] | None = None) -> T:
        """Call `attempt` until it returns. Raises the last `Failed`."""

        back_off = tenacity.wait_exponential(self.first, self.longest) + tenacity.wait_random(0, self.first)

        def wait(state: tenacity.RetryCallState) -> float:
            return max(back_off(state), _fault(state).wait)

        def announced(state: tenacity.RetryCallState) -> None:
            if announce is not None:
                announce(Retry(state.attempt_number, self.attempts, state.upcoming_sleep, _fault(state)))

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._worth_it),
            stop=tenacity.stop_after_attempt(self.attempts), wait=wait, before_sleep=announced, reraise=True,
        )(attempt)

    def _worth_it(self, error: BaseException) -> bool:
        return (isinstance(error, Failed) and error.fault.kind is Kind.TRANSIENT
                and error.fault.wait <= self.longest)


def _fault(state: tenacity.RetryCallState) -> Fault:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, Failed)
    return error.fault
