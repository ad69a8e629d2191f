"""Ctrl-C and TERM between making something and knowing it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from buildctl import interrupts


def test_an_interrupt_waits_until_the_end() -> None:
    done = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupts.held():  # noqa: PT012 - the order of things is what is tested
        os.kill(os.getpid(), signal.SIGINT)
        done.append("inside")
    assert done == ["inside"]
    assert signal.getsignal(signal.SIGTERM) is before
    with interrupts.held():
        pass


def test_a_thread_is_left_alone() -> None:
    """Signals arrive in the main thread only, and handlers cannot be set in another."""
    done: list[int] = []

    def work() -> None:
        with interrupts.held():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
