"""What the figures of a page are drawn from: lines by series, and by what they run along.

A page switches between these, so that a series has one line for each: over seeds, the median
against steps is another one than that against seconds.

    Chart("Deep network", "loss", [over_seeds("Adam", runs, "loss", ("step", "seconds"))])
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal


def finite(value: float) -> float:
    """Return the value; ∞ where it is no finite number, as for a run that was lost."""
    if math.isfinite(value):
        return value
    return math.inf


def value_at(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Return y at the last x ≤ at; a run that ended has its last value.

    >>> value_at([0, 2, 4], [9.0, 8.0, 7.0], 3), value_at([0, 2, 4], [9.0, 8.0, 7.0], 99)
    (8.0, 7.0)
    """
    return finite(y[max(bisect_right(x, at) - 1, 0)])


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third.

    >>> quantiles([4.0, 1.0, 2.0, 3.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    ordered = sorted(values)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = ordered[math.floor(position)]
        high = ordered[math.ceil(position)]
        # ∞ − ∞ is no number
        if low == high:
            return low
        return low + (position % 1) * (high - low)

    return at(0.25), at(0.5), at(0.75)


Style = Literal["solid", "dashed", "dotted"]
#: how axes are called, where that is not their key
_NAMES = {"step": "steps", "seconds": "seconds of training"}


@dataclass(frozen=True)
class Line:
    """y against x, in a band where low and high are given; all as long as x."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Series:
    """A line with a name.

    Attributes:
        name: in the legend.
        lines: by what they run along, such as "step" and "seconds".
        color: a place in the palette; None for the next one.
        style: how it is drawn.
    """

    name: str
    lines: Mapping[str, Line]
    color: int | None = None
    style: Style = "solid"

    def has_points(self) -> bool:
        """Return True if some line has a point."""
        return any(len(line.x) for line in self.lines.values())


@dataclass(frozen=True)
class Chart:
    """Series in one pair of axes.

    Attributes:
        title: above it.
        y: what is drawn.
        series: None where there is nothing of it yet.
        x: names of what the lines run along, by key; the first is shown first.
        logx, logy: how the axes are at first.
        note: what lines and bands are.
    """

    title: str
    y: str
    series: Sequence[Series | None]
    x: Mapping[str, str] = field(default_factory=dict)
    logx: bool = True
    logy: bool = True
    note: str = ""

    def drawable_series(self) -> list[Series]:
        """Return the series that have a point to show."""
        return [s for s in self.series if s is not None and s.has_points()]

    def axis_names(self) -> dict[str, str]:
        """Return the name of everything that some line runs along, by its key."""
        keys: dict[str, None] = {}
        for series in self.drawable_series():
            keys |= dict.fromkeys(series.lines)
        order = [*(k for k in self.x if k in keys), *(k for k in keys if k not in self.x)]
        return {key: self.x.get(key, _NAMES.get(key, key)) for key in order}


def over_seeds(
    name: str,
    runs: Sequence[Mapping[str, Any]],
    y: str,
    along: Iterable[str],
    *,
    color: int | None = None,
    style: Style = "solid",
) -> Series | None:
    """Median and quartiles of the entry `y` of runs; None where there is no run.

    >>> runs = [{"step": [0, 1], "loss": [4.0, 2.0]}, {"step": [0, 1], "loss": [6.0, 4.0]}]
    >>> over_seeds("Adam", runs, "loss", ["step"]).lines["step"].y
    [5.0, 3.0]
    """
    if not runs:
        return None
    ys = [one[y] for one in runs]
    lines = {}
    for key in along:
        xs = [one[key] for one in runs]
        lines[key] = quartiles(xs, ys, spaced=key == "seconds", zero=True)
    return Series(name, lines, color, style)


def quartiles(
    xs: Sequence[Sequence[float]],
    ys: Sequence[Sequence[float]],
    *,
    spaced: bool = False,
    zero: bool = False,
) -> Line:
    """Return the median and the quartiles of runs, one x and y each.

    A run that ended keeps its last y. They are taken at every x that occurs, or where `spaced` at
    points evenly spaced in the logarithm, which suits times: no two runs share one. These are > 0
    unless `zero` is asked for.
    """
    grid = _choose_grid(xs, spaced=spaced, zero=zero)
    low: list[float] = []
    middle: list[float] = []
    high: list[float] = []
    for at in grid:
        values = [value_at(x, y, at) for x, y in zip(xs, ys, strict=True)]
        spread = quantiles(values)
        low.append(_nan_unless_finite(spread[0]))
        middle.append(_nan_unless_finite(spread[1]))
        high.append(_nan_unless_finite(spread[2]))
    return Line(grid, middle, low, high)


def _choose_grid(xs: Sequence[Sequence[float]], *, spaced: bool, zero: bool) -> list[float]:
    """Return the x at which runs are compared; see `quartiles`."""
    if spaced:
        grid = _space_times(xs)
    else:
        grid = sorted({float(x) for x in chain.from_iterable(xs) if x > 0})
    if zero and any(one[0] == 0 for one in xs if len(one)):
        return [0.0, *grid]
    return grid


def averages(xs: Sequence[Sequence[float]], ys: Sequence[Sequence[float]]) -> Line:
    """Means ± standard deviations where all runs have an entry; the band does not leave the runs.

    >>> averages([[0, 1], [0, 1, 2]], [[1.0, 2.0], [3.0, 2.0, 5.0]])
    Line(x=[0.0, 1.0], y=[2.0, 2.0], low=[1.0, 2.0], high=[3.0, 2.0])
    """
    at = []
    middle = []
    low = []
    high = []
    for x, y in zip(zip(*xs, strict=False), zip(*ys, strict=False), strict=True):
        values = [finite(float(v)) for v in y]
        mean = sum(values) / len(values)
        if math.isfinite(mean):
            squares = sum((v - mean) ** 2 for v in values)
        else:
            squares = math.inf
        off = math.sqrt(squares / max(len(values) - 1, 1))
        at.append(sum(map(float, x)) / len(x))
        middle.append(_nan_unless_finite(mean))
        low.append(_nan_unless_finite(max(mean - off, min(values))))
        high.append(_nan_unless_finite(min(mean + off, max(values))))
    return Line(at, middle, low, high)


def _space_times(xs: Sequence[Sequence[float]], count: int = 120) -> list[float]:
    """Return times in a geometric sequence, from the first entry after the start to the last."""
    shortest = 1e-4  # seconds: a logarithm needs a start above zero
    first = min((one[1] for one in xs if len(one) > 1), default=shortest)
    first = max(first, shortest)
    last = max(one[-1] for one in xs)
    ratio = max(last / first, 1.0)
    return [first * ratio ** (i / (count - 1)) for i in range(count)]


def _nan_unless_finite(value: float) -> float:
    """Return the value, or not a number, which a figure leaves out."""
    if math.isfinite(value):
        return value
    return math.nan
