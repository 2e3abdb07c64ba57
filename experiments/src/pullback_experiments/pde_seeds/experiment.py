"""The experiment: the error of every seed, with the given network alone and with others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from pullback import pde
from pullback.pde.catalog.setup import fully_connected

from ..framework.check import Check
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from ..problems import AllenCahn


@dataclass(frozen=True)
class SeedProblem:
    """A small version of a tuned problem.

    Attributes:
        setup: builds the problem with its network and options.
        solved: errors at most this large count as solved; stuck seeds end above 1e-2.
        ways: in which it is solved.
    """

    setup: Callable[[], pde.Setup]
    solved: float
    ways: tuple[str, ...]


ALONE = "alone"
STRATEGY = "strategy"


def _points(equation: int, boundary: int, initial: int | None = None) -> dict[str, int]:
    counts = {"equation": equation, "dirichlet": boundary}
    if initial is not None:
        counts["initial"] = initial
    return counts


PROBLEMS: dict[str, SeedProblem] = {
    "burgers": SeedProblem(
        lambda: fully_connected(
            pde.Burgers(0.01 / math.pi, hard=True), 2, 16, 16, 16, 1, parity=-1,
            points=2500, sampler="sobol", refine=pde.Refine(every=30, until=120), steps=300,
        ),
        1e-3,
        (ALONE, STRATEGY),
    ),
    "allen-cahn": SeedProblem(
        lambda: fully_connected(
            AllenCahn(hard=True), 3, 16, 16, 16, 1, parity=1,
            points=2500, sampler="sobol", steps=300,
        ),
        1e-2,
        (ALONE, STRATEGY),
    ),
    "poisson5d": SeedProblem(
        lambda: fully_connected(
            pde.Poisson(5, boundary_weight=100), 5, 48, 1, points=_points(2500, 1000), steps=200
        ),
        1e-4,
        (STRATEGY,),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seeds(Experiment):
    """The table of seeds.

    Attributes:
        problems, quick_problems: names.
        seconds, quick_seconds: of every solve, all networks that are tried together.
    """

    name: str = "pde-seeds"
    paper: str = "Seeds that get stuck"
    figure: str = "errors of twenty seeds"
    claim: str = "Every seed ends near the solution"
    about: str = "Small versions of tuned problems, on one thread and within the same seconds."
    problems: Sequence[str] = tuple(PROBLEMS)
    quick_problems: Sequence[str] = ("poisson5d",)
    seconds: float = 45.0
    quick_seconds: float = 10.0
    seeds: Sequence[int] = tuple(range(20, 40))
    open_parts: frozenset[str] = frozenset({"problems"})
    anywhere: bool = False

    def config(self, quick: bool) -> dict[str, Any]:
        return {"problems": list(self._problems(quick)), "seconds": self._seconds(quick)}

    def _problems(self, quick: bool) -> Sequence[str]:
        return self.quick_problems if quick else self.problems

    def _seconds(self, quick: bool) -> float:
        return self.quick_seconds if quick else self.seconds

    def smoke(self) -> Self:
        return replace(self, judged=False, quick_seconds=0.5)

    def items(self, quick: bool) -> list[Item]:
        items = []
        for name in self._problems(quick):
            for way in PROBLEMS[name].ways:
                items.append(Item((name, way), partial(self._solve, name, way)))
        return items

    def _solve(self, name: str, way: str, context: Context) -> Record:
        options: dict[str, Any] = {"budget": self._seconds(context.quick), "progress": False}
        if way == ALONE:
            options["patience"] = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution = PROBLEMS[name].setup().solve(context.seed, **options)
        return {
            "error": solution.error,
            "verdict": str(solution.verdict.name),
            "tried": list(solution.verdict.tried),
            "seconds": solution.history.spent,
            "steps": len(solution.history),
        }

    def line(self, record: Record) -> str:
        return f"{record['verdict']}, error {record['error']:.1e}, {len(record['tried'])} tried"

    def judge(self, results: Results) -> list[Check]:
        checks = []
        for name in self._problems(results.quick):
            errors = [record["error"] for record in results.of(name, STRATEGY)]
            solved = sum(error <= PROBLEMS[name].solved for error in errors)
            claim = f"{name}: every seed has an error of at most {PROBLEMS[name].solved:g}"
            numbers = f"{solved} of {len(errors)}, the worst {max(errors):.1e}"
            checks.append(Check(claim, solved == len(errors), numbers))
        return checks

    def tables(self, results: Results) -> list[Table]:
        rows = []
        columns: list[tuple[str, str]] = []
        for name in self._problems(results.quick):
            columns += [(name, way) for way in PROBLEMS[name].ways]
        by_column = [results.of(*column) for column in columns]
        for number, seed in enumerate(results.seeds):
            rows.append([str(seed), *(f"{r[number]['error']:.1e}" for r in by_column)])
        heading = [f"{name}, {way}" for name, way in columns]
        return [Table(["seed", *heading], rows, "Relative L² errors")]
