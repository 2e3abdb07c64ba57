"""The demonstration as an experiment, so that its results have a file, a figure and a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pullback import PullbackError

from ..framework import plots
from ..framework.check import Check
from ..framework.curves import Chart, Line, Series
from ..framework.experiment import Context, Experiment, Item
from ..framework.plots import INK, format_axes
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from .display import format_measure, format_settings
from .problem import Competitor, DemoProblem
from .problems import PROBLEMS
from .race import Curve, run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NATURAL = "Natural gradient"
_ALONG = {"seconds": "CPU seconds", "steps": "steps"}
#: places in the palette


@dataclass(frozen=True, kw_only=True)
class Demonstration(Experiment):
    """Every optimizer of every problem, each for the same time on one thread."""

    name: str = "demo"
    paper: str = "Demonstration"
    figure: str = "three small problems"
    claim: str = "in the same time on one thread, the natural gradient ends lowest"
    about: str = (
        "One run from one network. Settings are the best of a small grid at that time; seconds "
        "are of the CPU."
    )
    seeds: Sequence[int] = (0,)
    anywhere: bool = False
    open_parts: frozenset[str] = frozenset({"problems"})

    def config(self, quick: bool) -> dict[str, Any]:
        descriptions = {}
        for problem in problems()[0]:
            contenders = {c.name: format_settings(c.settings) for c in problem.contenders}
            descriptions[problem.title] = {
                "setting": problem.setting,
                "seconds": budget(problem, quick),
                "contenders": contenders,
            }
        return {"problems": descriptions}

    def items(self, quick: bool) -> list[Item]:
        items = []
        for problem in problems()[0]:
            seconds = budget(problem, quick)
            for contender in problem.contenders:
                work = partial(_race, problem, contender, seconds)
                items.append(Item((problem.title, contender.name), work))
        return items

    def judge(self, results: Results) -> list[Check]:
        """Check the first measure of each problem."""
        if results.quick:
            return []
        return [_lowest(*race) for race in self.races(results)]

    def races(self, results: Results) -> list[tuple[DemoProblem, list[Curve]]]:
        """Return the curves of each problem that is done."""
        races = []
        for problem in problems()[0]:
            curves: list[Curve] = []
            for name in (contender.name for contender in problem.contenders):
                curves += [Curve.of(name, record) for record in results.of(problem.title, name)]
            if curves:
                races.append((problem, curves))
        return races

    def draw(self, results: Results) -> dict[str, Figure]:
        return {"": draw(self.races(results))}

    def curves(self, results: Results) -> list[Chart]:
        charts = []
        for problem, curves in self.races(results):
            for measure in curves[0].measures[0]:
                chart = Chart(
                    problem.title,
                    measure,
                    [_series(curve, measure) for curve in curves],
                    x=_ALONG,
                    logy="accuracy" not in measure,
                    note=problem.setting,
                )
                charts.append(chart)
        return charts

    def tables(self, results: Results) -> list[Table]:
        return [table(problem, curves) for problem, curves in self.races(results)]


@cache
def problems() -> tuple[tuple[DemoProblem, ...], tuple[str, ...]]:
    """Return the problems whose data are available, and why others are not."""
    entries = []
    missing = []
    for make in PROBLEMS.values():
        try:
            entries.append(make())
        except PullbackError as error:
            missing.append(str(error))
    return tuple(entries), tuple(missing)


def budget(problem: DemoProblem, quick: bool) -> float:
    """Return the seconds of each run."""
    if quick:
        return 0.3  # a smoke test
    return problem.seconds


def _race(problem: DemoProblem, contender: Competitor, seconds: float, context: Context) -> Record:
    def watch(share: float, loss: float) -> None:
        context.watch(share, f"loss {loss:.1e}")

    return run(problem, contender, seconds=seconds, watch=watch).as_dict()


def _lowest(problem: DemoProblem, curves: Sequence[Curve]) -> Check:
    ends: Mapping[str, float] = {c.name: c.values()[-1] for c in curves}
    others = {k: v for k, v in ends.items() if k != NATURAL and math.isfinite(v)}
    best = min(others, key=others.__getitem__)
    measure = next(iter(curves[0].measures[0]))
    words = (
        f"{measure} {format_measure('', ends[NATURAL])}, {best} {format_measure('', others[best])}"
    )
    claim = f"{problem.title}: the natural gradient ends lowest"
    return Check(claim, ends[NATURAL] < others[best], words)


def _series(curve: Curve, measure: str) -> Series:
    y = [m[measure] for m in curve.measures]
    lines = {key: Line(getattr(curve, key), y) for key in _ALONG}
    return Series(curve.name, lines, plots.assign_places([curve.name])[curve.name])


def table(problem: DemoProblem, curves: Sequence[Curve]) -> Table:
    """Optimizer, settings, steps, seconds, and the final measures."""
    settings = {c.name: format_settings(c.settings) for c in problem.contenders}
    names = list(curves[0].measures[-1])
    rows = []
    for curve in curves:
        row = [curve.name, settings[curve.name], f"{curve.steps[-1]:,}", f"{curve.seconds[-1]:.1f}"]
        row += [format_measure(name, curve.measures[-1][name]) for name in names]
        rows.append(row)
    return Table(["optimizer", "settings", "steps", "seconds", *names], rows, problem.title, text=2)


Race = tuple[DemoProblem, Sequence[Curve]]


def draw(races: Sequence[Race]) -> Figure:
    """The figure."""
    figure = plots.make_figure(10.5, 3.7 * len(races), dpi=130)
    grid = figure.subplots(len(races), 2, squeeze=False, sharey="row")
    for (problem, curves), (left, right) in zip(races, grid, strict=True):
        _panel(left, curves, "seconds")
        _panel(right, curves, "steps")
        left.set_ylabel(next(iter(curves[0].measures[0])), color=INK)
        left.set_title(problem.title, loc="left", color=INK, weight="bold")
        right.set_title(problem.setting, loc="right", color=INK, size=9)
        _label(right, curves)
    return figure


def _style(name: str) -> tuple[str, float]:
    """Return the color and the width of a line."""
    color = plots.assign_colors([name])[name]
    if name == NATURAL:
        return color, 2.8
    return color, 1.7


def _panel(axes: Axes, curves: Sequence[Curve], along: str) -> None:
    """Draw the curves, each with a dot at its end."""
    for curve in curves:
        color, width = _style(curve.name)
        x = getattr(curve, along)[1:]
        y = curve.values()[1:]
        axes.plot(x, y, color=color, lw=width, solid_joinstyle="round")
        axes.plot(x[-1:], y[-1:], "o", color=color, ms=2 + 1.6 * width)
    format_axes(axes)
    axes.set_xlabel({"seconds": "CPU seconds"}.get(along, along), color=INK)


def _label(axes: Axes, curves: Sequence[Curve]) -> None:
    """Write every curve's name and final numbers to the right of the panel."""
    bottom, top = (math.log10(y) for y in axes.get_ylim())
    at = -math.inf
    for curve in sorted(curves, key=lambda c: c.values()[-1]):
        height = (math.log10(curve.values()[-1]) - bottom) / (top - bottom)
        at = max(height, at + 0.115)  # a share of the panel's height, for two lines of text
        (_, end), *others = curve.measures[-1].items()
        text = f"{curve.name}\n{format_measure('', end)}"
        text += "".join(f"; {format_measure(name, value)} {name}" for name, value in others)
        axes.annotate(
            text,
            (1.03, at),
            xycoords="axes fraction",
            color=_style(curve.name)[0],
            va="center",
            size=9.5,
        )
