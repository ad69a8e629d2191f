"""Small plots as inline SVG: no script, no font, no request. Colours come from the page's style sheet.

All coordinates are in a box 420 wide, so that text stays readable on a phone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence

WIDTH = 420.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 12.0, 34.0


#: width of a letter of the page's plot font, at most; a label beside a plot gets this much of the width
LETTER, LABEL = 6.6, 0.42


#: an interval is drawn up to so many times the largest ratio: a wild one would squeeze the rest into a point
SPREAD = 3.0


def label_width(names: Iterable[str]) -> float:
    """Room for the names left of a plot."""
    return min(max((len(name) for name in names), default=0) * LETTER + 12.0, LABEL * WIDTH)


def shortened(name: str, width: float) -> str:
    """A name that fits into a width; what is left out shows as an ellipsis."""
    room = int((width - 8.0) / LETTER)
    return name if len(name) <= room else name[:max(room - 1, 1)] + "\N{HORIZONTAL ELLIPSIS}"


class Axis:
    """Maps values to pixels and knows round ticks."""

    def __init__(self, values: Iterable[float], low: float, high: float, *, pad: float = 0.06) -> None:
        known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        least, most = min(known), max(known)
        span = (most - least) or abs(most) or 1.0
        self.least, self.most = least - pad * span, most + pad * span
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.least) / (self.most - self.least)
        return self.low + share * (self.high - self.low)

    def clip(self, value: float) -> float:
        """The pixel of a value, kept inside the axis."""
        return self(min(max(value, self.least), self.most))

    def ticks(self, count: int = 5) -> list[float]:
        """Round numbers inside the axis."""
        raw = (self.most - self.least) / count
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
        first = math.ceil(self.least / step)
        return [round(number * step, 10) for number in range(first, math.floor(self.most / step) + 1)]


def svg(height: float, parts: Iterable[str], label: str) -> str:
    """The whole picture; `label` is read aloud by screen readers."""
    return (f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{html.escape(label)}">'
            + "".join(parts) + "</svg>")


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    """Words at a place."""
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{html.escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rectangle(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A box, with words that show when it is pointed at."""
    inner = f"<title>{html.escape(title)}</title>" if title else ""
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{max(height, 0.0):.1f}" '
            f'class="{kind}">{inner}</rect>')


def dot(x: float, y: float, kind: str, title: str = "", radius: float = 3.5) -> str:
    """A point, with words that show when it is pointed at."""
    inner = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}">{inner}</circle>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"/>'


def x_axis(axis: Axis, y: float, name: str, form: Callable[[float], str] = "{:g}".format) -> list[str]:
    """Ticks and a name below a plot."""
    parts = [line(axis.low, y, axis.high, y, "axis")]
    for tick in axis.ticks():
        parts += [line(axis(tick), y, axis(tick), y + 4, "axis"), text(axis(tick), y + 15, form(tick), anchor="middle")]
    return [*parts, text((axis.low + axis.high) / 2, y + 29, name, anchor="middle", kind="name")]


def y_axis(axis: Axis, x: float, name: str, form: Callable[[float], str] = "{:g}".format) -> list[str]:
    """Ticks and a name left of a plot."""
    parts = [line(x, axis.low, x, axis.high, "axis")]
    for tick in axis.ticks():
        parts += [line(x - 4, axis(tick), x, axis(tick), "axis"), text(x - 7, axis(tick) + 4, form(tick), anchor="end")]
    middle = (axis.low + axis.high) / 2
    return [*parts, f'<text x="12" y="{middle:.1f}" text-anchor="middle" class="name" '
                    f'transform="rotate(-90 12 {middle:.1f})">{html.escape(name)}</text>']


def intervals(rows: Sequence[tuple[str, float, Sequence[float | None], Sequence[float | None]]], margin: float) -> str:
    """One row each: name, ratio, its interval, the wider one over prompts; the margin of equivalence is shaded.

    An interval that is not bounded runs out of the plot.
    """
    most = SPREAD * max((ratio for _, ratio, *_ in rows), default=1.0)
    ends = [min(value, most) for _, ratio, one, other in rows for value in (ratio, *one, *other) if value is not None]
    left = label_width(name for name, *_ in rows)
    axis = Axis([*ends, 1 - margin, 1 + margin, 1.0], left, WIDTH - RIGHT)
    bottom = TOP + 34.0 * len(rows)
    parts = [rectangle(axis(1 - margin), TOP, axis(1 + margin) - axis(1 - margin), bottom - TOP, "margin",
                       f"margin of equivalence, {margin:.0%}"), line(axis(1), TOP, axis(1), bottom, "zero")]
    for place, (name, ratio, narrow, wide) in enumerate(rows):
        y = TOP + 34.0 * place + 17.0
        for (low, high), kind in ((wide, "wide"), (narrow, "narrow")):
            parts.append(line(axis.low if low is None else axis.clip(low), y,
                              axis.high if high is None else axis.clip(high), y, kind))
        parts += [dot(axis.clip(ratio), y, "candidate", f"{name}: {ratio:.4f}", 4.5),
                  text(4, y + 4, shortened(name, left))]
    return svg(bottom + BOTTOM, [*parts, *x_axis(axis, bottom, "ratio to the baseline")], "ratios with their intervals")


