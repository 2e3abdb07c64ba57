"""The examples as pictures, and what steps of finite size do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..framework import plots
from ..framework.plots import INK, PALETTE
from ..framework.results import Results
from .theorems import DAMPED

_PHI, _PSI, _SOFT = PALETTE[1], PALETTE[0], PALETTE[6]

Corner = Literal["lower right", "upper right"]


def draw(results: Results) -> Figure:
    """Examples 1 and 2 on the model, A.3 on the parameter space, finite steps."""
    figure = plots.new(17, 4.3, "The natural parameter gradient, and what it depends on")
    one, two, three, four = figure.subplots(1, 4)
    _plane(one, results)
    _eight(two, results)
    _space(three, results)
    _steps(four, results)
    return figure


def _arrow(axes: Axes, end: Sequence[float], color: str, name: str) -> None:
    """From zero."""
    style = {"arrowstyle": "-|>", "color": color, "lw": 2, "mutation_scale": 14}
    x, y = end
    axes.annotate("", (x, y), (0, 0), arrowprops={**style, "shrinkA": 0, "shrinkB": 0})
    axes.plot([], [], color=color, lw=2, label=name)


def _framed(axes: Axes, title: str, x: str, y: str, legend: Corner = "lower right") -> None:
    plots.dress(axes, logx=False, logy=False)
    axes.set_aspect("equal")
    plots.label(axes, x, y, title)
    axes.legend(frameon=False, fontsize=8, loc=legend)


def _plane(axes: Axes, results: Results) -> None:
    found = results.once("example 1")
    axes.axhline(0, color=_PHI, lw=0.8, ls="--")
    axes.axvline(0, color=_PSI, lw=0.8, ls="--")
    _arrow(axes, found["gradient"], INK, "grad L")
    _arrow(axes, found["moves"][0], _PHI, "through φ")
    _arrow(axes, found["moves"][1], _PSI, "through ψ")
    axes.set(xlim=(-0.5, 1.3), ylim=(-0.6, 1.0))
    _framed(axes, "Example 1: spans that meet in zero", "x", "y")


def _eight(axes: Axes, results: Results) -> None:
    found = results.once("example 2")
    at = [math.pi * (-0.25 + 1.5 * i / 200) for i in range(201)]
    axes.plot([math.sin(2 * t) for t in at], [math.sin(t) for t in at], color=_SOFT, lw=1.2)
    for end, color, name in zip(
        found["moves"], (_PHI, _PSI), ("φ at ξ₁ = 0", "ψ at θ₁ = 0, ξ₂ = π"), strict=True
    ):
        _arrow(axes, end, color, name)
    _arrow(axes, found["gradient"], INK, "grad L")
    axes.plot(0, 0, "o", color=INK, ms=4)
    _framed(axes, "Example 2: a crossing", "x = sin 2ξ", "y = sin ξ")
    # inside the upper loop, where no line is
    inside = {"bbox_to_anchor": (0, 0.72), "bbox_transform": axes.transData}
    axes.legend(frameon=False, fontsize=8, loc="center", **inside)


def _space(axes: Axes, results: Results) -> None:
    found = results.once("A.3")
    axes.plot([-0.5, 6.5], [6.5, -0.5], color=_SOFT, lw=1.2, label="all y with Gy = ∇L")
    _arrow(axes, found["y_xi"], _PHI, "y_Ξ = (3, 3)")
    _arrow(axes, found["y_theta"], _PSI, "y_Θ = (4⅘, 1⅕)")
    axes.set(xlim=(-0.5, 6.5), ylim=(-0.5, 6.5))
    _framed(axes, "A.3: two vectors, one move", "y₁", "y₂", "upper right")


def _steps(axes: Axes, results: Results) -> None:
    runs = results.of("steps")
    names = {"Moore–Penrose": "G⁺", DAMPED: "(G + λ)⁻¹"}
    for color, (key, name) in zip((_PHI, _PSI), names.items(), strict=True):
        xs = [r["size"][::-1] for r in runs]
        plots.band(axes, xs, [r["apart"][key][::-1] for r in runs], color, name)
    plots.dress(axes)
    plots.label(axes, "step size η", "difference of φ and ψ, per move", "Section 4: finite steps")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
