"""The experiment: the error of every seed, with the given network alone and with others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Self

from torch import nn

from pullback import pde
from pullback.pde.catalog.setup import fully_connected

from ..framework.check import Check
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from ..problems import AllenCahn, KdV


class Method(StrEnum):
    """How a problem is solved."""

    ALONE = "alone"
    STRATEGY = "strategy"


@dataclass(frozen=True)
class SeedProblem:
    """A problem whose seeds are tried.

    Attributes:
        setup: builds the problem with its network and options.
        target: error at which a solve ends; that of the tuned record for tuned set-ups.
        methods: in which it is solved.
        seconds: of a solve at most, all networks that are tried together.
    """

    setup: Callable[[], pde.Setup]
    target: float
    methods: tuple[Method, ...] = (Method.STRATEGY,)
    seconds: float = 150.0


def _small_kdv() -> pde.Setup:
    def network(seed: int) -> nn.Module:
        waves = pde.PeriodicEmbedding(2, 0, 2.0, harmonics=3)
        return nn.Sequential(waves, *pde.mlp(7, 16, 16, 1, seed=seed))

    options = {
        "points": {"equation": 1500, "initial": 200, "periodic": 16},
        "sampler": "sobol",
        "slabs": [0.25, 0.35, 0.45, 0.6, 0.8],
        "steps": 100,
        "patience": 30,
    }
    return pde.Setup(KdV(initial_weight=100), network, options)


PROBLEMS: dict[str, SeedProblem] = {
    "burgers": SeedProblem(
        lambda: fully_connected(
            pde.Burgers(0.01 / math.pi, hard=True), 2, 16, 16, 16, 1, parity=-1,
            points=2500, sampler="sobol", refine=pde.Refine(every=30, until=120), steps=300,
        ),
        1e-4,
        (Method.STRATEGY, Method.ALONE),
    ),
    "allen-cahn": SeedProblem(
        lambda: fully_connected(
            AllenCahn(hard=True), 3, 16, 16, 16, 1, parity=1,
            points=2500, sampler="sobol", steps=300,
        ),
        1e-3,
    ),
    "kdv": SeedProblem(_small_kdv, 1e-2),
    "poisson5d": SeedProblem(lambda: pde.setup("poisson5d"), 3.5e-8, seconds=375.0),
    "heat4d": SeedProblem(lambda: pde.setup("heat4d"), 4e-7, seconds=375.0),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class UnseenSeeds(Experiment):
    """The table of seeds.

    Attributes:
        problems, quick_problems: names.
        quick_seconds, quick_target: of every solve in the short version.
        most_ratio: of the strategy's time to that of all steps of one network.
    """

    name: str = "pde-unseen-seeds"
    paper: str = "Seeds that get stuck"
    figure: str = "errors of twenty seeds"
    claim: str = "Every seed reaches the target"
    about: str = "On one thread. A solve ends when its error is at the target."
    problems: Sequence[str] = tuple(PROBLEMS)
    quick_problems: Sequence[str] = ("poisson5d",)
    quick_seconds: float = 30.0
    quick_target: float = 0.1
    most_ratio: float = 2.0
    seeds: Sequence[int] = tuple(range(13, 33))
    open_parts: frozenset[str] = frozenset({"problems"})
    anywhere: bool = False

    def config(self, quick: bool) -> dict[str, Any]:
        return {"problems": {name: self._target(name, quick) for name in self._problems(quick)}}

    def _target(self, name: str, quick: bool) -> float:
        return self.quick_target if quick else PROBLEMS[name].target

    def _problems(self, quick: bool) -> Sequence[str]:
        if quick:
            return self.quick_problems
        return self.problems

    def smoke(self) -> Self:
        return replace(self, judged=False, quick_seconds=0.5)

    def items(self, quick: bool) -> list[Item]:
        items = []
        for name in self._problems(quick):
            for method in PROBLEMS[name].methods:
                items.append(Item((name, method), partial(self._solve, name, method)))
        return items

    def _solve(self, name: str, method: Method, context: Context) -> Record:
        problem = PROBLEMS[name]
        options: dict[str, Any] = {"progress": False}
        options["tol"] = self._target(name, context.quick)
        options["budget"] = self.quick_seconds if context.quick else problem.seconds
        if method is Method.ALONE:
            options["patience"] = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                solution = problem.setup().solve(context.seed, **options)
            except (ArithmeticError, RuntimeError) as error:  # one failure does not end the others
                nothing = {"verdict": "failed", "tried": [], "stopped": repr(error)}
                return {"error": math.inf, "seconds": math.nan, "steps": 0, **nothing}
        history = solution.history
        return {
            "error": solution.error,
            "verdict": str(solution.verdict.name),
            "tried": list(solution.verdict.tried),
            "seconds": history.spent,
            "steps": len(history),
            "stopped": solution.stopped,
            "validated": history.validated,
            "fresh": history.fresh_loss,
        }

    def line(self, record: Record) -> str:
        tried = f"{len(record['tried'])} tried"
        return f"{record['verdict']}, error {record['error']:.1e}, {record['steps']} steps, {tried}"

    def judge(self, results: Results) -> list[Check]:
        checks = []
        for name in self._problems(results.quick):
            target = self._target(name, results.quick)
            records = results.of(name, Method.STRATEGY)
            errors = [record["error"] for record in records]
            solved = sum(error <= target for error in errors)
            claim = f"{name}: every seed has an error of at most {target:g}"
            numbers = f"{solved} of {len(errors)}, the worst {max(errors):.1e}"
            checks.append(Check(claim, solved == len(errors), numbers, of_paper=False))
            if Method.ALONE in PROBLEMS[name].methods:
                checks.append(self._compare_seconds(name, results))
        return checks

    def _compare_seconds(self, name: str, results: Results) -> Check:
        """Return whether the strategy's slowest seed takes twice all steps of a network at most.

        The longest solve by one network alone is one that is stuck, and takes all its steps.
        """
        longest = max(record["seconds"] for record in results.of(name, Method.ALONE))
        slowest = max(record["seconds"] for record in results.of(name, Method.STRATEGY))
        claim = f"{name}: no seed takes {self.most_ratio:g} times all steps of one network"
        numbers = f"the slowest {slowest:.0f} s, all steps {longest:.0f} s"
        return Check(claim, slowest <= self.most_ratio * longest, numbers, of_paper=False)

    def tables(self, results: Results) -> list[Table]:
        columns: list[tuple[str, Method]] = []
        for name in self._problems(results.quick):
            columns += [(name, method) for method in PROBLEMS[name].methods]
        by_column = [results.of(*column) for column in columns]
        rows = []
        for number, seed in enumerate(results.seeds):
            records = [column[number] for column in by_column]
            cells = [f"{r['error']:.1e} ({r['seconds']:.0f} s)" for r in records]
            rows.append([str(seed), *cells])
        heading = [f"{name}, {method}" for name, method in columns]
        return [Table(["seed", *heading], rows, "Relative L² errors")]
