"""The experiment: every problem, solved by every method in the same seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pullback import pde

from ..framework.check import Check
from ..framework.curves import Chart
from ..framework.experiment import Context, Experiment, Item
from ..framework.plain import Record
from ..framework.results import Results
from ..framework.tabular import Table
from .checks import Found, claims, final, reached
from .methods import METHODS, Method
from .runs import solved
from .targets import QUICK, SLABS, TARGETS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEARCH_SEED = 100
_ENDLESS = 10**9  # steps


@dataclass(frozen=True, kw_only=True)
class Benchmarks(Experiment):
    """The set.

    Attributes:
        problems, quick_problems: names of `pde.SETUPS`.
        seconds, quick_seconds: of every run; of every trial of a rate a quarter.
        quick_points: of the quick version, as a share of the set-up's.
        missed: the problems of which neither claim held in the full runs.
    """

    name: str = "pde-benchmarks"
    paper: str = "Errors that others report"
    figure: str = "benchmark set of PDEs"
    claim: str = (
        "Gauss–Newton in function space reaches the errors that others report, and in the same "
        "time errors far below those of Adam and L-BFGS"
    )
    about: str = (
        "The same network, points and seconds of steps for all methods of a problem. Targets are "
        "relative L² errors from the literature, of other networks and machines."
    )
    problems: Sequence[str] = tuple(name for name in TARGETS if name not in SLABS)
    quick_problems: Sequence[str] = QUICK
    seconds: float = 120.0
    quick_seconds: float = 7.0
    quick_points: float = 0.4
    missed: Sequence[str] = ("fokker-planck",)
    seeds: Sequence[int] = (0,)
    threads: int | None = None

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "problems": list(self._problems(quick)),
            "seconds": self._seconds(quick),
            "points": self.quick_points if quick else 1.0,
            "methods": {m.name: m.described() for m in METHODS},
        }

    def _problems(self, quick: bool) -> Sequence[str]:
        return self.quick_problems if quick else self.problems

    def _seconds(self, quick: bool) -> float:
        return self.quick_seconds if quick else self.seconds

    def smoke(self) -> Self:
        return replace(self, judged=False, quick_problems=("ritz",), quick_seconds=0.2)

    def items(self, quick: bool) -> list[Item]:
        out = []
        for problem in self._problems(quick):
            for m in METHODS:
                for rate in m.rates:
                    work = partial(self._tried, problem, m, rate)
                    out.append(Item(_trial(problem, m, rate), work, once=True, resumable=True))
                work = partial(self._solved, problem, m)
                out.append(Item((problem, m.name), work, resumable=True))
        return out

    def _tried(self, problem: str, method: Method, rate: float, context: Context) -> Record:
        seconds = self._seconds(context.quick) / 4
        context = replace(context, seed=_SEARCH_SEED)
        found = self._run(problem, method.options(rate), seconds, context)
        return {"rate": rate, "loss": found["loss"]}

    def _solved(self, problem: str, method: Method, context: Context) -> Record:
        seconds = self._seconds(context.quick)
        if not method.rates:
            return self._run(problem, method.options(), seconds, context)
        tried = [context.done.once(*_trial(problem, method, r)) for r in method.rates]
        finite = [t for t in tried if math.isfinite(t["loss"])] or tried
        rate = min(finite, key=lambda t: t["loss"])["rate"]
        return {"rate": rate, **self._run(problem, method.options(rate), seconds, context)}

    def _run(
        self, problem: str, options: dict[str, Any], seconds: float, context: Context
    ) -> Record:
        found = pde.setup(problem)
        options = {**found.options, "steps": _ENDLESS, **options}
        if context.quick:
            points = found.options["points"]
            each = points if isinstance(points, dict) else {"": points}
            fewer = {name: round(self.quick_points * n) for name, n in each.items()}
            options["points"] = fewer if isinstance(points, dict) else fewer[""]
        return solved(found, options, seconds, context)

    def line(self, record: Record) -> str:
        if "error" not in record:
            return f"loss {record['loss']:.1e}"
        return f"error {record['error'][-1]:.1e} after {record['step'][-1]} steps"

    def _found(self, results: Results) -> Found:
        problems = self._problems(results.quick)
        return {p: {m.name: results.of(p, m.name) for m in METHODS} for p in problems}

    def judge(self, results: Results) -> list[Check]:
        found = self._found(results)
        return claims(found, {} if results.quick else TARGETS, self.missed)

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for problem, by in self._found(results).items():
            target = TARGETS.get(problem)
            ends = [final(by[m.name]) for m in METHODS]
            to = None if target is None else reached(by[METHODS[0].name], target)
            rows.append(
                [
                    problem,
                    *(f"{e:.1e}" for e in ends),
                    None if target is None else f"{target:.1e}",
                    None if to is None or not math.isfinite(to) else f"{to:.1f}",
                ]
            )
        columns = ["problem", *(m.name for m in METHODS), "reported", "seconds to it"]
        title = f"Relative L² error after {self._seconds(results.quick):g} s, {len(results.seeds)} "
        return [Table(columns, rows, title + ("seed" if len(results.seeds) == 1 else "seeds"))]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        from .figure import draw  # matplotlib is slow to import

        return {"": draw(self._found(results), TARGETS)}

    def curves(self, results: Results) -> list[Chart]:
        from .charts import charts

        return charts(self._found(results), TARGETS)


def _trial(problem: str, method: Method, rate: float) -> tuple[str, ...]:
    return ("search", problem, method.name, f"{rate:g}")
