"""The figure of a race: one row per problem, against seconds and against steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .display import shown
from .problem import Problem
from .race import Curve

# Okabe and Ito's palette, which color-blind readers can tell apart
_STYLES = {
    "SGD": ("#E69F00", 1.6),
    "Adam": ("#0072B2", 1.6),
    "L-BFGS": ("#009E73", 1.6),
    "Natural gradient": ("#D55E00", 2.6),
}
_INK, _GRID = "#333333", "#DDDDDD"


def draw(races: Sequence[tuple[Problem, Sequence[Curve]]], path: Path) -> Path:
    """Write the figure and return its path."""
    figure = Figure(figsize=(10, 3.6 * len(races)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(races), 2, squeeze=False, sharey="row")
    for (problem, curves), (left, right) in zip(races, grid, strict=True):
        for axes, along in ((left, "seconds"), (right, "steps")):
            _panel(axes, curves, along)
        name = next(iter(curves[0].measures[0]))
        left.set_ylabel(name, color=_INK)
        left.set_title(f"{problem.title}: {name} against time", loc="left", color=_INK)
        right.set_title("against steps", loc="left", color=_INK)
        _label(right, curves)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _panel(axes: Axes, curves: Sequence[Curve], along: str) -> None:
    for curve in curves:
        color, width = _STYLES[curve.name]
        axes.plot(
            getattr(curve, along)[1:], curve.values()[1:], color=color, lw=width, label=curve.name
        )
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("seconds" if along == "seconds" else "steps", color=_INK)
    axes.grid(True, color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, which="both")


def _label(axes: Axes, curves: Sequence[Curve]) -> None:
    """Name every curve at its end."""
    for curve in curves:
        color, _ = _STYLES[curve.name]
        last = ", ".join(shown(n, v) for n, v in curve.measures[-1].items())
        axes.annotate(
            f"{curve.name}  {last}",
            (curve.steps[-1], curve.values()[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            color=color,
            va="center",
        )
