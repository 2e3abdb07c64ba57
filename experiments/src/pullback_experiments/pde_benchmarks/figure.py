"""Error against seconds, one panel per problem."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from ..framework import plots
from .checks import Found

_COLUMNS = 4


def draw(found: Found, targets: Mapping[str, float]) -> Figure:
    """Medians and quartiles over seeds; a line at what others report."""
    columns = min(_COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    figure = plots.new(1.5 + 3.6 * columns, 0.9 + 3.0 * rows, "Relative L² error against seconds")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (problem, by) in zip(grid.flat, found.items(), strict=False):
        for color, (method, runs) in zip(plots.PALETTE, by.items(), strict=False):
            xs, ys = [r["seconds"] for r in runs], [r["error"] for r in runs]
            plots.band(axes, xs, ys, color, method, spaced=True)
        if problem in targets:
            axes.axhline(targets[problem], color=plots.INK, lw=0.8, ls=":")
        plots.dress(axes)
        plots.label(axes, "seconds", "error", problem)
    for axes in list(grid.flat)[len(found) :]:
        axes.set_visible(False)
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure
