"""Figure 3, drawn: one map of moves per method and depth."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..framework import plots
from ..framework.results import Results
from .tangents import METHODS


def draw(results: Results, depths: Sequence[int]) -> Figure:
    """The first seed; blue and red are moves of either sign, relative to the observed entry's."""
    title = "How entries of an 11×11 product of L factors move when the middle one is observed"
    figure = plots.new(9.6, 2.3 * len(depths) + 0.5, title)
    grid = figure.subplots(len(depths), 4, squeeze=False)
    image = None
    for row, depth in zip(grid, depths, strict=True):
        record = results.of(f"L={depth}")[0]
        for axes, method in zip(row, METHODS, strict=True):
            image = axes.imshow(record[method], cmap="RdBu_r", vmin=-1, vmax=1)
            axes.set(xticks=[], yticks=[])
            largest = record["elsewhere"][method]
            words = "0" if largest < 1e-12 else f"{largest:.1g}"
            plots.label(axes, x=f"elsewhere ≤ {words}", title=method if depth == depths[0] else "")
        plots.label(row[0], y=f"L = {depth}")
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.6, label="move / move of the middle entry")
    return figure
