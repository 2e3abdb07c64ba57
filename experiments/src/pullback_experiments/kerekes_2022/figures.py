"""Figures 2, 4, 5, 6 and the support vectors: curves of a page, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..framework import plots
from ..framework.curves import Chart, Line, Series, Style, averages, quartiles
from ..framework.records import Record
from ..framework.store import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Place(IntEnum):
    """Places in the palette; EGD's is its depth."""

    NATURAL = 0
    INK = 7


_METHODS: Mapping[str, Style] = {"EGD": "solid", "NGD": "dotted"}
#: NGD's lines by depth
_DASHES = {1: (0, (4, 1.5)), 2: (0, (1, 1.2)), 3: (0, (4, 1, 1, 1)), 4: (0, (1, 3))}
#: name, item, color and style of a line
_Kind = tuple[str, tuple[str, ...], int, Style]


def planar(results: Results, depths: Sequence[int]) -> list[Chart]:
    """EGD's direction along the way down, beside NGD's end."""
    runs = results.of("EGD")
    natural = results.of("NGD", "L=1")
    if not runs:
        return []
    levels = [r["level"] for r in runs]
    series: list[Series | None] = []
    for number, depth in enumerate(depths):
        line = quartiles(levels, [r["angles"][number] for r in runs])
        series.append(Series(f"EGD, L = {depth}", {"level": line}, depth))
    if natural:
        ends = [[r["descent angle"]] * len(levels[0]) for r in natural]
        line = quartiles([levels[0]] * len(natural), ends)
        series.append(Series("NGD, L = 1", {"level": line}, Place.NATURAL, "dashed"))
    return [
        Chart(
            "Directions: depth turns EGD, and not NGD",
            "degrees from the axis e₁",
            series,
            x={"level": "−log loss"},
            logy=False,
            note="medians and quartiles over seeds",
        )
    ]


def sparse(results: Results, config: dict[str, Any]) -> list[Chart]:
    """Accuracy against N, and against −log loss at the largest N < D; NGD's logits over time."""
    euclidean = results.of("EGD")
    depths = config["depths"]
    series = [
        _accuracy(f"EGD, L = {d}", euclidean, row, config, color=d) for row, d in enumerate(depths)
    ]
    for depth in config["natural depths"]:
        name = f"NGD, L = {depth}"
        runs = results.of("NGD", f"L={depth}")
        series.append(_accuracy(name, runs, 0, config, color=Place.NATURAL, style="dotted"))
    runs = results.of("NGD, population")
    series.append(
        _accuracy("NGD, population", runs, 0, config, color=Place.NATURAL, style="dashed")
    )
    first = Chart(
        "Accuracy against the number of samples",
        "test accuracy, %",
        series,
        x={"samples": "samples N"},
        logx=False,
        logy=False,
        note=f"means over seeds ± standard deviation; D = {config['dim']}",
    )
    return [first, *_way_down(euclidean, config), *_logits(results.of("NGD", "L=1"))]


def _accuracy(
    name: str,
    runs: Sequence[Record],
    row: int,
    config: dict[str, Any],
    *,
    color: int | None,
    style: Style = "solid",
) -> Series | None:
    if not runs:
        return None
    percents = [(100 * np.asarray(r["accuracy"][row])).tolist() for r in runs]
    line = averages([config["samples"]] * len(runs), percents)
    return Series(name, {"samples": line}, color, style)


def _way_down(runs: Sequence[Record], config: dict[str, Any]) -> list[Chart]:
    below = [i for i, n in enumerate(config["samples"]) if n < config["dim"]]
    if not runs or not below:
        return []
    levels = [r["levels"] for r in runs]
    series = []
    for row, depth in enumerate(config["depths"]):
        # a path is (levels, depths, numbers of samples)
        percents = [(100 * np.asarray(r["path"])[:, row, below[-1]]).tolist() for r in runs]
        line = averages(levels, percents)
        series.append(Series(f"EGD, L = {depth}", {"level": line}, depth))
    return [
        Chart(
            f"Accuracy of EGD on its way, N = {config['samples'][below[-1]]}",
            "test accuracy, %",
            series,
            x={"level": "−log loss"},
            logy=False,
            note="means over seeds ± standard deviation",
        )
    ]


