"""What figures share: a palette, axes, a grid of colored cells.

Matplotlib is slow to import, and imported by the functions that draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .extras import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's, which color-blind readers can tell apart
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
INK, _GRID = "#333333", "#E4E4E4"

#: color, words and small print by row and column; None for an empty cell
Cells = Mapping[tuple[str, str], tuple[str, str, str] | None]


def new(width: float, height: float, title: str = "", dpi: int = 120) -> Figure:
    """An empty figure, of no window."""
    with extra("plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, color=INK, size=12, x=0.01, ha="left")
    return figure


def dress(axes: Axes, *, logx: bool = True, logy: bool = True) -> None:
    """Few ticks, a light grid, no box; logarithmic unless said otherwise."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axes.set(xscale="log" if logx else "linear", yscale="log" if logy else "linear")
    if logx:
        axes.xaxis.set_minor_formatter(NullFormatter())
    if logy:
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(True, which="major", color=_GRID, lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, which="both")


def label(axes: Axes, x: str = "", y: str = "", title: str = "") -> None:
    """Name the axes and the panel."""
    if x:
        axes.set_xlabel(x, color=INK)
    if y:
        axes.set_ylabel(y, color=INK)
    if title:
        axes.set_title(title, loc="left", color=INK, weight="bold", size=10)


def grid(found: Cells, note: str = "") -> Figure:
    """A table of colored cells, with a note below it."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    figure = new(2.4 + 1.45 * len(columns), 1.6 + 0.55 * len(rows), dpi=130)
    axes = figure.subplots()
    for (row, column), cell in found.items():
        _cell(axes, rows.index(row), columns.index(column), cell)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    names = [name.replace(" ", "\n", 1) for name in columns]
    axes.set_xticks([j + 0.5 for j in range(len(columns))], names, size=9)
    axes.set_yticks([i + 0.5 for i in range(len(rows))], rows, size=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(note, color=INK, size=9)
    return figure


def _cell(axes: Axes, i: int, j: int, cell: tuple[str, str, str] | None) -> None:
    from matplotlib.patches import Rectangle

    color, words, small = cell or ("#FFFFFF", "–", "")
    axes.add_patch(Rectangle((j, i), 1, 1, facecolor=color, edgecolor="white", lw=2))
    style: Any = {"ha": "center", "va": "center", "color": INK}
    axes.text(j + 0.5, i + (0.36 if small else 0.5), words, size=9, **style)
    axes.text(j + 0.5, i + 0.72, small, size=7.5, **style)
