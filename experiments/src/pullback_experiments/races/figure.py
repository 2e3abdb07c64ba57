"""Held-out loss against steps and against seconds, side by side; a row for every network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.figure import Figure

from ..framework import plots
from ..framework.plain import Record
from .checks import Found, final

_ALONG = {"step": "steps", "seconds": "seconds of training"}
#: one color for an optimizer, in all races; Muon's two are never drawn with SGD
_PLACES = {"sgd": 2, "adamw": 0, "muon": 1, "muon-0.9": 2, "soap": 3, "kfac-spectral": 4,
           "kfac-eigenbasis": 5, "kfac-natural": 6}  # fmt: skip
_FAR = 3  # times the least loss: ends above are not shown


def draw(races: Mapping[str, Found], title: str) -> Figure:
    """Medians and quartiles over seeds; shorter runs of ours are dashed."""
    figure = plots.new(12, 0.4 + 4 * len(races), title)
    panels = figure.subplots(len(races), 2, squeeze=False)
    for row, (name, found) in zip(panels, races.items(), strict=True):
        colors = {n: plots.PALETTE[_PLACES[n]] for n in found if not _shorter(n)}
        for axes, along in zip(row, _ALONG, strict=True):
            for method, runs in found.items():
                xs, ys = _places(runs, along), [r["held-out loss"] for r in runs]
                color = colors[runs[0]["method"] if _shorter(method) else method]
                style = {"ls": "--", "lw": 1.2} if _shorter(method) else {}
                plots.band(axes, xs, ys, color, method, **style)
            plots.dress(axes, logx=False, logy=False)
            axes.set_ylim(*_limits(found))
            axes.set_xlim(left=0)
            plots.label(axes, _ALONG[along], "held-out loss", name if along == "step" else "")
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        row[-1].legend(frameon=False, fontsize=9, **place)
    return figure


def _places(runs: Sequence[Record], along: str) -> list[list[float]]:
    """Medians over seeds of when an evaluation took place, for each run as many as it has."""
    longest = max(len(r[along]) for r in runs)
    middle = [median(r[along][i] for r in runs if i < len(r[along])) for i in range(longest)]
    return [middle[: len(r[along])] for r in runs]


def _shorter(name: str) -> bool:
    return name.startswith("ours")


def _limits(found: Found) -> tuple[float, float]:
    """Where curves end, and what is above it; their start is far above what matters."""
    seen = [v for runs in found.values() for r in runs for v in r["held-out loss"]]
    low = min((v for v in seen if math.isfinite(v)), default=1.0)
    high = max((v for v in map(final, found.values()) if v < _FAR * low), default=low)
    return 0.95 * low, max(1.15 * high, 1.2 * low)
