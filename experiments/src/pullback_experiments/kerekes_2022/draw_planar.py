"""Figure 2, drawn: separators in the plane, and EGD's direction against the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..framework import plots
from ..framework.results import Results


def draw(
    results: Results,
    depths: Sequence[int],
    points: Callable[[int, torch.device], tuple[Tensor, Tensor]],
) -> Figure:
    """The first seed's points with EGD's and NGD's separators; directions over all seeds."""
    figure = plots.new(15, 4.6, "Separable points of the plane: depth turns EGD, and not NGD")
    left, middle, right = figure.subplots(1, 3)
    x, y = points(results.seeds[0], torch.device("cpu"))
    for axes, method in ((left, "EGD"), (middle, "NGD")):
        _scatter(axes, x, y)
        for place, (color, depth) in enumerate(zip(plots.PALETTE, depths, strict=False)):
            beta = _first(results, method, place, depth)
            width = 1.6 if method == "EGD" else 0.9 * (len(depths) - place) + 0.8
            _separator(axes, beta, color, f"L = {depth}", width)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        plots.label(axes, "x₁", "x₂", f"{method}, seed {results.seeds[0]}")
    runs = results.of("EGD")
    for place, (color, depth) in enumerate(zip(plots.PALETTE, depths, strict=False)):
        xs, ys = [r["level"] for r in runs], [r["angles"][place] for r in runs]
        plots.band(right, xs, ys, color, f"EGD, L = {depth}")
        limit = sorted(r["limit angle"][place] for r in runs)[len(runs) // 2]
        right.axhline(limit, color=color, lw=0.9, ls=":")
    natural = sorted(r["descent angle"] for r in results.of("NGD", "L=1"))
    right.axhline(natural[len(natural) // 2], color=plots.INK, lw=1.4, ls="--", label="NGD, all L")
    plots.dress(right, logy=False)
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    title = f"{len(results.seeds)} seeds; dotted: ℓ_{{2/L}} margins"
    plots.label(right, "−log loss", "degrees from the axis e₁", title)
    return figure


def _first(results: Results, method: str, place: int, depth: int) -> Sequence[float]:
    """β of the first seed."""
    if method == "EGD":
        return results.of("EGD")[0]["beta"][place]
    return results.of("NGD", f"L={depth}")[0]["beta"]


def _scatter(axes: Axes, x: Tensor, y: Tensor) -> None:
    for sign, mark in ((1, "o"), (-1, "x")):
        some = x[y == sign]
        axes.plot(some[:, 0], some[:, 1], mark, color=plots.INK, ms=4, alpha=0.6)
    plots.dress(axes, logx=False, logy=False)
    axes.set(xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), aspect="equal")


def _separator(axes: Axes, beta: Sequence[float], color: str, name: str, width: float) -> None:
    """The line xᵀβ = 0."""
    along = torch.tensor([-beta[1], beta[0]], dtype=torch.float64)
    along = 5 * along / along.norm()
    axes.plot([-along[0], along[0]], [-along[1], along[1]], color=color, lw=width, label=name)
