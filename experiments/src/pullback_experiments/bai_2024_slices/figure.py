"""Test accuracy against epochs and seconds: means over seeds, deviations as bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..framework import plots
from ..framework.curves import averages
from ..framework.plain import Record
from .charts import ORDER, ROWS
from .methods import START, UNITS

_COLORS: dict[str, str] = dict(zip(ORDER, plots.PALETTE, strict=True))
#: what theory says another one equals
_DASHED = {START: "--", UNITS: ":"}


def curves(found: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """A row for each group of methods: against seconds (Figure 2a), against epochs (2b)."""
    figure = plots.new(13, 3.1 * len(ROWS) + 0.5, title, dpi=100)
    grid = figure.subplots(len(ROWS), 3, squeeze=False)
    for row, (group, all_names) in zip(grid, ROWS.items(), strict=True):
        names = [n for n in all_names if found[n]]
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
    line = averages([r[along] for r in runs], [r[what] for r in runs])
    axes.plot(line.x, line.y, _DASHED.get(name, "-"), color=_COLORS[name], lw=1.7, label=name)
    axes.fill_between(line.x, line.low, line.high, color=_COLORS[name], alpha=0.15, lw=0)
