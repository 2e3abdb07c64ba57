"""The experiment: verdict, estimated and true error of every problem and seed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
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
from .problems import KINDS, PROBLEMS

#: verdicts that call a solution good
_GOOD = ("converged",)


@dataclass(frozen=True)
class Limits:
    """From which sizes on errors count."""

    #: a true error above so many estimated ones was not seen
    silent_ratio: float = 10.0
    #: fields below this share of the largest one are zero but for round-off, and are not judged
    zero_share: float = 1e-12


_LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class Honesty(ProblemSetExperiment):
    """The table of estimated against true errors.

    Attributes:
        problems, quick_problems: names.
        seconds, quick_seconds: of every solve.
        steps: of every solve, at most.
    """

    name: str = "pde-honesty"
    paper: str = "Errors without a known solution"
    figure: str = "estimated and true errors"
    claim: str = "No solution that is called converged has ten times its estimated error"
    about: str = (
        "Every problem is solved by defaults within the same seconds on one thread; a good part "
        "of them is not solved then. Estimates of these are shown too."
    )
    problems: Sequence[str] = tuple(PROBLEMS)
    quick_problems: Sequence[str] = ("bratu", "total-mass", "unlike-sizes")
    seconds: float = 60.0
    quick_seconds: float = 5.0
    steps: int = 400
    seeds: Sequence[int] = (11, 12)
    open_parts: frozenset[str] = frozenset({"problems"})
    anywhere: bool = False

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "problems": {name: _find_kind(name) for name in self.choose_problems(quick)},
            "seconds": self.choose_seconds(quick),
            "steps": self.steps,
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, quick_problems=("bratu",), quick_seconds=0.5)

    def items(self, quick: bool) -> list[Item]:
        return [Item((name,), partial(self._solve, name)) for name in self.choose_problems(quick)]

    def _solve(self, name: str, context: Context) -> Record:
        try:
            return self._solve_problem(name, context)
        except (
            ArithmeticError,
            RuntimeError,
        ) as error:  # others go on
            nothing = dict.fromkeys(("estimated", "true", "residual", "seconds"), math.nan)
            return {"verdict": "failed", **nothing, "steps": 0, "stopped": repr(error)}

    def _solve_problem(self, name: str, context: Context) -> Record:
        problem = PROBLEMS[name]()
        network = pde.network_for(problem, seed=context.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution = pde.solve(
                problem,
                network,
                steps=self.steps,
                budget=self.choose_seconds(context.quick),
                seed=context.seed,
                progress=False,
            )
            estimated = solution.verdict.estimated
            if estimated is None:
                estimate = solution.check().estimate
                estimated = math.nan
                if estimate is not None:
                    estimated = estimate.error
        return {
            "verdict": str(solution.verdict.name),
            "estimated": estimated,
            "true": measure_error(solution),
            "residual": solution.verdict.relative,
            "seconds": solution.history.spent,
            "steps": len(solution.history),
            "stopped": solution.stopped,
            "tried": list(solution.verdict.tried),
            "unknowns": solution.unknowns,
            "has_many_states": solution.verdict.has_many_states,
        }

    def line(self, record: Record) -> str:
        numbers = f"estimated {record['estimated']:.1e}, true {record['true']:.1e}"
        return f"{record['verdict']}: {numbers}"

    def judge(self, results: Results) -> list[Check]:
        records = list(chain.from_iterable(map(results.of, self.choose_problems(results.quick))))
        good = [record for record in records if record["verdict"] in _GOOD]
        silent = [record for record in good if is_silent(record)]
        count = f"{len(silent)} of {len(good)} that are called converged, of {len(records)} solves"
        return [Check(self.claim, not silent, count, of_paper=False)]

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for name in self.choose_problems(results.quick):
            solved_seeds = [seed for seed in results.seeds if results.has(name, seed=seed)]
            for seed, record in zip(solved_seeds, results.of(name), strict=True):
                numbers = [f"{record[key]:.1e}" for key in ("residual", "estimated", "true")]
                seconds = f"{record['seconds']:.0f}"
                rows.append(
                    [name, _find_kind(name), str(seed), record["verdict"], *numbers, seconds]
                )
        columns = ["problem", "", "seed", "verdict", "residual", "estimated", "true", "seconds"]
        return [Table(columns, rows, "Estimated and true relative L² errors", text=4)]


def _find_kind(name: str) -> str:
    """Return what a problem was chosen for."""
    return next(kind for kind, problems in KINDS.items() if name in problems)


def measure_error(solution: pde.PDESolution) -> float:
    """Return the largest true error: of all fields together, and of each that is not zero."""
    problem = solution.problem
    quadrature = problem.domain.quadrature()
    sizes = problem.truth(quadrature.x).square().mean(0).sqrt()
    errors = [solution.error]
    for size, error in zip(sizes.tolist(), solution.errors.values(), strict=True):
        if size > _LIMITS.zero_share * float(sizes.max()):
            errors.append(error)
    return max(errors)


def is_silent(record: Record) -> bool:
    """Return True if an error is more than ten times what it was estimated as.

    An error that is said to be unknown is not silent.
    """
    if math.isnan(record["estimated"]):
        return False
    return record["true"] > _LIMITS.silent_ratio * record["estimated"]
