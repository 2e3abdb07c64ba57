"""What the figures share: the library's palette and axes, bands over seeds, how they are saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pullback._core.plots import INK, PALETTE, dress, label, new
from pullback.cli import files

from .curves import quartiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INK", "PALETTE", "band", "dress", "label", "new", "save"]


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
    """The median and the quartiles of runs, one x > 0 and y each; see `curves.quartiles`."""
    line = quartiles(xs, ys, spaced=spaced)
    axes.plot(line.x, line.y, color=color, lw=style.pop("lw", 1.8), label=name or None, **style)
    axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.15, lw=0)
    axes.plot(line.x[-1:], line.y[-1:], "o", color=color, ms=4)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png and STEM.svg, each in one piece and the same bytes for the same figure."""
    from matplotlib import rc_context

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
