"""The demonstration as an experiment, so that its results have a file, a figure and a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pullback import PullbackError

from ..framework.check import Check
from ..framework.curves import Chart, Line, Series
from ..framework.experiment import Context, Experiment, Item
from ..framework.plain import Record
from ..framework.results import Results
from ..framework.tabular import Table
from .contender import Contender
from .display import described, shown
from .problem import Problem
from .race import Curve, run
from .table import PROBLEMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_QUICK = 0.3  # seconds per run of a smoke test
NATURAL = "Natural gradient"
_ALONG = {"seconds": "CPU seconds", "steps": "steps"}
#: places in the palette
_COLORS = {NATURAL: 0, "Adam": 1, "L-BFGS": 2, "K-FAC": 3, "SGD": 4}


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
        return {
            "problems": {
                p.title: {
                    "setting": p.setting,
                    "seconds": budget(p, quick),
                    "contenders": {c.name: described(c.settings) for c in p.contenders},
                }
                for p in problems()[0]
            }
        }

    def items(self, quick: bool) -> list[Item]:
        return [
            Item((p.title, c.name), partial(_work, p, c, budget(p, quick)))
            for p in problems()[0]
            for c in p.contenders
        ]

    def judge(self, results: Results) -> list[Check]:
        """Of the first measure of each problem."""
        return [] if results.quick else [_lowest(*race) for race in self.races(results)]

    def races(self, results: Results) -> list[tuple[Problem, list[Curve]]]:
        """The curves of each problem, of those that are done."""
        found = [
            (
                p,
                [
                    Curve.of(c.name, one)
                    for c in p.contenders
                    for one in results.of(p.title, c.name)
                ],
            )
            for p in problems()[0]
        ]
        return [(problem, curves) for problem, curves in found if curves]

    def draw(self, results: Results) -> dict[str, Figure]:
        from .figure import draw  # matplotlib is slow to import

        return {"": draw(self.races(results))}

    def curves(self, results: Results) -> list[Chart]:
        return [
            Chart(
                problem.title,
                measure,
                [_series(curve, measure) for curve in curves],
                x=_ALONG,
                logy="accuracy" not in measure,
                note=problem.setting,
            )
            for problem, curves in self.races(results)
            for measure in curves[0].measures[0]
        ]

    def tables(self, results: Results) -> list[Table]:
        return [_table(problem, curves) for problem, curves in self.races(results)]


@cache
def problems() -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """The problems whose data can be had, and why others cannot."""
    found, missing = [], []
    for make in PROBLEMS.values():
        try:
            found.append(make())
        except PullbackError as error:
            missing.append(str(error))
    return tuple(found), tuple(missing)


def budget(problem: Problem, quick: bool) -> float:
    """Seconds of each run."""
    return _QUICK if quick else problem.seconds


def _work(problem: Problem, contender: Contender, seconds: float, context: Context) -> Record:
    def watch(share: float, loss: float) -> None:
        context.watch(share, f"loss {loss:.1e}")

    return run(problem, contender, seconds=seconds, watch=watch).as_dict()


def _lowest(problem: Problem, curves: Sequence[Curve]) -> Check:
    ends: Mapping[str, float] = {c.name: c.values()[-1] for c in curves}
    others = {k: v for k, v in ends.items() if k != NATURAL and math.isfinite(v)}
    best = min(others, key=others.__getitem__)
    measure = next(iter(curves[0].measures[0]))
    words = f"{measure} {shown('', ends[NATURAL])}, {best} {shown('', others[best])}"
    claim = f"{problem.title}: the natural gradient ends lowest"
    return Check(claim, ends[NATURAL] < others[best], words)


def _series(curve: Curve, measure: str) -> Series:
    y = [m[measure] for m in curve.measures]
    lines = {key: Line(getattr(curve, key), y) for key in _ALONG}
    return Series(curve.name, lines, _COLORS.get(curve.name))


def _table(problem: Problem, curves: Sequence[Curve]) -> Table:
    settings = {c.name: described(c.settings) for c in problem.contenders}
    names = list(curves[0].measures[-1])
    rows = [
        [
            c.name,
            settings[c.name],
            f"{c.steps[-1]:,}",
            f"{c.seconds[-1]:.1f}",
            *(shown(name, c.measures[-1][name]) for name in names),
        ]
        for c in curves
    ]
    return Table(["optimizer", "settings", "steps", "seconds", *names], rows, problem.title, text=2)
