"""What all tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# a shell ignores SIGINT in what it runs in the background, and that is inherited: tests of interrupts would hang in CI
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def _host_settings_are_known(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Unit tests see no proxy and no CI of this host."""
    if "unit" in request.path.parts:
        for name in list(os.environ):
            if name.lower().endswith("_proxy") or name in ("GITHUB_ACTIONS", "DOCKER_HOST", "BUILDCTL_FREE_DISK"):
                monkeypatch.delenv(name)
    return
