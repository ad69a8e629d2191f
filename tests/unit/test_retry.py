"""Bounded repetition."""

import time

import pytest

from buildctl.fault import Fault, Kind
from buildctl.retry import Failed, Policy, Retry

PASSES = Fault(Kind.TRANSIENT, "500")


class Flaky:
    """Fails with the given faults in turn, then answers."""

    def __init__(self, *faults: Fault) -> None:
        self.faults, self.calls = list(faults), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.faults:
            raise Failed(self.faults.pop(0))
        return "done"


def test_what_passes_is_repeated_and_announced() -> None:
    heard: list[Retry] = []
    flaky = Flaky(PASSES, PASSES)
    assert Policy(3, 0.001).run(flaky, heard.append) == "done"
    assert [(retry.attempt, retry.attempts, retry.fault.text) for retry in heard] == [(1, 3, "500"), (2, 3, "500")]
    assert Policy(3, 0.001).run(Flaky(PASSES)) == "done"


def test_attempts_are_bounded() -> None:
    flaky = Flaky(*[PASSES] * 9)
    with pytest.raises(Failed):
        Policy(3, 0.001).run(flaky)
    assert flaky.calls == 3


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.TRANSIENT])
def test_nothing_else_is_repeated(kind: Kind) -> None:
    flaky = Flaky(Fault(kind, "no"))
    with pytest.raises(Failed):
        Policy(3, 0.001).run(flaky)
    assert flaky.calls == 1


def test_errors_of_our_own_are_not_swallowed() -> None:
    def broken() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        Policy(3, 0.001).run(broken)


def test_waits_grow_and_jitter_within_their_bounds() -> None:
    heard: list[Retry] = []
    with pytest.raises(Failed):
        Policy(5, 0.004, 0.01).run(Flaky(*[PASSES] * 9), heard.append)
    for retry, low in zip(heard, (0.004, 0.008, 0.01, 0.01), strict=True):
        assert low <= retry.seconds <= low + 0.004


def test_a_registrys_wish_is_obeyed_and_bounded() -> None:
    started = time.monotonic()
    assert Policy(2, 0.001).run(Flaky(Fault(Kind.TRANSIENT, "429", 0.05))) == "done"
    assert time.monotonic() - started >= 0.05
    patient = Flaky(Fault(Kind.TRANSIENT, "429", 3600))
    with pytest.raises(Failed):
        Policy(5, 0.001).run(patient)
    assert patient.calls == 1
