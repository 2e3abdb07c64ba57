"""Losses and accuracies on both sets against epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator

from ..framework import plots
from ..framework.plain import Record

_PANELS = (
    ("train loss", "training loss"),
    ("test loss", "test loss"),
    ("train accuracy", "training accuracy"),
    ("test accuracy", "test accuracy"),
)


def curves(found: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """One panel per measure: medians over seeds, quartiles as bands."""
    figure = plots.new(14, 3.9, f"{title}: medians and quartiles", dpi=110)
    grid = figure.subplots(1, 4)
    for axes, (measure, name) in zip(grid, _PANELS, strict=True):
        panel(axes, found, measure)
        plots.label(axes, "epoch", title=name)
    grid[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def panel(axes: Axes, found: Mapping[str, Sequence[Record]], measure: str) -> None:
    """A measure of every method."""
    for color, (name, runs) in zip(plots.PALETTE, found.items(), strict=False):
        plots.band(axes, [r["epoch"] for r in runs], [r[measure] for r in runs], color, name)
    plots.dress(axes, logx=False, logy="loss" in measure)
    if "loss" in measure:  # of which a panel may show less than a decade
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
