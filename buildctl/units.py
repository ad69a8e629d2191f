"""Bytes and times as people read them."""

from __future__ import annotations


def size(count: int | None) -> str:
    """Bytes in powers of ten: `812 kB`, `3.1 GB`; `?` for what is not known."""
    if count is None:
        return "?"
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while round(value) >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 99.95 or units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """A time: `0.4 s`, `1 min 23 s`, `2 h 05 min`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
