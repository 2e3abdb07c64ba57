"""The projection view: six panels, and curves of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..framework import plots
from ..framework.curves import Chart, Line, Series, Style
from ..framework.records import Record
from ..framework.store import Results
from .moves import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLORS = plots.assign_colors(METHODS)
_GREEN = "#009E73"


def draw(results: Results) -> Figure:
    """Draw the moves of the first seed, and the errors of all seeds."""
    wide_record = results.of("wide")[0]
    narrow = results.of("narrow")[0]
    figure = plots.make_figure(10.5, 11.5, "Gradient steps as moves of the function")
    grid = figure.subplots(3, 2).reshape(2, 3)
    _function(grid[0][0], wide_record)
    _gradients(grid[0][1], wide_record)
    _moves(grid[0][2], wide_record)
    _projection(grid[1][0], narrow)
    _errors(grid[1][1], results)
    _resolution(grid[1][2], results.once("resolution"))
    return figure


def _panel(axes: Axes, title: str, x: str, y: str, *, log: bool = False) -> None:
    plots.format_axes(axes, logx=log, logy=log)
    plots.label(axes, x, y, title)
    axes.legend(frameon=False, fontsize=8)


def _function(axes: Axes, r: Record) -> None:
    axes.plot(r["grid"], r["target"], color=plots.INK, lw=1.2, ls=":", label="target")
    axes.plot(r["grid"], r["f"], color=_GREEN, lw=2, label="f, the network")
    axes.plot(r["x"], r["y"], "o", color=plots.INK, ms=5, label="data")
    f = r["y"] + r["residual"]
    axes.vlines(r["x"], r["y"], f, color=plots.INK, lw=0.8)
    _panel(axes, "a  The loss sees f at the data only", "x", "")


def _gradients(axes: Axes, r: Record) -> None:
    axes.plot(r["x"], r["residual"], "o", color=plots.INK, ms=5, label="f − y at the data")
    axes.plot(
        r["grid"], r["gradient"], color=_GREEN, lw=1.2, ls="--", label="∇ℓ in the Sobolev space"
    )
    for method in METHODS:
        move = r["moves"][method]
        rate = move["rate"]
        at = move["at data"]
        # the standard gradient has another unit: it is shown at the length of the natural one
        unit = 1.0
        if method == "standard":
            unit = float(abs(r["moves"]["natural"]["at data"]).max() / abs(at).max())
        name = {"standard": f"S∇ℓ, standard (× {unit:.2g})", "natural": "natural"}.get(
            method, "P∇ℓ, Sobolev natural"
        )
        axes.plot(r["grid"], unit * rate, color=_COLORS[method], lw=1.8, label=name)
    _panel(axes, "b  What each method takes for the gradient", "x", "")


def _moves(axes: Axes, r: Record) -> None:
    for method in METHODS:
        move = r["moves"][method]
        color = _COLORS[method]
        axes.plot(r["grid"], move["predicted"], color=color, lw=1.8, label=f"{method}: predicted")
        axes.plot(r["grid"][::8], move["actual"][::8], "o", color=color, ms=4, mfc="white")
    axes.plot([], [], "o", color=plots.INK, ms=4, mfc="white", label="actual, after the step")
    axes.plot(r["x"], 0 * r["x"], "|", color=plots.INK, ms=7, label="data")
    _panel(axes, "c  Δf of one step, where there are no data", "x", "")


def _projection(axes: Axes, r: Record) -> None:
    move = r["moves"]["Sobolev"]
    axes.plot(r["grid"], r["gradient"], color=_GREEN, lw=1.5, ls="--", label="∇ℓ")
    axes.plot(r["grid"], move["rate"], color=_COLORS["Sobolev"], lw=2, label="P∇ℓ")
    axes.fill_between(r["grid"], r["gradient"], move["rate"], color=_GREEN, alpha=0.12, lw=0,
                      label="∇ℓ − P∇ℓ, orthogonal")  # fmt: skip
    low = min(r["gradient"].min(), move["rate"].min())
    axes.plot(r["x"], 0 * r["x"] + low, "|", color=plots.INK, ms=5, label="data")
    title = f"d  2 hidden units: P keeps {100 * r['laws']['kept']:.0f} % of ‖∇ℓ‖²"
    _panel(axes, title, "x", "")


def _errors(axes: Axes, results: Results) -> None:
    for name, style in (("wide", "-"), ("narrow", ":")):
        for method in METHODS:
            for number, record in enumerate(results.of(name)):
                move = record["moves"][method]
                if number == 0:
                    label = f"{method}, {name}"
                else:
                    label = None
                axes.plot(move["size"], move["error"], style, color=_COLORS[method], lw=1.1,
                          label=label)  # fmt: skip
    sizes = results.of("wide")[0]["moves"]["natural"]["size"]
    axes.plot(sizes, [s * s for s in sizes], color=plots.INK, lw=1.2, ls="--", label="slope 2")
    _panel(
        axes, "e  Predicted less actual: ∝ η²", "largest |Δf|", "error (root mean square)", log=True
    )


def _resolution(axes: Axes, r: Record) -> None:
    for color, (order, norms) in zip(plots.PALETTE, r["norms"].items(), strict=False):
        if order == "0":
            name = "L²"
        else:
            name = f"Hˢ, s = {order}"
        axes.plot(r["resolution"], norms, "o-", color=color, ms=3, lw=1.6, label=name)
    _panel(axes, "f  ‖∇ℓ‖ on finer grids: none in L²", "grid points", "", log=True)


_MOVES: Mapping[str, Style] = {"predicted": "solid", "actual": "dotted"}
_NETS: Mapping[str, Style] = {"wide": "solid", "narrow": "dotted"}
_PLACES = plots.assign_places(METHODS)


def charts(results: Results) -> list[Chart]:
    """Return the charts of the first seed."""
    return [*_move_charts(results), _error_chart(results), _resolution_chart(results)]


def _move_charts(results: Results) -> list[Chart]:
    records = results.of("wide")
    if not records:
        return []
    record = records[0]
    series = []
    for method in METHODS:
        for what, style in _MOVES.items():
            line = Line(list(record["grid"]), list(record["moves"][method][what]))
            series.append(Series(f"{method}, {what}", {"x": line}, _PLACES[method], style))
    note = f"a step of the wide network, seed {results.seeds[0]}"
    return [Chart("Δf of one step", "Δf", series, logx=False, logy=False, note=note)]


def _error_chart(results: Results) -> Chart:
    series = []
    for name, style in _NETS.items():
        for record in results.of(name)[:1]:
            for method, move in record["moves"].items():
                line = Line(move["size"], move["error"])
                color = _PLACES.get(method)
                series.append(Series(f"{method}, {name}", {"size": line}, color, style))
    return Chart(
        "Predicted less actual moves: ∝ η²",
        "error, root mean square",
        series,
        x={"size": "largest |Δf|"},
        note="the first seed",
    )


def _resolution_chart(results: Results) -> Chart:
    record = results.once("resolution")
    series = []
    for order, norms in record["norms"].items():
        name = f"Hˢ, s = {order}"
        if order == "0":
            name = "L²"
        series.append(Series(name, {"points": Line(record["resolution"], norms)}))
    return Chart("‖∇ℓ‖ on finer grids: none in L²", "‖∇ℓ‖", series, x={"points": "grid points"})
