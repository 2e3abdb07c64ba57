"""What the figures share: a palette, axes, bands over seeds, and how they are saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from . import files
from .quantiles import held, quantiles

INK, _GRID = "#333333", "#E4E4E4"
# Okabe and Ito's, which color-blind readers can tell apart
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
_PLACES = 120  # along an axis of seconds


def new(width: float, height: float, title: str = "", dpi: int = 120) -> Figure:
    """An empty figure, of no window."""
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, color=INK, size=12, x=0.01, ha="left")
    return figure


def dress(axes: Axes, *, logx: bool = True, logy: bool = True) -> None:
    """Few ticks, a light grid, no box; logarithmic unless said otherwise."""
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


def band(
    axes: Axes,
    xs: Sequence[Sequence[float]],
    ys: Sequence[Sequence[float]],
    color: str,
    name: str = "",
    *,
    spaced: bool = False,
    **style: Any,
) -> None:
    """The median and the quartiles of runs, one x and y each; a run that ended keeps its last y.

    Quantiles are taken at every x > 0 that occurs, or where `spaced` at places evenly spaced in
    the logarithm, which suits times: no two runs share one.
    """
    places = _spaced(xs) if spaced else sorted({float(x) for one in xs for x in one if x > 0})
    spread = [quantiles([held(x, y, at) for x, y in zip(xs, ys, strict=True)]) for at in places]
    low, middle, high = ([_shown(v) for v in values] for values in zip(*spread, strict=True))
    axes.plot(places, middle, color=color, lw=style.pop("lw", 1.8), label=name or None, **style)
    axes.fill_between(places, low, high, color=color, alpha=0.15, lw=0)
    axes.plot(places[-1:], middle[-1:], "o", color=color, ms=4)


def _spaced(xs: Sequence[Sequence[float]]) -> list[float]:
    first = min((x for one in xs for x in one[1:2]), default=1e-4)
    last = max(one[-1] for one in xs)
    first = max(first, 1e-4)
    ratio = max(last / first, 1.0)
    return [first * ratio ** (i / (_PLACES - 1)) for i in range(_PLACES)]


def _shown(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png and STEM.svg, each in one piece and the same bytes for the same figure."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # once is enough
    written = []
    for kind in ("png", "svg"):
        extra = {"metadata": {"Date": None}} if kind == "svg" else {}

        def fill(file: IO[bytes], kind: str = kind, extra: dict[str, Any] = extra) -> None:
            with rc_context({"svg.hashsalt": "pullback"}):
                figure.savefig(file, format=kind, **extra)

        written.append(files.write(stem.with_name(f"{stem.name}.{kind}"), fill))
    return written
