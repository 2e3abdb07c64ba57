"""The figure: a cell for each optimizer and transformation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pullback.geometry import Verdict

from ..framework.plots import INK, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOTE = "verdict on the model, and the update's relative mismatch as η → 0"
_FILL = {
    Verdict.EXACT: "#9FD8C4",
    Verdict.FIRST_ORDER: "#BBDDF3",
    Verdict.NOT: "#F6C9AE",
    Verdict.UNDECIDED: "#EEEEEE",
}

Cell = tuple[Verdict, str] | None  # a verdict and its mismatch


def grid(cells: Mapping[tuple[str, str], Cell]) -> Figure:
    """Cells by optimizer and transformation."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    figure = make_figure(2.4 + 1.45 * len(columns), 1.6 + 0.55 * len(rows), dpi=130)
    axes = figure.subplots()
    for (row, column), cell in cells.items():
        _cell(axes, rows.index(row), columns.index(column), cell)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    names = [name.replace(" ", "\n", 1) for name in columns]
    axes.set_xticks([j + 0.5 for j in range(len(columns))], names, size=9)
    labels = [name.replace("NGD, ", "Natural gradient,\n") for name in rows]
    axes.set_yticks([i + 0.5 for i in range(len(rows))], labels, size=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(_NOTE, color=INK, size=9)
    return figure


def _cell(axes: Axes, i: int, j: int, cell: Cell) -> None:
    from matplotlib.patches import Rectangle

    color = "#FFFFFF"
    verdict = "–"
    mismatch = ""
    height = 0.5
    if cell:
        color = _FILL[cell[0]]
        verdict = str(cell[0])
        mismatch = cell[1]
    if mismatch:
        height = 0.36  # there is a line below
    axes.add_patch(Rectangle((j, i), 1, 1, facecolor=color, edgecolor="white", lw=2))
    style: Any = {"ha": "center", "va": "center", "color": INK}
    axes.text(j + 0.5, i + height, verdict, size=9.5, **style)
    axes.text(j + 0.5, i + 0.72, mismatch, size=8.5, **style)
