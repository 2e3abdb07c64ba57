"""Mismatch against steps, one panel per network: medians over runs, extremes as bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..framework import plots
from ..framework.plots import INK, PALETTE
from .checks import SAME, Found
from .methods import GROUPS
from .nets import Net
from .run import Record

_STYLES = ("-", (0, (4, 2)), "-", "-", "-")  # the first two lie upon each other
_COLUMNS = 3
_BOTTOM, _TOP = 1e-16, 1e3


def draw(found: Found, nets: Sequence[Net]) -> Figure:
    """One panel per network."""
    rows = math.ceil(len(nets) / _COLUMNS)
    title = "A network and its affinely reparametrized twin, trained alike"
    figure = plots.new(11, 0.9 + 2.6 * rows, title)
    grid = figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True, sharey=True)
    for axes, net in zip(grid.flat, nets, strict=False):
        for color, style, group in zip(PALETTE[: len(GROUPS)], _STYLES, GROUPS, strict=True):
            _band(axes, found[net.name, group], color, style, group)
        _dress(axes, net)
    for axes in list(grid.flat)[len(nets) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("step", color=INK)
    for row in grid:
        row[0].set_ylabel("mismatch", color=INK)
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def _band(axes: Axes, records: Sequence[Record], color: str, style: object, name: str) -> None:
    """The median over seeds and variants, between the best and the worst."""
    curves = [[_shown(v) for v in r.mismatch] for r in records]
    steps = range(len(curves[0]))
    columns = list(zip(*curves, strict=True))
    middle = [median(c) for c in columns]
    axes.plot(steps, middle, color=color, lw=1.9, ls=style, label=name)  # pyright: ignore[reportArgumentType]
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axes.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)


def _shown(value: float) -> float:
    """Within the panel: exact equality and divergence have no place on a logarithmic axis."""
    return min(max(value, _BOTTOM), _TOP)


def _dress(axes: Axes, net: Net) -> None:
    plots.dress(axes, logx=False)
    axes.set_ylim(_BOTTOM, _TOP)
    axes.axhline(SAME, color=INK, lw=0.8, ls=":")
    plots.label(axes, title=net.name)
