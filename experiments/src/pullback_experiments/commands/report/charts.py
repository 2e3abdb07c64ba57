"""Curves as data for the page's script, in a tag that no text can leave."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pullback import PullbackError

from ... import registry
from ...framework.curves import Chart, Line, Series, Style
from ...framework.plots import COMMON, assign_places, has_fixed_place
from ...framework.store import Available
from .markup import text


def render_charts(charts: Sequence[Chart]) -> str:
    """Return hidden elements in which the script draws."""
    blocks = []
    for chart in charts:
        if chart.drawable_series():
            repeats_title = chart.title.lower() == chart.y.lower()
            if repeats_title:
                small = ""
            else:
                small = f" <small>{text(chart.y)}</small>"
            head = f"<h4>{text(chart.title)}{small}</h4>"
            data = f'<script type="application/json">{embed_json(as_data(chart))}</script>'
            blocks.append(f'<div class="chart" data-chart hidden>{head}{data}</div>')
    if blocks:
        return f'<div class="charts">\n{chr(10).join(blocks)}\n</div>'
    return ""


def embed_json(value: object) -> str:
    r"""JSON that ends no tag and opens no comment: <, > and & are written as escapes.

    >>> embed_json("</script><!--")
    '"\\u003c/script\\u003e\\u003c!--"'
    """
    words = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return words.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def as_data(chart: Chart) -> dict[str, Any]:
    """Return what the script reads; colors are indices of the palette."""
    return {
        "title": chart.title,
        "y": chart.y,
        "note": chart.note,
        "logx": bool(chart.logx),
        "logy": bool(chart.logy),
        "axes": [list(pair) for pair in chart.axis_names().items()],
        "series": _assign_colors(chart.drawable_series()),
    }


def _assign_colors(shown: Sequence[Series]) -> list[dict[str, Any]]:
    """Methods in the colors of the figures; other series in the order of the palette."""
    names = [series.name for series in shown]
    if any(map(has_fixed_place, names)) and len(fixed_colors := assign_places(names)) == len(
        set(names)
    ):
        return [_series(series, fixed_colors[series.name], series.style) for series in shown]
    assigned = []
    for number, series in enumerate(shown):
        style = series.style
        if series.color is None and number >= COMMON:
            style = "dashed"  # a palette that has been used up goes on with dashes
        assigned.append(_series(series, number % COMMON, style))
    return assigned


def _series(series: Series, number: int, style: Style) -> dict[str, Any]:
    color = series.color
    if color is None:
        color = number
    return {
        "name": series.name,
        "color": color,
        "style": style,
        "lines": {key: _line(line) for key, line in series.lines.items()},
    }


def _line(line: Line) -> dict[str, list[float | None]]:
    columns = {"x": line.x, "y": line.y, "low": line.low, "high": line.high}
    columns = {name: values for name, values in columns.items() if len(values)}
    if len({len(values) for values in columns.values()}) > 1:
        raise ValueError(f"a line has {', '.join(f'{len(v)} {k}' for k, v in columns.items())}")
    entries = thin_curve([_plain(v) for v in line.y])
    thinned = {}
    for name, values in columns.items():
        thinned[name] = [_plain(values[i]) for i in entries]
    return thinned


def _plain(value: float) -> float | None:
    """Return a number to a few digits; None for NaN and infinities, which JSON lacks."""
    number = float(value)
    if math.isfinite(number):
        return float(f"{number:.6g}")
    return None


def thin_curve(y: Sequence[float | None], most: int = 320) -> list[int]:
    """Places of at most so many entries: the lowest and the highest of every stretch, and the ends.

    Half of the stretches are equally long and half grow geometrically, so that the early entries
    of a long run survive on a logarithmic axis.

    >>> thin_curve([1.0, 2.0, 3.0])
    [0, 1, 2]
    >>> len(thin_curve([0.0] * 100_000)) <= 320
    True
    """
    n = len(y)
    if n <= most:
        return list(range(n))
    count = most // 4
    even = {round(i * n / count) for i in range(count + 1)}
    growing = {round(n ** (i / count)) for i in range(count)}
    cuts = sorted({0, n} | even | growing)
    indices = {0, n - 1}
    for start, end in pairwise(cuts):
        known = [i for i in range(start, end) if y[i] is not None]
        if known:
            indices |= {
                min(known, key=lambda i: y[i] or 0.0),
                max(known, key=lambda i: y[i] or 0.0),
            }
        else:
            indices.add(start)  # a gap stays one
    return sorted(indices)


#: what records that were changed by hand make of a computation
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)


@dataclass(frozen=True)
class Curves:
    """What to draw, or why there is nothing; the reason is empty where none is expected."""

    charts: Sequence[Chart] = ()
    note: str = ""


def curves(path: Path, state: Mapping[str, Any]) -> Curves:
    """Return the curves of all items that are done."""
    name = str(state["about"].get("name"))
    quick = bool(state["about"].get("quick"))
    if name not in registry.names():
        return Curves()
    try:
        experiment = registry.find(name)
        if path.stem != experiment.stem(quick):
            return Curves(note=f"No curves: results of {name} are called {experiment.stem(quick)}.")
        store = experiment.open_store(quick, path.parent)
        return Curves(experiment.curves(Available(store, quick)))
    except PullbackError as error:
        return Curves(note=f"No curves: {error.why}.")
    except MALFORMED as error:
        return Curves(note=f"No curves: the records were changed by hand ({error!r}).")
