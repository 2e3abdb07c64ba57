"""The figure of a race: one row per problem, against seconds and against steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..framework import plots
from ..framework.plots import INK, dress
from .display import shown
from .problem import Problem
from .race import Curve

# Okabe and Ito's palette, which color-blind readers can tell apart
_STYLES = {
    "SGD": ("#E69F00", 1.7),
    "Adam": ("#0072B2", 1.7),
    "L-BFGS": ("#009E73", 1.7),
    "K-FAC": ("#CC79A7", 1.7),
    "Natural gradient": ("#D55E00", 2.8),
}
_APART = 0.115  # least distance of two labels, as a share of the panel's height

Race = tuple[Problem, Sequence[Curve]]


def draw(races: Sequence[Race]) -> Figure:
    """The figure."""
    figure = plots.new(10.5, 3.7 * len(races), dpi=130)
    grid = figure.subplots(len(races), 2, squeeze=False, sharey="row")
    for (problem, curves), (left, right) in zip(races, grid, strict=True):
        _panel(left, curves, "seconds")
        _panel(right, curves, "steps")
        left.set_ylabel(next(iter(curves[0].measures[0])), color=INK)
        left.set_title(problem.title, loc="left", color=INK, weight="bold")
        right.set_title(problem.setting, loc="right", color=INK, size=9)
        _label(right, curves)
    return figure


def _panel(axes: Axes, curves: Sequence[Curve], along: str) -> None:
    """The curves, each with a dot at its end."""
    for curve in curves:
        color, width = _STYLES[curve.name]
        x, y = getattr(curve, along)[1:], curve.values()[1:]
        axes.plot(x, y, color=color, lw=width, solid_joinstyle="round")
        axes.plot(x[-1:], y[-1:], "o", color=color, ms=2 + 1.6 * width)
    dress(axes)
    axes.set_xlabel(f"CPU {along}" if along == "seconds" else along, color=INK)


def _label(axes: Axes, curves: Sequence[Curve]) -> None:
    """Name every curve, with its final numbers, to the right of the panel."""
    bottom, top = (math.log10(y) for y in axes.get_ylim())
    at = -math.inf
    for curve in sorted(curves, key=lambda c: c.values()[-1]):
        height = (math.log10(curve.values()[-1]) - bottom) / (top - bottom)
        at = max(height, at + _APART)
        (_, end), *others = curve.measures[-1].items()
        text = f"{curve.name}\n{shown('', end)}"
        text += "".join(f"; {shown(name, value)} {name}" for name, value in others)
        axes.annotate(
            text,
            (1.03, at),
            xycoords="axes fraction",
            color=_STYLES[curve.name][0],
            va="center",
            size=9.5,
        )
