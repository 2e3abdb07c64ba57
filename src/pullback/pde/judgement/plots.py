"""The picture of a solve: the solution, its error, convergence and spectrum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ..problem.problem import Problem
from .history import History


@dataclass(frozen=True)
class PlotLayout:
    """Sizes of the figures."""

    #: cells along each side of a heat map, which is at most 500 pixels wide
    cells: int = 200
    #: points of a curve, which is at most 1,500 pixels wide
    curve_points: int = 1000
    #: decades of an error that are shown at most; smaller errors get the lowest color
    decades: int = 5
    #: inches of the row of curves
    curve_height: float = 2.6


LAYOUT = PlotLayout()
_SUFFIXES = (".png", ".svg", ".pdf")

_INK = "#2B2B33"
_FAINT = "#6F6F7A"
_GRID = "#E9E9EE"
_BLUE = "#2F6DB5"
_RED = "#C8452F"
_DEFAULTS: Any = matplotlib.rcParamsDefault  # whatever the user's settings are
_STYLE: dict[Any, Any] = {
    **{k: v for k, v in _DEFAULTS.items() if not k.startswith("backend")},
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
}


class Drawable(Protocol):
    """What a picture shows of a `PDESolution`."""

    problem: Problem
    network: nn.Module
    history: History
    unknowns: dict[str, float]
    spectrum: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return u at points (N, d): (N, m)."""
        ...


def draw_solution(solution: Drawable, path: str | Path | None = None) -> Figure:
    """Return a picture of the solution, |error| of every field, convergence and singular values.

    Curves in one dimension, heat maps in two (time to the right where there is time), beyond that
    the heat map of a slice through the center. Parts that are not known are left out. Neither
    pyplot nor any global setting of matplotlib is touched. Where a path is given the picture is
    written there, as .png, .svg or .pdf.
    """
    if path is not None and Path(path).suffix.lower() not in _SUFFIXES:
        raise PullbackError(
            f"The picture cannot be written to {path}",
            f"its suffix is {Path(path).suffix!r}",
            f"Use {', '.join(_SUFFIXES)}",
        )
    with matplotlib.rc_context(_STYLE):
        figure = _draw_figure(solution)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
    return figure


