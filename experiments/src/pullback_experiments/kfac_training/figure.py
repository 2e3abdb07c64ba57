"""Training and test loss, against seconds and against steps."""

from __future__ import annotations

from matplotlib.figure import Figure

from ..framework import plots
from .checks import Found, mark

_PANELS = (
    ("train loss", "seconds"), ("train loss", "step"), ("test loss", "seconds"),
)  # fmt: skip
_WIDE = 20  # below, a logarithmic axis would have no tick
_ABOVE = 3  # times the best loss of the first-order methods
_NAMES = {"seconds": "seconds of training", "step": "steps"}


def draw(found: Found, title: str) -> Figure:
    """Medians and quartiles over seeds; a line at the best loss of the first-order methods."""
    figure = plots.new(13, 4.2, f"{title}: medians and quartiles")
    panels = figure.subplots(1, len(_PANELS))
    for axes, (measure, along) in zip(panels, _PANELS, strict=True):
        for color, (name, runs) in zip(plots.PALETTE, found.items(), strict=False):
            xs, ys = [r[along] for r in runs], [r[measure] for r in runs]
            plots.band(axes, xs, ys, color, name, spaced=along == "seconds")
        if measure == "train loss":
            axes.axhline(mark(found), color=plots.INK, lw=0.8, ls=":")
        ends = [v for runs in found.values() for r in runs for v in r[measure] if v > 0]
        logarithmic = max(ends) > _WIDE * min(ends)
        plots.dress(axes, logy=logarithmic)
        if not logarithmic:  # the start is far above what matters
            axes.set_ylim(top=min(axes.get_ylim()[1], _ABOVE * mark(found)))
        plots.label(axes, _NAMES[along], measure.replace("train", "training"))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False)
    return figure
