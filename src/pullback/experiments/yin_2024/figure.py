"""Loss and error against steps and against seconds: medians over seeds, quartiles as bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..figure import INK, dress
from .runs import Record
from .statistics import held, quantiles
from .store import Store

if TYPE_CHECKING:
    from .experiment import Experiment

# Okabe and Ito's palette, which color-blind readers can tell apart
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
_COLUMNS = (("loss", "steps"), ("loss", "seconds"), ("error", "steps"), ("error", "seconds"))
_NAMES = {"loss": "loss", "error": "relative L² error"}
_PLACES = 120  # along the axis of seconds


def draw(experiment: Experiment, store: Store, seeds: Sequence[int], path: Path) -> Path:
    """Write the figure, one row per group of methods, and return its path."""
    groups = experiment.groups
    figure = Figure(figsize=(16, 0.6 + 3.4 * len(groups)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(groups), 4, squeeze=False, sharey=False)
    for row, (title, names) in zip(grid, groups.items(), strict=True):
        for axes, (what, along) in zip(row, _COLUMNS, strict=True):
            for color, name in zip(_COLORS, names, strict=False):
                _band(axes, store.of(name, list(seeds)), what, along, color, name)
            _dress(axes, what, along)
        row[0].set_title(title, loc="left", color=INK, weight="bold", size=10)
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    layers = "-".join(map(str, experiment.setting.layers))
    title = f"{experiment.setting.problem().name}, {layers} tanh network, {len(seeds)} seeds"
    figure.suptitle(f"{title}: medians and quartiles", color=INK, size=12, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _band(
    axes: Axes, records: Sequence[Record], what: str, along: str, color: str, name: str
) -> None:
    """The median and the quartiles of runs that keep their last value."""
    xs = [[float(x) for x in getattr(r, along)] for r in records]
    ys = [getattr(r, what) for r in records]
    places = _places(xs, along)
    spread = [quantiles([held(x, y, at) for x, y in zip(xs, ys, strict=True)]) for at in places]
    low, middle, high = ([_shown(v) for v in values] for values in zip(*spread, strict=True))
    axes.plot(places, middle, color=color, lw=1.8, label=name)
    axes.fill_between(places, low, high, color=color, alpha=0.15, lw=0)
    axes.plot(places[-1:], middle[-1:], "o", color=color, ms=4)


def _places(xs: Sequence[Sequence[float]], along: str) -> list[float]:
    """Where the quantiles are taken: recorded steps, or times evenly spaced in the logarithm."""
    if along == "steps":
        return sorted({x for one in xs for x in one if x > 0})
    first = min(x[1] for x in xs)
    last = max(x[-1] for x in xs)
    ratio = max(last / max(first, 1e-4), 1.0)
    return [first * ratio ** (i / (_PLACES - 1)) for i in range(_PLACES)]


def _shown(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _dress(axes: Any, what: str, along: str) -> None:
    dress(axes)
    axes.set_xlabel("CPU seconds" if along == "seconds" else along, color=INK)
    axes.set_ylabel(_NAMES[what], color=INK)
