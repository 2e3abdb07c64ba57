"""What the figures share: a palette, axes, bands over seeds, how they are saved.

Matplotlib is slow to import, and imported by the functions that draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from pullback._core.errors import import_extra
from pullback.cli import files

from .curves import quartiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COMMON", "INK", "PALETTE", "assign_colors", "assign_places", "choose_dashes", "format_axes",
    "has_fixed_place", "label", "make_figure", "plot_band", "save",
]  # fmt: skip

#: a method's place in the palette, the same in all figures
_PLACES = {
    "Natural gradient": 0, "Gauss–Newton": 0, "NGD": 0, "natural": 0,
    "Adam": 1, "AdamW": 1, "adamw": 1,
    "L-BFGS": 2,
    "K-FAC": 3, "kfac-natural": 3, "Sliced K-FAC": 3,
    "SGD": 4, "sgd": 4, "SliceSGD": 4, "standard": 4,
    "E-NGD": 5, "muon": 5, "E-NGD-OGA": 6, "soap": 6, "NGD-OGA": 7, "K = I": 7,
    "Sobolev": 8, "Sliced Adam": 8, "kfac-eigenbasis": 8,
    "Sobolev − schedule": 9, "kfac-spectral": 9,
    "K-FAC + both": 11, "muon-0.9": 12, "Sobolev–Fisher": 12, "K-FAC + scaling": 13,
    "K-FAC + schedule": 14, "Sobolev–Fisher, short": 15,
}  # fmt: skip
#: and that of a variant, "METHOD, HOW", by how it differs
_VARIANTS = {
    "undamped": 3, "invariant": 8, "not cut": 8, "damped": 9, "target ratio": 10,
    "pre-trained": 11, "backtracking": 12, "arg-min": 13, "Tikhonov": 13, "from rows": 14,
    "momentum": 14, "100 vectors": 15,
}  # fmt: skip
COMMON = 8  # places for series that have none of their own


def _fixed_place(name: str) -> int | None:
    return _PLACES.get(name, _VARIANTS.get(name.partition(", ")[2]))


def assign_places(names: Iterable[str]) -> dict[str, int]:
    """Return a place in the palette for each method: its own one, or one that is free.

    >>> assign_places(["SGD", "Nyström", "Gauss–Newton"])
    {'SGD': 4, 'Nyström': 7, 'Gauss–Newton': 0}
    """
    names = list(names)
    fixed = {name: index for name in names if (index := _fixed_place(name)) is not None}
    free = [i for i in reversed(range(COMMON)) if i not in fixed.values()]
    assigned = dict(zip([name for name in names if name not in fixed], free, strict=False))
    return {
        name: {**fixed, **assigned}[name] for name in names if name in fixed or name in assigned
    }


def has_fixed_place(name: str) -> bool:
    """Return True if the method has a place of its own."""
    return _fixed_place(name) is not None


def choose_dashes(name: str) -> Literal["solid", "dashed", "dotted"]:
    """Return the dashes of a method's line.

    A greedy solve is dashed beside the full one, and an optimizer on a slice beside the plain one.
    So is invariant damping, and the arg-min search is dotted: they lie upon what they vary.
    """
    if "arg-min" in name:
        return "dotted"
    varies = "-OGA" in name or name.startswith("Slice") or name.endswith(", invariant")
    if varies:
        return "dashed"
    return "solid"


def assign_colors(names: Iterable[str]) -> dict[str, str]:
    """Return the colors at these places."""
    return {name: PALETTE[index] for name, index in assign_places(names).items()}


#: Okabe and Ito's, which color-blind readers can tell apart, then darker ones for variants
PALETTE = (
    "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000",
    "#332288", "#A3184F", "#117733", "#AA4499", "#2BA79B", "#8C8A1C", "#8A4B08", "#6FB61F",
)  # fmt: skip
INK = "#333333"
_GRID = "#E4E4E4"


def make_figure(width: float, height: float, title: str = "", dpi: int = 120) -> Figure:
    """Return an empty figure, of no window; sizes are in inches.

    A wide one is made smaller, at the same number of pixels: a page shows all figures at one width,
    where its words would be small.
    """
    widest = 11.0
    with import_extra("plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    scale = min(1.0, widest / width)
    size = (scale * width, scale * height)
    figure = Figure(figsize=size, dpi=dpi / scale, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, color=INK, size=12, x=0.01, ha="left")
    return figure


def format_axes(axes: Axes, *, logx: bool = True, logy: bool = True) -> None:
    """Set few ticks, a light grid and no box; axes are logarithmic unless said otherwise."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    scales = {True: "log", False: "linear"}
    axes.set(xscale=scales[logx], yscale=scales[logy])
    if logx:
        axes.xaxis.set_minor_formatter(NullFormatter())
    if logy:
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    for axis, logarithmic in ((axes.xaxis, logx), (axes.yaxis, logy)):
        low, high = axis.get_view_interval()
        if logarithmic and high < 100 * low:  # powers of ten alone would be one tick or two
            few = high > 10 * low
            if few:
                subs = (1.0, 2.0, 5.0)
            else:
                subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter("{x:g}")
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


def plot_band(
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
    for suffix in ("png", "svg"):
        if suffix == "svg":
            extra = {"metadata": {"Date": None}}
        else:
            extra = {}

        def fill(file: IO[bytes], file_format: str = suffix, extra: dict[str, Any] = extra) -> None:
            with rc_context({"svg.hashsalt": "pullback"}):
                figure.savefig(file, format=file_format, **extra)

        written.append(files.write(stem.with_name(f"{stem.name}.{suffix}"), fill))
    return written
