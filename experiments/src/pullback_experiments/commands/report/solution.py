"""A solved equation on the page: what `pullback solve` leaves behind."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...framework.curves import Chart, Line, Series
from ...framework.progress import format_duration
from . import charts
from .markup import (
    ReportEntry,
    badge,
    command,
    environments,
    lines,
    render_details,
    render_figures,
    render_json,
    table,
    text,
)

PAPER = "Solved equations"
_AXES = {"step": "steps", "seconds": "seconds"}


def solution(path: Path, out: Path, state: Mapping[str, Any], anchor: str) -> ReportEntry:
    """The entry of a solution's record."""
    config = state["config"]
    result = state["result"]
    name = str(config["name"])
    error = result.get("error")
    if error is None:
        reached = "no exact solution"
    else:
        reached = f"relative L² error {float(error):.1e}"
    words = f"{config['problem']}: {reached}, {int(result['steps']):,} steps, " + format_duration(
        float(result["seconds"])
    )
    plots = charts.render_charts(history(state["history"]))
    rows = [["network", f"{config['network']}, {config['parameters']:,} parameters"],
            ["loss", _short(result["loss"])],
            *([k, _short(v)] for k, v in (result.get("unknowns") or {}).items()),
            ["stopped", result["stopped"]]]  # fmt: skip
    equation = ""
    if config.get("equation"):
        equation = f"<p>{text(config['equation'])}</p>"
    blocks = [
        f'<h3><a class="anchor" href="#{text(anchor)}">{text(name)}</a> '
        f"<small>seed {text(config['seed'])}</small> {badge('not judged')}</h3>",
        f'<p class="claim">{text(words)}.</p>',
        equation,
        plots,
        render_figures(path, [f"{path.stem}.png"], name, bool(plots)),
        table({"columns": ["what", "value"], "rows": rows, "text": 2}),
        command(_make_command(path, config)),
        render_details(
            f"Environment and configuration, {path.relative_to(out)}",
            environments([state["environment"]]) + render_json(config),
        ),
    ]
    html = f'<article id="{text(anchor)}" data-verdict="not judged">\n{lines(blocks)}\n</article>'
    took = float(result["seconds"])
    seed = str(config["seed"])
    return ReportEntry(
        anchor=anchor,
        paper=PAPER,
        name=name,
        figure="pullback solve",
        verdict="not judged",
        claims="–",
        seeds=seed,
        took=took,
        html=html,
    )


def _make_command(path: Path, config: Mapping[str, Any]) -> str:
    """Return the command that goes on with the solve, or repeats it."""
    setup = str(config.get("setup", config["name"]))  # a file's path, where one was solved
    words = ["pullback", "solve", setup, "--seed", str(config["seed"])]
    options = config.get("options", {})
    for flag, name in (("--steps", "steps"), ("--seconds", "budget")):
        if options.get(name) is not None:
            words += [flag, str(options[name])]
    device = str(config.get("device", "cpu"))
    if device != "cpu":
        words += ["--device", device]
    return shlex.join([*words, "--out", str(path.parent)])


def history(record: Mapping[str, Any]) -> list[Chart]:
    """Loss after every step, error where it was measured."""
    loss = _numbers(record["loss"])
    seconds = _numbers(record["seconds"])
    error = _numbers(record["error"])
    clock = _numbers(record["clock"])
    steps = list(range(1, len(loss) + 1))
    measured = _numbers(record["measured"])
    shown = [
        ("Loss", "loss", {"step": Line(steps, loss), "seconds": Line(seconds, loss)}),
        ("Error", "relative L² error",
         {"step": Line(measured, error), "seconds": Line(clock, error)}),
    ]  # fmt: skip
    return [
        Chart(title, y, [Series(y, lines, number)], x=_AXES, logx=False)
        for number, (title, y, lines) in enumerate(shown)
        if len(lines["step"].y)
    ]


def _numbers(values: Any) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
