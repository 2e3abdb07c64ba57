"""Figure 5, drawn: errors and effective ranks against observations, and the start's effect."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ..framework import plots
from ..framework.results import Results


def draw(results: Results, config: dict[str, Any]) -> Figure:
    """Medians and quartiles over seeds."""
    size, rank = config["size"], config["rank"]
    title = f"Completing a {size}×{size} matrix of rank {rank}, {len(results.seeds)} seeds"
    figure = plots.new(15, 4.6, title)
    left, middle, right = figure.subplots(1, 3)
    depths = config["depths"]
    kinds: list[tuple[str, str, tuple[str, ...], str]] = [
        (plots.PALETTE[i], f"EGD, L = {d}", ("EGD", f"L={d}"), "-") for i, d in enumerate(depths)
    ]
    kinds += [
        (plots.PALETTE[i], f"NGD, L = {d}", ("NGD", f"L={d}"), ":") for i, d in enumerate(depths)
    ]
    kinds.append((plots.INK, "nuclear norm", ("nuclear norm",), "--"))
    for color, name, key, style in kinds:
        _line(left, results, config, key, "error", color, name, style)
        _line(middle, results, config, key, "rank", color, "", style)
    middle.axhline(rank, color=plots.INK, lw=0.6)
    for place, depth in ((1, 2), (2, 3)):
        color = plots.PALETTE[place]
        _line(right, results, config, ("EGD", f"L={depth}"), "error", color, f"L = {depth}", "-")
        words = f"L = {depth}, start of L = {config['collapsed']}"
        key = ("EGD, collapsed start", f"L={depth}")
        _line(right, results, config, key, "error", color, words, "-.")
    for axes, what, name in (
        (left, "relative error elsewhere", "Error"),
        (middle, "effective rank", "Effective rank"),
        (right, "relative error elsewhere", "EGD from starts of two depths"),
    ):
        plots.dress(axes, logx=False)
        plots.label(axes, "observed entries", what, name)
    # between what completes and what does not there is room in the middle
    middle.legend(
        *left.get_legend_handles_labels(), frameon=False, fontsize=7, ncols=2, loc="center"
    )
    middle.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    middle.yaxis.set_major_formatter("{x:g}")
    middle.yaxis.set_minor_locator(NullLocator())
    right.legend(frameon=False, fontsize=8)
    return figure


def _line(
    axes: Axes,
    results: Results,
    config: dict[str, Any],
    key: tuple[str, ...],
    what: str,
    color: str,
    name: str,
    style: str,
) -> None:
    runs = results.of(*key)
    plots.band(axes, [config["counts"]] * len(runs), [r[what] for r in runs], color, name, ls=style)