def _draw_figure(solution: Drawable) -> Figure:
    """Return a row of panels for every field, and below them a row of curves."""
    problem = solution.problem
    cut = Cut.through(problem)
    values = _evaluate(solution, cut.points)
    curves = _collect_curves(solution)
    heights = [cut.height * len(problem.fields)]
    if curves:
        heights.append(LAYOUT.curve_height)
    figure = Figure(figsize=(10, sum(heights) + 0.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    grid = rows[0].subgridspec(len(problem.fields), 1 if values.truth is None else 2)
    for i, name in enumerate(problem.fields):
        panel = figure.add_subplot(grid[i, 0])
        if values.truth is None:
            cut.show_field(panel, values.solution[:, i], name, None)
            continue
        cut.show_field(panel, values.solution[:, i], name, values.truth[:, i])
        error = np.abs(values.solution[:, i] - values.truth[:, i])
        cut.show_error(figure.add_subplot(grid[i, 1]), error, name)
    if curves:
        grid = rows[1].subgridspec(1, len(curves))
        for column, curve in enumerate(curves):
            _show_curve(figure.add_subplot(grid[0, column]), curve)
    figure.suptitle(_write_title(solution), x=0.012, ha="left", fontsize=12)
    return figure


def _write_title(solution: Drawable) -> str:
    parameters = sum(p.numel() for p in solution.network.parameters())
    history = solution.history
    facts = [f"{parameters:,} parameters", f"{len(history):,} steps", f"{history.spent:.1f} s"]
    if history.error:
        facts.append(f"relative L² error {history.error[-1]:.1e}")
    facts += [f"{name} = {value:.6g}" for name, value in solution.unknowns.items()]
    return f"{solution.problem.name}:  " + ",  ".join(facts)


@dataclass(frozen=True)
class FieldValues:
    """u at the points of a picture, and what it should be if that is known, (N, m) arrays."""

    solution: Any
    truth: Any


def _evaluate(solution: Drawable, x: Tensor) -> FieldValues:
    """Return u and the truth; fields known up to a constant are moved onto the truth."""
    problem = solution.problem
    values = solution(x).detach().cpu().double().numpy()
    if not problem.known:
        return FieldValues(values, None)
    truth = problem.truth(x).detach().cpu().double().numpy()
    inside = problem.domain.contains(x).numpy() & np.isfinite(truth).all(1)
    for i, name in enumerate(problem.fields):
        if name in problem.free:
            values[:, i] -= (values[inside, i] - truth[inside, i]).mean()
    return FieldValues(values, truth)


@dataclass(frozen=True)
class Cut:
    """The points of a picture.

    Attributes:
        problem: whose domain is shown.
        axes: the coordinates to the right and upward; one in one dimension.
        points: (N, d), row by row from below.
        note: where the other coordinates are.
    """

    problem: Problem
    axes: tuple[int, ...]
    points: Tensor
    note: str = ""

    @classmethod
    def through(cls, problem: Problem) -> Cut:
        """Return all of the domain up to two dimensions, a slice through the center beyond."""
        domain = problem.domain
        low = domain.low.double()
        high = domain.high.double()
        if domain.dim == 1:
            u = torch.linspace(0, 1, LAYOUT.curve_points, dtype=torch.float64)
            return cls(problem, (0,), (low + (high - low) * u)[:, None])
        axes = (0, 1)
        if domain.evolves and domain.dim == 2:
            axes = (1, 0)
        # centers of cells: corners and the initial time may be singular
        unit = (torch.arange(LAYOUT.cells, dtype=torch.float64) + 0.5) / LAYOUT.cells
        up, right = torch.meshgrid(unit, unit, indexing="ij")
        points = (0.5 * (low + high)).repeat(LAYOUT.cells**2, 1)
        for axis, u in zip(axes, (right, up), strict=True):
            points[:, axis] = low[axis] + (high[axis] - low[axis]) * u.reshape(-1)
        return cls(problem, axes, points, _describe_slice(domain.names[2:], points[0, 2:].tolist()))

    def show_field(self, axes: Axes, u: Any, name: str, truth: Any) -> None:
        """Draw the field: a curve beside the true one, or a heat map."""
        if len(self.axes) == 2:
            self._draw_map(axes, u, "viridis", None)
            axes.set_title(f"{name}{self.note}")
            return
        x = self.points[:, 0].numpy()
        axes.plot(x, u, color=_BLUE, lw=2, label=name)
        if truth is not None:
            axes.plot(x, truth, color=_INK, lw=1.2, ls=(0, (4, 3)), label="exact")
            axes.legend(loc="best")
        axes.grid(True)
        axes.set(xlabel=self.problem.domain.names[0], title=name)
        axes.margins(x=0)

    def show_error(self, axes: Axes, error: Any, name: str) -> None:
        """Draw |u − u*| on a logarithmic scale, and write its largest value."""
        inside = self._find_inside() & np.isfinite(error)
        most = float(error[inside].max(initial=0.0))
        axes.set_title(f"|{name} − exact|, at most {most:.1e}")
        most = most or 1e-300
        least = 0.0
        if inside.any():
            least = float(np.quantile(error[inside], 0.01))
        low, high = _round_to_decades(max(least, most * 10.0**-LAYOUT.decades), most)
        if len(self.axes) == 2:
            self._draw_map(axes, np.maximum(error, low), "magma", LogNorm(low, max(most, 10 * low)))
            return
        axes.semilogy(self.points[:, 0].numpy(), error.clip(low), color=_RED, lw=1.5)
        axes.set_xlabel(self.problem.domain.names[0])
        axes.margins(x=0)
        _style_log_axis(axes, low, high)

    @property
    def height(self) -> float:
        """Inches of a row of panels: equal scales on both axes need room."""
        domain = self.problem.domain
        if len(self.axes) == 1 or self._shows_time:
            return 3.2
        width, height = (domain.high - domain.low)[list(self.axes)].tolist()
        tallest = 4.0 if len(self.problem.fields) == 1 else 3.4
        return min(max(4.0 * height / width, 2.4), tallest)

    @property
    def _shows_time(self) -> bool:
        return any(self.problem.domain.names[i] == "t" for i in self.axes)

    def _find_inside(self) -> Any:
        return self.problem.domain.contains(self.points).numpy()

    def _draw_map(self, axes: Axes, values: Any, colors: str, norm: Any) -> None:
        """Draw values over both axes as a heat map, with a color bar."""
        domain = self.problem.domain
        right, up = self.axes
        low = domain.low.tolist()
        high = domain.high.tolist()
        shown = np.where(self._find_inside(), values, np.nan).reshape(LAYOUT.cells, LAYOUT.cells)
        image = axes.imshow(
            shown,
            origin="lower",
            extent=(low[right], high[right], low[up], high[up]),
            aspect="auto" if self._shows_time else "equal",
            cmap=colors,
            norm=norm,
            interpolation="nearest",
        )
        axes.set(xlabel=domain.names[right], ylabel=domain.names[up])
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        figure = axes.get_figure()
        assert figure is not None
        bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        if norm is not None:
            bar.ax.yaxis.set_minor_locator(NullLocator())


@dataclass(frozen=True)
class Curve:
    """A curve with positive values.

    Attributes:
        title: of the panel.
        label: of the horizontal axis.
        x, y: the points.
        color: of the line.
    """

    title: str
    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str


def _show_curve(axes: Axes, curve: Curve) -> None:
    """Draw the curve on a logarithmic scale."""
    marker = "o" if len(curve.x) < 40 else ""
    axes.semilogy(curve.x, curve.y, color=curve.color, lw=1.7, marker=marker, ms=3)
    axes.set(title=curve.title, xlabel=curve.label)
    axes.margins(x=0.02)
    has_integers = curve.label != "seconds"
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=has_integers, steps=[1, 2, 5, 10]))
    positive = [value for value in curve.y if value > 0]  # false for NaN as well
    _style_log_axis(axes, *_round_to_decades(min(positive), max(positive)))


