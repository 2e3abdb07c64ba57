"""Training loss and test accuracy of the small networks, at both settings."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..framework import plots
from ..framework.results import Results
from .figure import panel
from .tuned_checks import OWN, SHARED, runs_of


def draw(results: Results, nets: Sequence[str], methods: Sequence[str]) -> Figure:
    """A row per network: training loss and test accuracy, at K-FAC's settings and at their own."""
    title = f"K-FAC and Sobolev, {len(results.seeds)} seeds: medians and quartiles"
    figure = plots.new(14, 0.6 + 3.3 * len(nets), title, dpi=110)
    grid = figure.subplots(len(nets), 4, squeeze=False)
    for row, net in zip(grid, nets, strict=True):
        for place, (settings, measure) in enumerate(
            (s, m) for s in (SHARED, OWN) for m in ("train loss", "test accuracy")
        ):
            found = {m: runs_of(results, net, m, settings) for m in methods}
            panel(row[place], found, measure)
            name = {"train loss": "training loss"}.get(measure, measure)
            who = "all at K-FAC's settings" if settings == SHARED else "each at its own"
            plots.label(row[place], "epoch", name, f"{net}: {who}" if place % 2 == 0 else "")
        _share(row[0], row[2])
        _share(row[1], row[3])
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def _share(one: Axes, two: Axes) -> None:
    """The same limits, so that the two settings can be compared."""
    low = min(one.get_ylim()[0], two.get_ylim()[0])
    high = max(one.get_ylim()[1], two.get_ylim()[1])
    one.set_ylim(low, high)
    two.set_ylim(low, high)
