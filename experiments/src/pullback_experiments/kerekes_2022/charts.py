"""Figures 2, 4, 5, 6 and the support vectors as curves of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..framework.curves import Chart, Line, Series, Style, averages, quartiles
from ..framework.plain import Record
from ..framework.results import Results

_INK = 7
_METHODS: Mapping[str, Style] = {"EGD": "solid", "NGD": "dotted"}
#: name, item, color and style of a line
_Kind = tuple[str, tuple[str, ...], int, Style]


def planar(results: Results, depths: Sequence[int]) -> list[Chart]:
    """EGD's direction along the way down, beside NGD's end."""
    runs, natural = results.of("EGD"), results.of("NGD", "L=1")
    if not runs:
        return []
    levels = [r["level"] for r in runs]
    series: list[Series | None] = [
        Series(
            f"EGD, L = {depth}", {"level": quartiles(levels, [r["angles"][place] for r in runs])}
        )
        for place, depth in enumerate(depths)
    ]
    if natural:
        ends = [[r["descent angle"]] * len(levels[0]) for r in natural]
        line = quartiles([levels[0]] * len(natural), ends)
        series.append(Series("NGD, L = 1", {"level": line}, _INK, "dashed"))
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
    euclidean, depths = results.of("EGD"), config["depths"]
    series = [
        _accuracy(f"EGD, L = {d}", euclidean, row, config, color=row)
        for row, d in enumerate(depths)
    ]
    for depth in config["natural depths"]:
        color = _INK if depth == 1 else depths.index(depth) if depth in depths else None
        runs = results.of("NGD", f"L={depth}")
        series.append(_accuracy(f"NGD, L = {depth}", runs, 0, config, color=color, style="dotted"))
    runs = results.of("NGD, population")
    series.append(_accuracy("NGD, population", runs, 0, config, color=_INK, style="dashed"))
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
    shares = [[100 * a for a in r["accuracy"][row]] for r in runs]
    return Series(
        name, {"samples": averages([config["samples"]] * len(runs), shares)}, color, style
    )


def _way_down(runs: Sequence[Record], config: dict[str, Any]) -> list[Chart]:
    below = [i for i, n in enumerate(config["samples"]) if n < config["dim"]]
    if not runs or not below:
        return []
    levels = [r["levels"] for r in runs]
    series = [
        Series(
            f"EGD, L = {depth}",
            {
                "level": averages(
                    levels, [[100 * at[row][below[-1]] for at in r["path"]] for r in runs]
                )
            },
        )
        for row, depth in enumerate(config["depths"])
    ]
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
    times, margins = list(runs[0]["time"]), runs[0]["margins"]
    spread = quartiles([times] * margins.shape[1], margins.T.tolist())
    series = [
        Series("y·logit", {"time": spread}, 1),
        Series("t", {"time": Line(times, times)}, _INK, "dashed"),
    ]
    title, note = "NGD's logits grow as t, N < D", "median and quartiles over samples, first seed"
    return [
        Chart(title, "y·logit", series, x={"time": "time t"}, logx=False, logy=False, note=note)
    ]


def completion(results: Results, config: dict[str, Any]) -> list[Chart]:
    """Errors and effective ranks against observed entries, and the effect of the start."""
    at = {"observed": "observed entries"}
    kinds: list[_Kind] = []
    for method, style in _METHODS.items():
        for place, depth in enumerate(config["depths"]):
            kinds.append((f"{method}, L = {depth}", (method, f"L={depth}"), place, style))
    kinds.append(("nuclear norm", ("nuclear norm",), _INK, "dashed"))
    starts: list[_Kind] = []
    for d in (2, 3):
        words = f"L = {d}, start of L = {config['collapsed']}"
        starts.append((f"L = {d}", ("EGD", f"L={d}"), d - 1, "solid"))
        starts.append((words, ("EGD, collapsed start", f"L={d}"), d - 1, "dashed"))

    def chart(title: str, y: str, what: str, chosen: Sequence[_Kind]) -> Chart:
        series = []
        for name, key, color, style in chosen:
            if runs := results.of(*key):
                line = quartiles([config["counts"]] * len(runs), [r[what] for r in runs])
                series.append(Series(name, {"observed": line}, color, style))
        note = "medians and quartiles over seeds"
        return Chart(title, y, series, x=at, logx=False, note=note)

    return [
        chart("Error", "relative error elsewhere", "error", kinds),
        chart("Effective rank", "effective rank", "rank", kinds),
        chart("EGD from starts of two depths", "relative error elsewhere", "error", starts),
    ]


def support(results: Results, ratios: Sequence[float]) -> list[Chart]:
    """Shares of samples that are support vectors."""
    found = {r: results.of(f"D/N={r:g}") for r in ratios}
    found = {r: runs for r, runs in found.items() if runs}
    count = min(map(len, found.values()), default=0)
    names = {"margin": "ℓ2 margin (EGD)", "natural": "NGD = least squares"}
    series = [
        Series(
            name,
            {
                "ratio": quartiles(
                    [list(found)] * count,
                    [[100 * runs[i][what] for runs in found.values()] for i in range(count)],
                )
            },
        )
        for what, name in names.items()
        if count
    ]
    note, x = "medians and quartiles over seeds", {"ratio": "D / N"}
    title, y = "Support vectors", "samples that are support vectors, %"
    return [Chart(title, y, series, x=x, logy=False, note=note)]
