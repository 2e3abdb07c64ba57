"""What makes seeds slow: trust control of energy natural gradients, one setting at a time.

    pullback bench trust [--seeds 10] [--steps 400] [--only NAME ...] [--workers 2]

Poisson 2D, 2-32-1 tanh (129 parameters), float64; errors are relative L2. The table is the evidence
behind the defaults of `TargetRatio`: a first round around the target ratio 0.075 known from
elsewhere changes one thing at a time, a second one around 0.01 tries what the first suggested, and
rules that prefer a lower loss to a longer step.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pullback as pb
from pullback.grams import FactoredGram, Gram, Rows
from pullback.solvers import Path as DampingPath
from pullback.solvers import PseudoInverse, Sketched, Solution
from pullback.steps import Local, Move, TargetRatio

from ..framework.benchmark import RESULTS, Record, make_parser
from ..framework.timing import describe_machine

RECORD = RESULTS / "trust.json"


class Equilibrated(PseudoInverse):
    """The trust region in coordinates where all columns of A have the same length^power."""

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.power = power

    def init(self, gram: Gram) -> Any:
        assert isinstance(gram, FactoredGram)
        norms = gram.rows().norm(dim=0)
        self._scale = norms.clamp(min=1e-8 * float(norms.max())) ** self.power
        return super().init(Rows(gram.rows() / self._scale))

    def path(self, state: Any, rhs: Tensor, whitened: Tensor | None = None) -> DampingPath:
        scale = self._scale
        inner = super().path(state, rhs / scale, whitened)
        return DampingPath(inner.eigenvalues, inner.gamma, lambda c: inner.combine(c) / scale)

    def solve(
        self, state: Any, rhs: Tensor, damping: Any = None, *, whitened: Any = None
    ) -> Solution:
        path = self.path(state, rhs, whitened)
        return Solution(path.combine(path.gamma / path.eigenvalues), 0.0, state.rank)


class Greedy(TargetRatio):
    """The lowest loss instead of the largest radius, in some cases.

    Args:
        slack: among acceptable radii within this factor of the largest.
        drop: among all, where it lies below this share of the current loss.
    """

    def __init__(self, *, slack: float = 1.0, drop: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.slack = slack
        self.drop = drop

    def take(self, local: Local) -> Move:
        path = local.path()
        radius = local.state.get("radius", self.radius)
        assert path is not None
        assert local.lr is not None
        solution = local.direction(0.0)
        exponents = torch.linspace(-1, 1, self.radii, dtype=path.gamma.dtype)
        radii = radius * self.window**exponents
        dampings = path.damping_for(radii)
        losses = local.losses(path.at(dampings))
        ratios = (local.loss - losses) / path.predicted(dampings, local.lr)
        ratios = torch.where(torch.isfinite(ratios), ratios, -torch.inf)
        largest = int((ratios.cummin(0).values > self.target).sum()) - 1
        if largest < 0:
            local.state["radius"] = radius / self.window
            return Move(solution.x, 0.0, solution, False, None, "no radius is good")
        near = radii[: largest + 1] * self.slack >= radii[largest] * (1 - 1e-12)
        chosen = int(torch.where(near, losses[: largest + 1], torch.inf).argmin())
        if float(losses.min()) <= self.drop * local.loss:
            chosen = int(losses.argmin())
        x = path.at(dampings[chosen])
        damping = float(dampings[chosen])
        if damping > 0:
            local.state["radius"] = float(radii[chosen])
        else:
            local.state["radius"] = float(x.norm())
        return Move(x, 1.0, Solution(x, damping, solution.rank), True, float(losses[chosen]))


def ratio(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"step": TargetRatio(**options), "solver": PseudoInverse()}


def first(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"step": TargetRatio(target=0.075), "solver": PseudoInverse(), **options}


def greedy(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"step": Greedy(target=0.01, **options), "solver": PseudoInverse()}


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "0.075": first(),
    "0.075, radii 48": ratio(target=0.075, radii=48),
    "0.075, radii 96": ratio(target=0.075, radii=96),
    "0.075, window 1.5": ratio(target=0.075, window=1.5),
    "0.075, window 2": ratio(target=0.075, window=2.0),
    "0.075, radius 0.1": ratio(target=0.075, radius=0.1),
    "0.075, rcond 0": first(solver=PseudoInverse(rcond=0.0)),
    "0.075, rcond 1e-12": first(solver=PseudoInverse(rcond=1e-12)),
    "0.075, rcond 1e-10": first(solver=PseudoInverse(rcond=1e-10)),
    "0.075, equilibrated": first(solver=Equilibrated()),
    "0.075, half equilibrated": first(solver=Equilibrated(0.5)),
    "0.075, gauss points": first(sampler="gauss"),
    "0.075, sobol points": first(sampler="sobol"),
    "0.075, resample 25": first(sampler="sobol", resample=25),
    "0.075, rows sketched to 400": first(solver=Sketched(rows=400)),
    "0.15": ratio(target=0.15),
    "0.03": ratio(target=0.03),
    "0.01, rcond 0": lambda: {"solver": PseudoInverse(rcond=0.0)},
    "0.01, rcond 1e-15": lambda: {"solver": PseudoInverse(rcond=1e-15)},
    "0.01, rcond 1e-14": lambda: {"solver": PseudoInverse(rcond=1e-14)},
    "0.01, rcond 5e-14 (the defaults)": dict,
    "0.01, rcond max(n, p)·ε": lambda: {"solver": PseudoInverse()},
    "0.003": ratio(target=0.003),
    "0.0001": ratio(target=1e-4),
    "0.01, radii 48": ratio(target=0.01, radii=48),
    "0.01, lowest loss within 1.25": greedy(slack=1.25),
    "0.01, lowest loss within 2": greedy(slack=2.0),
    "0.01, lowest loss if a tenth": greedy(drop=0.1),
}


def run_variant(name: str, seed: int, steps: int) -> tuple[str, int, dict[str, Any]]:
    torch.set_num_threads(1)
    problem = pb.pde.Poisson(dim=2)
    network = pb.pde.mlp(2, 32, 1, seed=seed)
    points = {"equation": 900, "dirichlet": 120}
    options = {"points": points, "steps": steps, "progress": False, **VARIANTS[name]()}
    solution = pb.pde.solve(problem, network, **options)
    history = solution.history
    return (
        name,
        seed,
        {
            "error": solution.error,
            "best": min(history.error),
            "steps": len(history),
            "seconds": history.spent,
            "to 1e-6": history.seconds_to(1e-6),
            "to 1e-9": next(
                (m for m, e in zip(history.measured, history.error, strict=True) if e <= 1e-9), None
            ),
            "stopped": solution.stopped,
            "curve": [f"{e:.1e}" for e in history.error[::4]],
        },
    )


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    about = {"environment": describe_machine(torch.device("cpu"))}
    record = Record(options.out, about, key="runs", resume=False)
    results: dict[str, dict[int, Any]] = {name: {} for name in options.only}
    with ProcessPoolExecutor(options.workers) as pool:
        runs = product(options.only, range(options.seeds))
        jobs = [pool.submit(run_variant, name, seed, options.steps) for name, seed in runs]
        for job in as_completed(jobs):
            name, seed, run = job.result()
            results[name][seed] = run
            record.put(name, results[name])
            if len(results[name]) == options.seeds:
                print(line(name, list(results[name].values())), flush=True)


def line(name: str, runs: list[dict[str, Any]]) -> str:
    errors = sorted(r["error"] for r in runs)
    spent = statistics.median(r["seconds"] for r in runs)
    to = [r["to 1e-9"] or 9999 for r in runs]
    return (
        f"{name:24s} worst {errors[-1]:.1e}  median {statistics.median(errors):.1e}  "
        f"best {errors[0]:.1e}  steps to 1e-9 median {statistics.median(to):.0f}  {spent:.1f} s"
    )
