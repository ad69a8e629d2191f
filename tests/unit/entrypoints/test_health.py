"""HEALTHCHECK: the heartbeat in a benchmark, the server in serve."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from entrypoints import health
from entrypoints.errors import CannotWrite
from entrypoints.readiness import Expect, wait_ready
from tests.unit.entrypoints.serving import MODEL, server


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    health._last.clear()
    return health.state_file()


def test_nobody_is_here(place: Path) -> None:
    assert health.check() == (False, "no runner here: this container was not started with serve or benchmark")
    place.write_text("{", encoding="utf-8")
    assert not health.check()[0]
    health.forget()
    assert not place.exists()
    health.forget()


def test_a_benchmark_is_healthy_while_it_beats(place: Path) -> None:
    health.beat("measuring")
    assert health.check() == (True, "benchmark: measuring")
    state = json.loads(place.read_text(encoding="utf-8"))
    assert state["pid"] == os.getpid()
    place.write_text(json.dumps({**state, "time": time.time() - 100}), encoding="utf-8")
    healthy, why = health.check()
    assert not healthy
    assert why == "no heartbeat for 100 s, last phase: measuring"
    health.beat("measuring")  # within a second: not written again
    assert not health.check()[0]
    health.beat("stopping")
    assert health.check() == (True, "benchmark: stopping")


def test_serving_asks_the_server(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        wait_ready(one, Expect(MODEL), stall=10, mode="serve")
        assert health.check() == (False, "serve: starting, not ready yet")
        health.beat("serving", "serve", port=one.launch.port)
        assert health.check() == (True, f"/health on port {one.launch.port} says 200")
    healthy, why = health.check()
    assert not healthy
    assert "refused" in why


def test_a_starting_server_is_not_asked(tmp_path: Path) -> None:
    with server(tmp_path, starting=None) as one:
        health.beat("serving", "serve", port=one.launch.port)
        while not any("Uvicorn running" in line for line in one.log.lines):
            one.wait(0.02)
        assert health.check() == (False, f"/health on port {one.launch.port} says 503")


def test_no_writable_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(CannotWrite, match="--tmpfs /tmp"):
        health.state_file()