def _collect_curves(solution: Drawable) -> list[Curve]:
    """Return the curves of error, loss and singular values, as far as they are known."""
    history = solution.history
    curves: list[Curve] = []
    if any(error > 0 for error in history.error):
        curves.append(Curve("relative L² error", "seconds", history.clock, history.error, _RED))
    if len(history) > 1:
        loss = np.array(history.loss)
        title = "loss"
        if (loss <= 0).any():  # an energy
            loss = loss - loss.min()
            title = "loss above its least value"
        values = np.where(loss > 0, loss, np.nan).tolist()
        curves.append(Curve(title, "step", range(1, len(values) + 1), values, _BLUE))
    if solution.spectrum is not None and bool((solution.spectrum > 0).any()):
        values = solution.spectrum.double().tolist()
        title = "singular values of the Jacobian"
        curves.append(Curve(title, "index", range(1, len(values) + 1), values, _INK))
    return curves


def _describe_slice(names: Sequence[str], values: Sequence[float]) -> str:
    """Return where the coordinates are that are not shown."""
    if not names:
        return ""
    if len(names) <= 3:
        return " at " + ", ".join(f"{n} = {v:g}" for n, v in zip(names, values, strict=True))
    return f" on a slice: {names[0]}, …, {names[-1]} at the center"


def _round_to_decades(low: float, high: float) -> tuple[float, float]:
    """Return the whole decades around an interval, so that both ends have a label."""
    lowest = math.floor(math.log10(low) + 1e-9)
    highest = math.ceil(math.log10(high) - 1e-9)
    return 10.0**lowest, 10.0 ** max(highest, lowest + 1)


def _style_log_axis(axes: Axes, low: float, high: float) -> None:
    """Limit a logarithmic axis to these values, and label powers of ten only."""
    axes.set_ylim(low * 0.9, high * 1.1)
    axes.grid(True, which="major")
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
