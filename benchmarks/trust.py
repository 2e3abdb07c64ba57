"""What makes seeds slow: trust control of energy natural gradients, one setting at a time.

    python -m benchmarks.trust [--seeds 10] [--steps 400] [--only NAME ...] [--workers 2]

Poisson 2D, 2-32-1 tanh (129 parameters), float64. Every variant changes one thing of the defaults of
`pde.solve`; errors are relative L2. The table is the evidence behind the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pullback as pb
from pullback.grams import FactoredGram, Gram, Rows
from pullback.solvers import Path as DampingPath
from pullback.solvers import PseudoInverse, Sketched, Solution
from pullback.steps import TargetRatio

RESULTS = Path(__file__).parent / "results" / "trust.json"


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

    def solve(self, state: Any, rhs: Tensor, damping: Any = None, *, whitened: Any = None) -> Solution:
        path = self.path(state, rhs, whitened)
        return Solution(path.combine(path.gamma / path.eigenvalues), 0.0, state.rank)


def ratio(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"step": TargetRatio(**options)}


def solver(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"solver": make()}


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "defaults": dict,
    "radii 12": ratio(radii=12),
    "radii 24": ratio(radii=24),
    "radii 48": ratio(radii=48),
    "radii 96": ratio(radii=96),
    "window 1.5": ratio(window=1.5),
    "window 2": ratio(window=2.0),
    "window 10": ratio(window=10.0),
    "window 10, radii 96": ratio(window=10.0, radii=96),
    "target 0.01": ratio(target=0.01),
    "target 0.15": ratio(target=0.15),
    "target 0.3": ratio(target=0.3),
    "radius 0.1": ratio(radius=0.1),
    "radius 10": ratio(radius=10.0),
    "rcond 0": solver(lambda: PseudoInverse(rcond=0.0)),
    "rcond 1e-14": solver(lambda: PseudoInverse(rcond=1e-14)),
    "rcond 1e-12": solver(lambda: PseudoInverse(rcond=1e-12)),
    "rcond 1e-10": solver(lambda: PseudoInverse(rcond=1e-10)),
    "equilibrated": solver(Equilibrated),
    "half equilibrated": solver(lambda: Equilibrated(0.5)),
    "single 20": lambda: {"single": 20},
    "single 50": lambda: {"single": 50},
    "gauss points": lambda: {"sampler": "gauss"},
    "sobol points": lambda: {"sampler": "sobol"},
    "resample 1": lambda: {"sampler": "sobol", "resample": 1},
    "resample 25": lambda: {"sampler": "sobol", "resample": 25},
    "points x4": lambda: {"points": {"equation": 3600, "dirichlet": 480}},
    "rows sketched to 400": solver(lambda: Sketched(rows=400)),
    "columns sketched to 96": solver(lambda: Sketched(columns=96)),
}


def one(name: str, seed: int, steps: int) -> tuple[str, int, dict[str, Any]]:
    torch.set_num_threads(1)
    problem = pb.pde.Poisson(dim=2)
    network = pb.pde.mlp(2, 32, 1, seed=seed)
    found = pb.pde.solve(problem, network, steps=steps, progress=False, **VARIANTS[name]())
    history = found.history
    return name, seed, {
        "error": found.error,
        "best": min(history.error),
        "steps": len(history),
        "seconds": history.spent,
        "to 1e-6": history.seconds_to(1e-6),
        "to 1e-9": next((m for m, e in zip(history.measured, history.error) if e <= 1e-9), None),
        "stopped": found.stopped,
        "curve": [f"{e:.1e}" for e in history.error[::4]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    results: dict[str, dict[int, Any]] = {name: {} for name in given.only}
    with ProcessPoolExecutor(given.workers) as pool:
        jobs = [
            pool.submit(one, name, seed, given.steps)
            for name in given.only
            for seed in range(given.seeds)
        ]
        for job in as_completed(jobs):
            name, seed, found = job.result()
            results[name][seed] = found
            given.out.write_text(json.dumps({"torch": torch.__version__, "runs": results}, indent=1))
            if len(results[name]) == given.seeds:
                print(line(name, list(results[name].values())), flush=True)


def line(name: str, runs: list[dict[str, Any]]) -> str:
    errors = sorted(r["error"] for r in runs)
    spent = statistics.median(r["seconds"] for r in runs)
    to = [r["to 1e-9"] or 9999 for r in runs]
    return (
        f"{name:24s} worst {errors[-1]:.1e}  median {statistics.median(errors):.1e}  "
        f"best {errors[0]:.1e}  steps to 1e-9 median {statistics.median(to):.0f}  {spent:.1f} s"
    )


if __name__ == "__main__":
    main()