def pairs(ratios: Sequence[tuple[int, float]], mean: float, margin: float) -> str:
    """The ratio of each pair of server starts, in the order of the run."""
    height = 170.0
    y = Axis([*(ratio for _, ratio in ratios), mean, 1.0], height, TOP)
    x = Axis([float(pair + 1) for pair, _ in ratios], LEFT, WIDTH - RIGHT, pad=0.15)
    low, high = y.clip(1 - margin), y.clip(1 + margin)
    parts = [rectangle(LEFT, high, WIDTH - RIGHT - LEFT, low - high, "margin"),
             line(LEFT, y(1), WIDTH - RIGHT, y(1), "zero"), line(LEFT, y(mean), WIDTH - RIGHT, y(mean), "mean")]
    parts += [dot(x(pair + 1), y(ratio), "candidate", f"pair {pair + 1}: {ratio:.4f}") for pair, ratio in ratios]
    parts += [text(x(pair + 1), height + 15, str(pair + 1), anchor="middle") for pair, _ in ratios]
    parts.append(text((LEFT + WIDTH) / 2, height + 29, "pair of server starts", anchor="middle", kind="name"))
    return svg(height + BOTTOM, [*parts, *y_axis(y, LEFT, "ratio")], "ratio of each pair of server starts")


def scatter(points: Sequence[tuple[str, float, float]], names: tuple[str, str]) -> str:
    """One point per prompt: baseline against candidate; above the line the candidate is faster."""
    height = 250.0
    both = [value for _, one, other in points for value in (one, other)]
    x, y = Axis(both, LEFT, WIDTH - RIGHT), Axis(both, height, TOP)
    parts = [line(x(x.least), y(y.least), x(x.most), y(y.most), "zero")]
    parts += [dot(x(one), y(other), "candidate", f"{name}: {one:.1f} and {other:.1f} tok/s")
              for name, one, other in points]
    return svg(height + BOTTOM, [*parts, *x_axis(x, height, f"{names[0]}, tok/s"),
                                 *y_axis(y, LEFT, f"{names[1]}, tok/s")], "decode rate of each prompt in both arms")


def distributions(curves: Sequence[tuple[str, Sequence[float]]], name: str) -> str:
    """Cumulative distributions from quantiles at 0, 5, ... 100 percent; the names stand above the plot."""
    top = TOP + 15.0 * len(curves)
    height = top + 138.0
    x = Axis([value for _, values in curves for value in values], LEFT, WIDTH - RIGHT)
    y = Axis([0.0, 100.0], height, top, pad=0.0)
    parts = []
    for place, (label, values) in enumerate(curves):
        kind = f"curve{place % 4}"
        row = TOP + 15.0 * place
        parts += [path([(x(value), y(100.0 * step / (len(values) - 1))) for step, value in enumerate(values)], kind),
                  line(LEFT, row, LEFT + 20, row, kind),
                  text(LEFT + 26, row + 4, shortened(label, WIDTH - LEFT - 26 - RIGHT))]
    return svg(height + BOTTOM, [*parts, *x_axis(x, height, name), *y_axis(y, LEFT, "requests", "{:g} %".format)], name)


def bars(values: Sequence[int], name: str) -> str:
    """Shares of verify rounds by the number of accepted draft tokens."""
    height, total = 130.0, sum(values) or 1
    y = Axis([0.0, 100.0 * max(values, default=0) / total], height, TOP, pad=0.0)
    wide = (WIDTH - LEFT - RIGHT) / max(len(values), 1)
    parts = []
    for place, value in enumerate(values):
        share = 100.0 * value / total
        left = LEFT + wide * place
        parts += [rectangle(left + 0.15 * wide, y(share), 0.7 * wide, height - y(share), "bar",
                            f"{place} accepted: {share:.1f} %"),
                  text(left + wide / 2, height + 15, str(place), anchor="middle")]
    parts += [line(LEFT, height, WIDTH - RIGHT, height, "axis"),
              text((LEFT + WIDTH) / 2, height + 29, name, anchor="middle", kind="name")]
    return svg(height + BOTTOM, [*parts, *y_axis(y, LEFT, "rounds", "{:g} %".format)], name)


#: name, and (label, kind, begin, end) for each stretch of a block
Stretch = tuple[str, str, float, float]


def timeline(rows: Sequence[tuple[str, Sequence[Stretch]]], curves: Sequence[tuple[str, str, Sequence[float],
                                                                                   Sequence[float]]]) -> str:
    """Blocks over the seconds of the run, and below them one strip for each telemetry curve (name, unit, x, y)."""
    ends = [moment for _, stretches in rows for _, _, begin, end in stretches for moment in (begin, end)]
    left = max(label_width(name for name, _ in rows), 86.0)
    x = Axis(ends, left, WIDTH - RIGHT, pad=0.01)
    parts: list[str] = []
    for place, (name, stretches) in enumerate(rows):
        top = TOP + 18.0 * place
        parts.append(text(4, top + 11, shortened(name, left)))
        parts += [rectangle(x(begin), top, x(end) - x(begin), 13, kind, f"{label}: {end - begin:.1f} s")
                  for label, kind, begin, end in stretches]
    bottom = TOP + 18.0 * len(rows) + 6
    for name, unit, moments, values in curves:
        if not values:
            continue
        y = Axis([0.0, *values], bottom + 40, bottom + 4, pad=0.0)
        points = [(x.clip(moment), y(value)) for moment, value in zip(moments, values, strict=True)]
        parts += [path(points, "curve2"), text(4, bottom + 18, name),
                  text(4, bottom + 32, f"max {max(values):g} {unit}")]
        bottom += 46
    return svg(bottom + BOTTOM, [*parts, *x_axis(x, bottom, "seconds since the start of the run")],
               "timeline of server starts and telemetry")
