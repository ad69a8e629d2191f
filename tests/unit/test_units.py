from __future__ import annotations

from buildctl.units import duration, size


def test_times_as_people_say_them() -> None:
    assert [duration(seconds) for seconds in (0.04, 59.94, 59.96, 83.4, 3599.7, 7500)] == [
        "0.0 s", "59.9 s", "1 min 00 s", "1 min 23 s", "1 h 00 min", "2 h 05 min"]


def test_sizes_as_people_say_them() -> None:
    assert [size(count) for count in (None, 0, 999, 812_300, 999_600, 5_000_000, 3_140_000_000, 1_200_000_000_000)] == [
        "?", "0 B", "999 B", "812 kB", "1.0 MB", "5.0 MB", "3.1 GB", "1.2 TB"]
