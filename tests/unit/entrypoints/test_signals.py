"""Signals as exceptions."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import pytest

from entrypoints import signals
from entrypoints.errors import Terminated


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_each_becomes_an_exception_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Terminated) as caught, signals.as_exceptions():
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_the_same_ctrl_c_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.5, 103.0])
    monkeypatch.setattr("entrypoints.signals.time.monotonic", lambda: next(now))
    raised = []
    with signals.as_exceptions():
        for _ in range(3):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                raised.append(False)
            except Terminated:
                raised.append(True)
    assert raised == [True, False, True]


def test_it_comes_out_of_a_running_event_loop() -> None:
    async def work() -> None:
        async def inner() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        await asyncio.gather(inner(), asyncio.sleep(30), return_exceptions=True)

    with pytest.raises(Terminated), signals.as_exceptions():
        asyncio.run(work())


def test_a_signal_that_comes_while_a_destructor_runs_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    others: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", others.append)
    with pytest.raises(Terminated), signals.as_exceptions():  # noqa: PT012 - the exception comes later
        Last()
        threading.Event().wait(20)
    assert others == []
    assert sys.unraisablehook == others.append


def test_other_errors_of_destructors_are_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last:
        def __del__(self) -> None:
            raise ValueError("x")

    others: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", others.append)
    with signals.as_exceptions():
        Last()
    assert len(others) == 1


def test_a_held_signal_comes_at_the_end() -> None:
    done = []
    with pytest.raises(Terminated), signals.as_exceptions():  # noqa: PT012 - the order of things is what is tested
        with signals.held(), signals.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("inside")
        done.append("outside")
    assert done == ["inside"]
    with signals.as_exceptions(), signals.held():
        pass


def test_an_error_inside_comes_before_a_held_signal() -> None:
    with pytest.raises(ZeroDivisionError), signals.as_exceptions(), signals.held():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError
    with signals.as_exceptions(), signals.held():  # and is forgotten with the mode that it belonged to
        pass
