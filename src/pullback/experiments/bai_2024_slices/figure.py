"""Test accuracy against epochs and seconds: means over seeds, deviations as bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..framework import plots
from ..framework.plain import Record
from .methods import ADAM, FIRST, POLAR, SECOND, SGD, SLICED, START, UNITS

#: one row each; a dashed line is what theory says another one equals
_ROWS = {
    "the paper's": (SGD, FIRST, SECOND),
    "beside them": (SGD, START, FIRST, UNITS, POLAR),
    "Adam": (SGD, ADAM, SLICED),
}
_ORDER = (SGD, FIRST, SECOND, UNITS, POLAR, ADAM, SLICED, START)
_COLORS: dict[str, str] = dict(zip(_ORDER, plots.PALETTE, strict=True))
_DASHED = {START: "--", UNITS: ":"}


def curves(found: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """A row for each group of methods: against seconds (Figure 2a), against epochs (2b)."""
    figure = plots.new(13, 3.1 * len(_ROWS) + 0.5, title, dpi=100)
    grid = figure.subplots(len(_ROWS), 3, squeeze=False)
    for row, (group, names) in zip(grid, _ROWS.items(), strict=True):
        for axes, along in zip(row, ("seconds", "epoch"), strict=False):
            for name in names:
                mean_band(axes, found[name], along, "test accuracy", name)
            plots.dress(axes, logx=False, logy=False)
            plots.label(
                axes, "epoch" if along == "epoch" else "seconds of training", "test accuracy"
            )
        for name in names:
            mean_band(row[2], found[name], "epoch", "train loss", name)
        plots.dress(row[2], logx=False)
        plots.label(row[2], "epoch", "training loss")
        plots.label(row[0], title=group)
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def mean_band(axes: Axes, runs: Sequence[Record], along: str, what: str, name: str) -> None:
    """Mean ± standard deviation at every epoch that all seeds reached."""
    count = min(len(r[what]) for r in runs)
    x, y = (np.array([r[key][:count] for r in runs], dtype=float) for key in (along, what))
    at, middle, spread = x.mean(0), y.mean(0), y.std(0, ddof=min(1, len(runs) - 1))
    axes.plot(at, middle, _DASHED.get(name, "-"), color=_COLORS[name], lw=1.7, label=name)
    # the band does not leave the runs: no negative losses, no accuracies above one
    low, high = np.maximum(middle - spread, y.min(0)), np.minimum(middle + spread, y.max(0))
    axes.fill_between(at, low, high, color=_COLORS[name], alpha=0.15, lw=0)