def _logits(runs: Sequence[Record]) -> list[Chart]:
    if not runs or not len(runs[0]["time"]):
        return []
    times = list(runs[0]["time"])
    margins = runs[0]["margins"]
    spread = quartiles([times] * margins.shape[1], margins.T.tolist())
    series = [
        Series("NGD", {"time": spread}, Place.NATURAL),
        Series("t", {"time": Line(times, times)}, Place.INK, "dashed"),
    ]
    title = "NGD's logits grow as t, N < D"
    note = "median and quartiles over samples, first seed"
    return [
        Chart(title, "y·logit", series, x={"time": "time t"}, logx=False, logy=False, note=note)
    ]


def completion(results: Results, config: dict[str, Any]) -> list[Chart]:
    """Errors and effective ranks against observed entries, and the effect of the start."""
    at = {"observed": "observed entries"}
    methods: list[_Kind] = []
    for method, style in _METHODS.items():
        for depth in config["depths"]:
            color_number = Place.NATURAL
            if method == "EGD":
                color_number = depth
            methods.append((f"{method}, L = {depth}", (method, f"L={depth}"), color_number, style))
    methods.append(("nuclear norm", ("nuclear norm",), Place.INK, "dashed"))
    starts: list[_Kind] = []
    for d in (2, 3):
        words = f"L = {d}, start of L = {config['collapsed']}"
        starts.append((f"L = {d}", ("EGD", f"L={d}"), d, "solid"))
        starts.append((words, ("EGD, collapsed start", f"L={d}"), d, "dashed"))

    def chart(title: str, y: str, what: str, chosen: Sequence[_Kind]) -> Chart:
        series = []
        for name, key, color, style in chosen:
            if runs := results.of(*key):
                line = quartiles([config["counts"]] * len(runs), [r[what] for r in runs])
                series.append(Series(name, {"observed": line}, color, style))
        note = "medians and quartiles over seeds"
        return Chart(title, y, series, x=at, logx=False, note=note)

    return [
        chart("Error", "relative error elsewhere", "error", methods),
        chart("Effective rank", "effective rank", "rank", methods),
        chart("EGD from starts of two depths", "relative error elsewhere", "error", starts),
    ]


_SUPPORT = {"margin": 1, "natural": Place.NATURAL}


def support(results: Results, ratios: Sequence[float]) -> list[Chart]:
    """Shares of samples that are support vectors."""
    records = {r: results.of(f"D/N={r:g}") for r in ratios}
    records = {r: runs for r, runs in records.items() if runs}
    count = min(map(len, records.values()), default=0)
    names = {"margin": "ℓ2 margin (EGD)", "natural": "NGD = least squares"}
    series = []
    for what, name in names.items():
        if not count:
            break
        by_seed = []
        for seed in range(count):
            by_seed.append([100 * runs[seed][what] for runs in records.values()])
        line = quartiles([list(records)] * count, by_seed)
        series.append(Series(name, {"ratio": line}, _SUPPORT[what]))
    note = "medians and quartiles over seeds"
    x = {"ratio": "D / N"}
    title = "Support vectors"
    y = "samples that are support vectors, %"
    return [Chart(title, y, series, x=x, logy=False, note=note)]


def draw_planar(
    results: Results,
    depths: Sequence[int],
    points: Callable[[int, torch.device], tuple[Tensor, Tensor]],
) -> Figure:
    """Draw the first seed's points and separators, and the directions over all seeds."""
    figure = plots.make_figure(
        15, 4.6, "Separable points of the plane: depth turns EGD, and not NGD"
    )
    left, middle, right = figure.subplots(1, 3)
    x, y = points(results.seeds[0], torch.device("cpu"))
    for axes, method in ((left, "EGD"), (middle, "NGD")):
        _scatter(axes, x, y)
        for number, depth in enumerate(depths):
            color = plots.PALETTE[depth]
            beta = _first(results, method, number, depth)
            if method == "EGD":
                width = 1.6
            else:
                width = 0.9 * (len(depths) - number) + 0.8
            _separator(axes, beta, color, f"L = {depth}", width)
        axes.legend(edgecolor="none", framealpha=0.9, fontsize=8, loc="lower right")
        plots.label(axes, "x₁", "x₂", f"{method}, seed {results.seeds[0]}")
    runs = results.of("EGD")
    for number, depth in enumerate(depths):
        color = plots.PALETTE[depth]
        xs = [r["level"] for r in runs]
        ys = [r["angles"][number] for r in runs]
        plots.plot_band(right, xs, ys, color, f"EGD, L = {depth}")
        limit = sorted(r["limit angle"][number] for r in runs)[len(runs) // 2]
        right.axhline(limit, color=color, lw=0.9, ls=":")
    natural = sorted(r["descent angle"] for r in results.of("NGD", "L=1"))
    middle_angle = natural[len(natural) // 2]
    color = plots.PALETTE[Place.NATURAL]
    right.axhline(middle_angle, color=color, lw=1.4, ls="--", label="NGD, all L")
    plots.format_axes(right, logy=False)
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    title = rf"{len(results.seeds)} seeds; dotted: $\ell_{{2/L}}$ margins"
    plots.label(right, "−log loss", "degrees from the axis e₁", title)
    return figure


def _first(results: Results, method: str, number: int, depth: int) -> Sequence[float]:
    """β of the first seed."""
    if method == "EGD":
        return results.of("EGD")[0]["beta"][number]
    return results.of("NGD", f"L={depth}")[0]["beta"]


def _scatter(axes: Axes, x: Tensor, y: Tensor) -> None:
    for sign, mark in ((1, "o"), (-1, "x")):
        points = x[y == sign]
        axes.plot(points[:, 0], points[:, 1], mark, color=plots.INK, ms=4, alpha=0.6)
    plots.format_axes(axes, logx=False, logy=False)
    axes.set(xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), aspect="equal")


def _separator(axes: Axes, beta: Sequence[float], color: str, name: str, width: float) -> None:
    """The line xᵀβ = 0."""
    along = torch.tensor([-beta[1], beta[0]], dtype=torch.float64)
    along = 5 * along / along.norm()
    axes.plot([-along[0], along[0]], [-along[1], along[1]], color=color, lw=width, label=name)


def draw_sparse(results: Results, config: dict[str, Any]) -> Figure:
    """Draw means over seeds on the left, and the first seed in the other panels."""
    dim = config["dim"]
    nonzero = config["nonzero"]
    if len(results.seeds) == 1:
        seeds = "1 seed"
    else:
        seeds = f"{len(results.seeds)} seeds"
    title = f"Sparse classification, D = {dim}, {nonzero} nonzero, {seeds}"
    figure = plots.make_figure(15, 4.8, title)
    left, middle, right = figure.subplots(1, 3)
    _accuracies(left, results, config)
    _logit_panel(middle, results)
    _coefficients(right, results, config)
    return figure


def _accuracies(axes: Axes, results: Results, config: dict[str, Any]) -> None:
    counts = config["samples"]

    def line(runs: list[Any], row: int, color: str, name: str, **style: Any) -> None:
        values = 100 * np.array([r["accuracy"][row] for r in runs])
        axes.plot(counts, values.mean(0), color=color, label=name, **style)
        axes.fill_between(counts, values.min(0), values.max(0), color=color, alpha=0.12, lw=0)

    for row, depth in enumerate(config["depths"]):
        color = plots.PALETTE[depth]
        line(results.of("EGD"), row, color, f"EGD, L = {depth}", marker="o", ms=3)
    color = plots.PALETTE[Place.NATURAL]
    for depth in config["natural depths"]:
        runs = results.of("NGD", f"L={depth}")
        line(runs, 0, color, f"NGD, L = {depth}", ls=_DASHES[depth])
    line(results.of("NGD, population"), 0, color, "NGD, population", marker="s", ms=4)
    axes.axvline(config["dim"], color=plots.INK, lw=0.6)
    plots.format_axes(axes, logx=False, logy=False)
    axes.legend(frameon=False, fontsize=8)
    plots.label(axes, "samples N", "test accuracy, %", "Accuracy; the thin line is N = D")


def _logit_panel(axes: Axes, results: Results) -> None:
    record = results.of("NGD", "L=1")[0]
    margins = np.asarray(record["margins"])
    times = record["time"]
    if len(times):
        axes.plot(times, margins, color=plots.PALETTE[Place.NATURAL], lw=0.6, alpha=0.6)
        axes.plot([], [], color=plots.PALETTE[Place.NATURAL], label="NGD, all samples")
        axes.plot(times, times, "--", color=plots.INK, lw=1.2, label="t")
        axes.legend(frameon=False, fontsize=8)
    plots.format_axes(axes, logx=False, logy=False)
    plots.label(axes, "time t of NGD", "y·logit", "Logits of the training samples, N < D")


def _coefficients(axes: Axes, results: Results, config: dict[str, Any]) -> None:
    euclidean = results.of("EGD")[0]
    natural = results.of("NGD", "L=1")[0]
    rows = [(f"EGD, L = {d}", d, euclidean["beta"][i]) for i, d in enumerate(config["depths"][:2])]
    rows += [
        ("NGD", Place.NATURAL, natural["beta"]),
        ("NGD, population", Place.NATURAL, results.of("NGD, population")[0]["beta"]),
    ]
    shown = min(config["dim"], 5 * config["nonzero"])
    for row, (name, color_number, beta) in enumerate(rows):
        values = np.asarray(beta)[:shown] / np.abs(beta).max()
        low = -2.4 * row
        color = plots.PALETTE[color_number]
        axes.vlines(np.arange(shown), low, low + values, color=color, lw=1.2)
        axes.axhline(low, color=color, lw=0.5)
        axes.text(shown, low + 0.5, name, color=color, ha="right", size=8)
    axes.axvline(config["nonzero"] - 0.5, color=plots.INK, lw=0.6)
    plots.format_axes(axes, logx=False, logy=False)
    axes.set_yticks([])
    largest = max(config["samples"])
    plots.label(axes, f"first {shown} coordinates", "", f"β at N = {largest}, true support left")


def draw_completion(results: Results, config: dict[str, Any]) -> Figure:
    """Draw medians and quartiles over seeds."""
    from matplotlib.ticker import LogLocator, NullLocator

    size = config["size"]
    rank = config["rank"]
    title = f"Completing a {size}×{size} matrix of rank {rank}, {len(results.seeds)} seeds"
    figure = plots.make_figure(15, 5.0, title)
    left, middle, right = figure.subplots(1, 3)
    depths = config["depths"]
    rows: list[tuple[str, str, tuple[str, ...], Any]] = [
        (plots.PALETTE[d], f"EGD, L = {d}", ("EGD", f"L={d}"), "-") for d in depths
    ]
    natural = plots.PALETTE[Place.NATURAL]
    rows += [(natural, f"NGD, L = {d}", ("NGD", f"L={d}"), _DASHES[d]) for d in depths]
    rows.append((plots.INK, "nuclear norm", ("nuclear norm",), "--"))
    for color, name, key, style in rows:
        _line(left, results, config, key, "error", color, name, style)
        _line(middle, results, config, key, "rank", color, "", style)
    middle.axhline(rank, color=plots.INK, lw=0.6)
    for depth in (2, 3):
        color = plots.PALETTE[depth]
        _line(right, results, config, ("EGD", f"L={depth}"), "error", color, f"L = {depth}", "-")
        words = f"L = {depth}, start of L = {config['collapsed']}"
        key = ("EGD, collapsed start", f"L={depth}")
        _line(right, results, config, key, "error", color, words, "-.")
    for axes, what, name in (
        (left, "relative error elsewhere", "Error"),
        (middle, "effective rank", "Effective rank"),
        (right, "relative error elsewhere", "EGD from starts of two depths"),
    ):
        plots.format_axes(axes, logx=False)
        plots.label(axes, "observed entries", what, name)
    lines, names = left.get_legend_handles_labels()
    figure.legend(
        lines, names, frameon=False, fontsize=8, ncols=len(names), loc="outside lower center"
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
    style: Any,
) -> None:
    runs = results.of(*key)
    plots.plot_band(
        axes, [config["counts"]] * len(runs), [r[what] for r in runs], color, name, ls=style
    )
