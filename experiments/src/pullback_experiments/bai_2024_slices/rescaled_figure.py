"""The loss that is left against the size of the rescaling."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from ..framework import plots
from ..framework.quantiles import finite, quantiles
from .rescaled_checks import Ends
from .rescaled_methods import METHODS

_TOP = 30.0  # losses beyond are drawn here: lost
_MARKS = "os^D"


def draw(found: Ends, seeds: int) -> Figure:
    """One panel per start; a sliced optimizer is a solid line, another a dashed one."""
    title = f"Training loss after rescaling each unit by 10^±size; {seeds} seeds, medians and range"
    figure = plots.new(4.2 * len(found) + 2.2, 4.2, title, dpi=110)
    grid = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axes, (start, methods) in zip(grid, found.items(), strict=True):
        sizes = list(methods[METHODS[0].name])
        for i, m in enumerate(METHODS):
            color = plots.PALETTE[i % 4]  # a method and the same on the slice share one
            ends = [[min(finite(r["train loss"][-1]), _TOP) for r in methods[m.name][s]]
                    for s in sizes]  # fmt: skip
            # side by side, since sliced ones lie on top of each other
            x = np.array(sizes) + 0.04 * (i % 4 - 1.5)
            middle = np.array([quantiles(e)[1] for e in ends])
            bars = [middle - [min(e) for e in ends], [max(e) for e in ends] - middle]
            axes.errorbar(
                x, middle, bars, fmt="-" if m.sliced else "--", marker=_MARKS[i % 4], ms=5,
                color=color, lw=1.7, elinewidth=0.8, label=m.name,
            )  # fmt: skip
        plots.dress(axes, logx=False)
        axes.set_xticks(sizes, ["as it was", *(f"10^±{s}" for s in sizes[1:])])
        axes.axhline(np.log(10), color=plots.INK, lw=0.8, ls=":")
        axes.axhline(_TOP, color=plots.INK, lw=0.8)
        plots.label(axes, "size of the rescaling", title=start)
    plots.label(grid[0], y="training loss (top: lost; dotted: chance)")
    grid[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure
