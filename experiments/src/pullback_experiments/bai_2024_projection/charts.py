"""Moves of the function, their errors, and norms on finer grids."""

from __future__ import annotations

from collections.abc import Mapping

from ..framework.curves import Chart, Line, Series, Style
from ..framework.results import Results
from .moves import METHODS

_MOVES: Mapping[str, Style] = {"predicted": "solid", "actual": "dotted"}
_NETS: Mapping[str, Style] = {"wide": "solid", "narrow": "dotted"}
_COLORS = dict(zip(METHODS, (6, 1, 0), strict=True))


def charts(results: Results) -> list[Chart]:
    """Of the first seed."""
    return [*_moves(results), _errors(results), _resolution(results)]


def _moves(results: Results) -> list[Chart]:
    found = results.of("wide")
    if not found:
        return []
    record, series = found[0], []
    for method in METHODS:
        for what, style in _MOVES.items():
            line = Line(list(record["grid"]), list(record["moves"][method][what]))
            series.append(Series(f"{method}, {what}", {"x": line}, _COLORS[method], style))
    note = f"a step of the wide network, seed {results.seeds[0]}"
    return [Chart("Δf of one step", "Δf", series, logx=False, logy=False, note=note)]


def _errors(results: Results) -> Chart:
    series = []
    for name, style in _NETS.items():
        for record in results.of(name)[:1]:
            for method, found in record["moves"].items():
                line = Line(found["size"], found["error"])
                color = _COLORS.get(method)
                series.append(Series(f"{method}, {name}", {"size": line}, color, style))
    return Chart(
        "Predicted less actual moves: ∝ η²",
        "error, root mean square",
        series,
        x={"size": "largest |Δf|"},
        note="the first seed",
    )


def _resolution(results: Results) -> Chart:
    record = results.once("resolution")
    series = [
        Series("L²" if s == "0" else f"H^{s}", {"points": Line(record["resolution"], norms)})
        for s, norms in record["norms"].items()
    ]
    return Chart("‖∇ℓ‖ on finer grids: none in L²", "‖∇ℓ‖", series, x={"points": "grid points"})
