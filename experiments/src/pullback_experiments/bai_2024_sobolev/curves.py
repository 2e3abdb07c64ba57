"""Curves over epochs: when a level was reached, where they end, and how they are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..framework import plots
from ..framework.curves import Chart, finite, over_seeds, quantiles
from ..framework.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def find_epoch(record: Record, measure: str, level: float) -> float:
    """Return the first epoch at which a loss is as low, or an accuracy as high; else ∞.

    Between two epochs the curve is a line.

    >>> run = {"epoch": [0, 1, 2], "train loss": [2.0, 1.0, 0.5], "test accuracy": [0.0, 0.5, 0.6]}
    >>> find_epoch(run, "train loss", 0.75), find_epoch(run, "test accuracy", 0.9)
    (1.5, inf)
    """
    sign = 1.0
    if "accuracy" in measure:
        sign = -1.0
    values = [sign * v for v in record[measure]]
    goal = sign * level
    for epoch, value in enumerate(values):
        if value <= goal:  # NaN is not
            if epoch == 0:
                return float(record["epoch"][0])
            before = values[epoch - 1]
            a, b = record["epoch"][epoch - 1 : epoch + 1]
            return a + (b - a) * (before - goal) / (before - value)
    return math.inf


def epochs(records: Sequence[Record], measure: str, level: float) -> float:
    """Return the median over seeds of `find_epoch`."""
    return quantiles([find_epoch(r, measure, level) for r in records])[1]


def final(records: Sequence[Record], measure: str) -> float:
    """Return the median over seeds of the last value; a lost run counts as the worst."""
    return quantiles([_end(record, measure) for record in records])[1]


def _end(record: Record, measure: str) -> float:
    """Return the last value of a loss or an accuracy; the worst one if the run was lost."""
    if "accuracy" in measure and _lost(record):
        return 0.0
    return finite(record[measure][-1])


def _lost(record: Record) -> bool:
    return not math.isfinite(record["train loss"][-1])


def clearly_fewer(a: float, b: float) -> bool:
    """Return True if one count of epochs is at most nine tenths of another."""
    return math.isfinite(a) and a <= 0.9 * b


def format_epochs(value: float) -> str:
    """Return epochs to one decimal, or "never".

    >>> format_epochs(3.14159), format_epochs(math.inf)
    ('3.1', 'never')
    """
    if math.isfinite(value):
        return f"{value:.1f}"
    return "never"


_ALONG = {"epoch": "epochs", "seconds": "seconds of training", "step": "steps"}
_NAMES = {
    "train loss": "training loss",
    "test loss": "test loss",
    "train accuracy": "training accuracy",
    "test accuracy": "test accuracy",
}


def charts(records: Mapping[str, Sequence[Record]], title: str = "") -> list[Chart]:
    """Return one chart per measure."""
    measures = ("train loss", "test loss", "train accuracy", "test accuracy")
    return [chart(records, measure, title) for measure in measures]


def chart(records: Mapping[str, Sequence[Record]], measure: str, title: str) -> Chart:
    """Return the chart of a measure for every method, against epochs, seconds or steps."""
    return Chart(
        title or _NAMES[measure].capitalize(),
        _NAMES[measure],
        [over_seeds(name, runs, measure, _ALONG) for name, runs in records.items()],
        x=_ALONG,
        logx=False,
        logy="loss" in measure,
        note="medians and quartiles over seeds",
    )


_PANELS = (
    ("train loss", "training loss"),
    ("test loss", "test loss"),
    ("train accuracy", "training accuracy"),
    ("test accuracy", "test accuracy"),
)


def curves(records: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """Draw one panel per measure: medians over seeds, quartiles as bands."""
    figure = plots.make_figure(14, 3.9, f"{title}: medians and quartiles", dpi=110)
    grid = figure.subplots(1, 4)
    for axes, (measure, name) in zip(grid, _PANELS, strict=True):
        panel(axes, records, measure)
        plots.label(axes, "epoch", title=name)
    grid[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def panel(axes: Axes, records: Mapping[str, Sequence[Record]], measure: str) -> None:
    """Draw a measure of every method."""
    for name, color in plots.assign_colors(records).items():
        runs = records[name]
        plots.plot_band(axes, [r["epoch"] for r in runs], [r[measure] for r in runs], color, name)
    plots.format_axes(axes, logx=False, logy="loss" in measure)
