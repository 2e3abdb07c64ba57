"""Live progress of the runs of one problem, and the picture of what they became."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from pullback import pde

from ..framework import plots
from .problem import Competitor, DemoProblem
from .race import Watcher

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm


def format_settings(settings: Mapping[str, float]) -> str:
    """The settings in a few characters, or that nothing was tuned."""
    return ", ".join(f"{k} {v:g}" for k, v in settings.items()) or "untuned"


def format_measure(name: str, value: float) -> str:
    """Return an accuracy in percent, or another measure in scientific notation.

    >>> format_measure("test accuracy", 0.98), format_measure("training loss", 0.00034)
    ('98.0 %', '3.4e-4')
    """
    if "accuracy" in name:
        return f"{100 * value:.1f} %"
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


@contextmanager
def progress(
    console: Console, problem: DemoProblem, seconds: float
) -> Iterator[Callable[[Competitor], Watcher]]:
    """One bar per contender with its loss and the time left; plain lines without a terminal."""
    console.print(f"[bold]{problem.title}[/bold], {seconds:g} s for each optimizer")
    if not console.is_terminal:
        yield lambda contender: _announce_run(console, contender)
        return
    bars = Progress(
        TextColumn("  {task.description:<16}"),
        BarColumn(bar_width=30),
        TextColumn("loss {task.fields[loss]:>8}"),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
    with bars:
        tasks = {
            c.name: bars.add_task(c.name, start=False, total=1.0, loss="-")
            for c in problem.contenders
        }

        def watcher(contender: Competitor) -> Watcher:
            task = tasks[contender.name]
            bars.reset(task, total=1.0, loss="-")
            return lambda share, loss: bars.update(task, completed=share, loss=f"{loss:.1e}")

        yield watcher


def _announce_run(console: Console, contender: Competitor) -> Watcher:
    """Print a line when a run starts, and one when it ends."""
    console.print(f"  {contender.name}: running")

    def watch(share: float, loss: float) -> None:
        if share >= 1.0:
            console.print(f"  {contender.name}: done, loss {loss:.1e}")

    return watch


Extent = tuple[float, float, float, float]
_STYLE: dict[Any, Any] = {
    "axes.titlesize": 10.5,
    "text.color": plots.INK,
    "axes.edgecolor": plots.INK,
}


def draw_errors(
    problem: pde.Problem,
    networks: Mapping[str, Callable[[Tensor], Tensor]],
    path: Path,
    cells: int = 160,
) -> Path:
    """Write the figure and return its path; the errors share one logarithmic color scale.

    Args:
        cells: along each side of a panel.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import LogLocator

    low = problem.domain.low.tolist()
    high = problem.domain.high.tolist()
    axes = [torch.linspace(a, b, cells).double() for a, b in zip(low, high, strict=True)]
    x = torch.cartesian_prod(*axes)
    truth = problem.truth(x)[:, 0].view(cells, cells)
    with torch.no_grad():
        errors = {
            name: (u(x)[:, 0].view(cells, cells) - truth).abs() for name, u in networks.items()
        }
    extent = (low[0], high[0], low[1], high[1])
    with rc_context(_STYLE):
        figure = plots.make_figure(2.75 * (1 + len(errors)) + 1.0, 3.0, dpi=130)
        first, *others = figure.subplots(1, 1 + len(errors))
        image = _panel(first, truth, extent, cmap="viridis")
        first.set_title("solution", loc="left")
        figure.colorbar(image, ax=first, fraction=0.046, pad=0.03)
        norm = _norm(list(errors.values()))
        for panel, (name, error) in zip(others, errors.items(), strict=True):
            image = _panel(panel, error.clamp(min=norm.vmin), extent, cmap="magma", norm=norm)
            panel.set_title(f"{name}: ≤ {format_measure('', float(error.max()))}", loc="left")
            panel.tick_params(labelleft=False)
        bar = figure.colorbar(image, ax=others, fraction=0.02, pad=0.02, label="|error|")
        bar.ax.yaxis.set_major_locator(LogLocator(numticks=7))
        bar.ax.minorticks_off()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def _norm(errors: list[Tensor]) -> LogNorm:
    """Return a color scale from a typical error of the best network to the worst of all."""
    from matplotlib.colors import LogNorm

    top = max(float(e.max()) for e in errors)
    typical = min(float(e.median()) for e in errors)
    return LogNorm(max(typical / 10, 1e-17, top * 1e-16), max(top, 1e-15))


def _panel(axes: Axes, values: Tensor, extent: Extent, **options: Any) -> Any:
    """Draw values (x, y) over a rectangle."""
    axes.set_xticks([extent[0], extent[1]])
    axes.set_yticks([extent[2], extent[3]])
    axes.tick_params(length=2, labelsize=8.5)
    return axes.imshow(
        values.T.numpy(), origin="lower", extent=extent, interpolation="nearest", **options
    )
