"""The experiment: verdict, advice, estimated and true error of every problem and seed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Self

from pullback import pde

from ..framework.check import Check
from ..framework.experiment import Context, Item
from ..framework.problem_set import ProblemSetExperiment
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from ..framework.timing import count_cpu_seconds
from ..pde_honesty.experiment import measure_error
from ..pde_honesty.problems import PROBLEMS as HONESTY_PROBLEMS
from ..pde_honesty.problems import clamped_plate

PROBLEMS: dict[str, Callable[[], pde.Problem]] = {
    "biharmonic": HONESTY_PROBLEMS["biharmonic"],
    "biharmonic-100": lambda: clamped_plate(boundary_weight=100.0),
    "bose-einstein": HONESTY_PROBLEMS["bose-einstein"],
    "van-der-pol": HONESTY_PROBLEMS["van-der-pol"],
    "lorenz": HONESTY_PROBLEMS["lorenz"],
    "logistic": HONESTY_PROBLEMS["logistic"],
    "stokes-disk": HONESTY_PROBLEMS["stokes-disk"],
    "heat-space": HONESTY_PROBLEMS["heat-space"],
    "naive-interface": HONESTY_PROBLEMS["naive-interface"],
    "thin-layer": HONESTY_PROBLEMS["thin-layer"],
    "two-constants": HONESTY_PROBLEMS["two-constants"],
}
#: unknown coefficients with known true values
TRUE_UNKNOWNS: Mapping[str, Mapping[str, float]] = {"two-constants": {"kappa": 0.1, "rho": 0.5}}
#: a relative error of two digits
_GOOD_ERROR = 1e-2
#: standard errors within which the true value of an unknown lies
_MOST_DEVIATIONS = 3.0


@dataclass(frozen=True, kw_only=True)
class StuckProblems(ProblemSetExperiment):
    """The table of problems that were stuck."""

    name: str = "pde-stuck"
    paper: str = "Problems that get stuck"
    figure: str = "verdicts, errors and advice"
    claim: str = "Every problem is solved by defaults, or the verdict tells what to change"
    about: str = "Every problem is solved by defaults within the same CPU seconds on one thread."
    problems: Sequence[str] = tuple(PROBLEMS)
    quick_problems: Sequence[str] = ("logistic", "two-constants")
    seconds: float = 90.0
    quick_seconds: float = 10.0
    seeds: Sequence[int] = (41, 42)
    open_parts: frozenset[str] = frozenset({"problems"})
    anywhere: bool = False

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "problems": dict.fromkeys(self.choose_problems(quick), "solved"),
            "seconds": self.choose_seconds(quick),
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, quick_problems=("logistic",), quick_seconds=1.0)

    def items(self, quick: bool) -> list[Item]:
        return [Item((name,), partial(self._solve, name)) for name in self.choose_problems(quick)]

    def _solve(self, name: str, context: Context) -> Record:
        try:
            return self._solve_problem(name, context)
        except (ArithmeticError, RuntimeError) as error:  # one failure does not end the others
            nothing = dict.fromkeys(("estimated", "true", "residual", "seconds"), math.nan)
            failure = {"verdict": "failed", "warns": True, "advice": repr(error), "unknowns": {}}
            return {**failure, **nothing, "steps": 0}

    def _solve_problem(self, name: str, context: Context) -> Record:
        problem = PROBLEMS[name]()
        network = pde.network_for(problem, seed=context.seed)
        with warnings.catch_warnings(), count_cpu_seconds():
            warnings.simplefilter("ignore")
            solution = pde.solve(
                problem,
                network,
                budget=self.choose_seconds(context.quick),
                seed=context.seed,
                progress=False,
            )
            estimate = solution.check().estimate
        estimated = math.nan
        spread: Mapping[str, float] = {}
        if estimate is not None:
            estimated = estimate.error
            spread = estimate.spread
        return {
            "verdict": str(solution.verdict.name),
            "warns": solution.verdict.alarming,
            "advice": solution.stopped,
            "residual": solution.verdict.relative,
            "estimated": estimated,
            "true": measure_error(solution),
            "unknowns": _list_unknowns(name, solution.unknowns, spread),
            "seconds": solution.history.spent,
            "steps": len(solution.history),
        }

    def line(self, record: Record) -> str:
        numbers = f"estimated {record['estimated']:.1e}, true {record['true']:.1e}"
        return f"{record['verdict']}: {numbers}"

    def judge(self, results: Results) -> list[Check]:
        names = self.choose_problems(results.quick)
        records = list(chain.from_iterable(map(results.of, names)))
        solved = [record for record in records if record["true"] <= _GOOD_ERROR]
        silent = [
            record for record in records if record["true"] > _GOOD_ERROR and not record["warns"]
        ]
        numbers = f"{len(solved)} of {len(records)} solved, {len(silent)} wrong without a warning"
        checks = [Check(self.claim, not silent, numbers, of_paper=False)]
        unknowns = list(chain.from_iterable(record["unknowns"].values() for record in records))
        if unknowns:
            deviations = [_measure_deviation(unknown) for unknown in unknowns]
            claim = f"unknowns are within {_MOST_DEVIATIONS:g} standard errors"
            numbers = f"{max(deviations):.1f} at most"
            holds = max(deviations) <= _MOST_DEVIATIONS
            checks.append(Check(claim, holds, numbers, of_paper=False))
        return checks

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for name in self.choose_problems(results.quick):
            solved_seeds = [seed for seed in results.seeds if results.has(name, seed=seed)]
            for seed, record in zip(solved_seeds, results.of(name), strict=True):
                errors = [f"{record[key]:.1e}" for key in ("estimated", "true")]
                seconds = f"{record['seconds']:.0f}"
                advice = _describe_unknowns(record["unknowns"]) + record["advice"]
                rows.append([name, str(seed), record["verdict"], advice, *errors, seconds])
        columns = ["problem", "seed", "verdict", "advice", "estimated", "true", "seconds"]
        return [Table(columns, rows, "Verdicts and relative L² errors", text=4)]


def _list_unknowns(
    name: str, values: Mapping[str, float], spread: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return value, standard error and true value of each unknown whose true value is known."""
    unknowns = {}
    for unknown, true in TRUE_UNKNOWNS.get(name, {}).items():
        error = spread.get(unknown, math.nan)
        unknowns[unknown] = {"value": values[unknown], "error": error, "true": true}
    return unknowns


def _measure_deviation(unknown: Mapping[str, float]) -> float:
    """Return how many standard errors an unknown is from its true value; ∞ if none is known."""
    deviation = abs(unknown["value"] - unknown["true"]) / unknown["error"]
    if math.isnan(deviation):
        return math.inf
    return deviation


def _describe_unknowns(unknowns: Mapping[str, Mapping[str, float]]) -> str:
    words = [f"{name} = {u['value']:.5f} ± {u['error']:.1g}; " for name, u in unknowns.items()]
    return "".join(words)
