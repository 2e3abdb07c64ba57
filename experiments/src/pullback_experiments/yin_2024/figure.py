"""Loss and error against steps and against seconds: medians over seeds, quartiles as bands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from ..framework import plots
from ..framework.results import Results

if TYPE_CHECKING:
    from .experiment import Comparison

_COLUMNS = (("loss", "steps"), ("loss", "seconds"), ("error", "steps"), ("error", "seconds"))
_NAMES = {"loss": "loss", "error": "relative L² error"}


def draw(experiment: Comparison, results: Results) -> Figure:
    """One row per group of methods."""
    groups = experiment.groups
    layers = "-".join(map(str, experiment.setting.layers))
    problem, count = experiment.setting.problem().name, len(results.seeds)
    title = f"{problem}, {layers} tanh network, {count} seeds: medians and quartiles"
    figure = plots.new(16, 0.6 + 3.4 * len(groups), title, dpi=110)
    grid = figure.subplots(len(groups), 4, squeeze=False, sharey=False)
    for row, (group, names) in zip(grid, groups.items(), strict=True):
        for axes, (what, along) in zip(row, _COLUMNS, strict=True):
            for color, name in zip(plots.PALETTE, names, strict=False):
                runs = results.of(name)
                xs, ys = [r[along] for r in runs], [r[what] for r in runs]
                plots.band(axes, xs, ys, color, name, spaced=along == "seconds")
            plots.dress(axes)
            plots.label(axes, "CPU seconds" if along == "seconds" else along, _NAMES[what])
        plots.label(row[0], title=group)
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure
