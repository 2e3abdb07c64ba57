"""Figures 4 and 6, drawn: accuracy against N, NGD's logits, and coefficients."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..framework import plots
from ..framework.results import Results


def draw(results: Results, config: dict[str, Any]) -> Figure:
    """Means over seeds on the left; the first seed in the other panels."""
    dim, nonzero = config["dim"], config["nonzero"]
    seeds = "1 seed" if len(results.seeds) == 1 else f"{len(results.seeds)} seeds"
    title = f"Sparse classification, D = {dim}, {nonzero} nonzero, {seeds}"
    figure = plots.new(15, 4.8, title)
    left, middle, right = figure.subplots(1, 3)
    _accuracies(left, results, config)
    _logits(middle, results)
    _coefficients(right, results, config)
    return figure


def _accuracies(axes: Axes, results: Results, config: dict[str, Any]) -> None:
    counts = config["samples"]

    def line(runs: list[Any], row: int, color: str, name: str, style: str) -> None:
        values = 100 * np.array([r["accuracy"][row] for r in runs])
        axes.plot(counts, values.mean(0), style, color=color, label=name, ms=3)
        axes.fill_between(counts, values.min(0), values.max(0), color=color, alpha=0.12, lw=0)

    for row, (color, depth) in enumerate(zip(plots.PALETTE, config["depths"], strict=False)):
        line(results.of("EGD"), row, color, f"EGD, L = {depth}", "o-")
    for color, depth in zip(plots.PALETTE, config["natural depths"], strict=False):
        shade = plots.INK if depth == 1 else color
        line(results.of("NGD", f"L={depth}"), 0, shade, f"NGD, L = {depth}", ":")
    line(results.of("NGD, population"), 0, plots.INK, "NGD, population", "--")
    axes.axvline(config["dim"], color=plots.INK, lw=0.6)
    plots.dress(axes, logx=False, logy=False)
    axes.legend(frameon=False, fontsize=8)
    plots.label(axes, "samples N", "test accuracy, %", "Accuracy; the thin line is N = D")


def _logits(axes: Axes, results: Results) -> None:
    record = results.of("NGD", "L=1")[0]
    margins, times = np.asarray(record["margins"]), record["time"]
    if len(times):
        axes.plot(times, margins, color=plots.PALETTE[1], lw=0.6, alpha=0.6)
        axes.plot(times, times, "--", color=plots.INK, lw=1.2, label="t")
        axes.legend(frameon=False, fontsize=8)
    plots.dress(axes, logx=False, logy=False)
    plots.label(axes, "time t of NGD", "y·logit", "Logits of the training samples, N < D")


def _coefficients(axes: Axes, results: Results, config: dict[str, Any]) -> None:
    euclidean, natural = results.of("EGD")[0], results.of("NGD", "L=1")[0]
    kinds = [(f"EGD, L = {d}", euclidean["beta"][i]) for i, d in enumerate(config["depths"][:2])]
    kinds += [
        ("NGD", natural["beta"]),
        ("NGD, population", results.of("NGD, population")[0]["beta"]),
    ]
    shown = min(config["dim"], 5 * config["nonzero"])
    for place, (name, beta) in enumerate(kinds):
        values = np.asarray(beta)[:shown] / np.abs(beta).max()
        low = -2.4 * place
        color = plots.PALETTE[place]
        axes.vlines(np.arange(shown), low, low + values, color=color, lw=1.2)
        axes.axhline(low, color=color, lw=0.5)
        axes.text(shown, low + 0.5, name, color=color, ha="right", size=8)
    axes.axvline(config["nonzero"] - 0.5, color=plots.INK, lw=0.6)
    plots.dress(axes, logx=False, logy=False)
    axes.set_yticks([])
    largest = max(config["samples"])
    plots.label(axes, f"first {shown} coordinates", "", f"β at N = {largest}, true support left")
