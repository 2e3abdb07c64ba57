"""The figure of a solved PDE in the plane: the solution, and every network's error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from pullback.pde import Problem

from .display import shown

_CELLS = 160  # along each side
_INK = "#333333"
Extent = tuple[float, float, float, float]
_STYLE: dict[Any, Any] = {"axes.titlesize": 10.5, "text.color": _INK, "axes.edgecolor": _INK}


def draw(problem: Problem, networks: Mapping[str, Callable[[Tensor], Tensor]], path: Path) -> Path:
    """Write the figure and return its path; the errors share one logarithmic color scale."""
    low, high = problem.domain.low.tolist(), problem.domain.high.tolist()
    axes = [torch.linspace(a, b, _CELLS).double() for a, b in zip(low, high, strict=True)]
    x = torch.cartesian_prod(*axes)
    truth = problem.truth(x)[:, 0]
    with torch.no_grad():
        errors = {name: (u(x)[:, 0] - truth).abs() for name, u in networks.items()}
    extent = (low[0], high[0], low[1], high[1])
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(2.75 * (1 + len(errors)) + 1.0, 3.0), dpi=130)
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained")
        first, *others = figure.subplots(1, 1 + len(errors))
        image = _panel(first, truth, extent, cmap="viridis")
        first.set_title("solution", loc="left")
        figure.colorbar(image, ax=first, fraction=0.046, pad=0.03)
        norm = _norm(list(errors.values()))
        for panel, (name, error) in zip(others, errors.items(), strict=True):
            image = _panel(panel, error.clamp(min=norm.vmin), extent, cmap="magma", norm=norm)
            panel.set_title(f"{name}: ≤ {shown('', float(error.max()))}", loc="left")
            panel.tick_params(labelleft=False)
        bar = figure.colorbar(image, ax=others, fraction=0.02, pad=0.02, label="|error|")
        bar.ax.yaxis.set_major_locator(LogLocator(numticks=7))
        bar.ax.minorticks_off()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def _norm(errors: list[Tensor]) -> LogNorm:
    """From what is typical of the best network to the worst error of all."""
    top = max(float(e.max()) for e in errors)
    typical = min(float(e.median()) for e in errors)
    return LogNorm(max(typical / 10, 1e-17, top * 1e-16), max(top, 1e-15))


def _panel(axes: Axes, values: Tensor, extent: Extent, **options: Any) -> Any:
    grid = values.reshape(_CELLS, _CELLS).T.numpy()
    axes.set_xticks([extent[0], extent[1]])
    axes.set_yticks([extent[2], extent[3]])
    axes.tick_params(length=2, labelsize=8.5)
    return axes.imshow(grid, origin="lower", extent=extent, interpolation="nearest", **options)
