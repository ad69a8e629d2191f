from __future__ import annotations

from pathlib import Path

import pytest

from entrypoints import calibrate
from entrypoints.errors import Bug


def test_the_null_server_paces_and_the_client_finds_that_pace() -> None:
    rows = calibrate.measure([1, 8], gap=0.01, chunks=20)
    assert [(row["streams"], row["chunks"], row["failed"]) for row in rows] == [(1, 20, 0), (8, 160, 0)]
    for row in rows:
        assert 0 < row["added_ms"]["p50"] < 50
        assert abs(row["pace_error_pct"]) < 25
        assert row["cpu_us_per_chunk"] > 0
    assert calibrate.table(rows).splitlines()[1].split()[0] == "1"


def test_a_null_server_that_does_not_start_is_a_bug_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "x.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr(calibrate, "SERVER", broken)
    with pytest.raises(Bug, match="the null server did not start"):
        calibrate.measure([1])
