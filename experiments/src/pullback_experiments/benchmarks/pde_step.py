"""What a step of `pde.solve` costs on one core, and which of its stages takes the time.

    pullback bench pde-step [--parameters 500 1000 2000 5000] [--steps 3] [--out FILE]

Poisson's equation on the square, a network of two hidden layers, four points per parameter, and the
defaults of `pde.solve`. Seconds are CPU seconds of the process; the first step, which verifies the
rows, is left out.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pullback import pde
from pullback.optim import natural_gradient
from pullback.optim.objective import ObjectiveProblem
from pullback.solvers import PseudoInverse, Sketched

from ..framework.benchmark import RESULTS, Record, make_parser
from ..framework.timing import describe_machine


class Stopwatch:
    """CPU seconds of functions, by stage of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its seconds added to a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[stage] += time.process_time() - start

        return timed


def choose_width(parameters: int) -> int:
    """Return the width of two hidden layers that have about so many parameters."""
    return round((parameters + 5) ** 0.5 - 2.5)


def measure_step(parameters: int, steps: int) -> dict[str, Any]:
    """Return the median CPU seconds of a step, and of its stages."""
    width = choose_width(parameters)
    network = pde.mlp(2, width, width, 1, seed=0)
    count = sum(p.numel() for p in network.parameters())
    stopwatch = Stopwatch()
    timeline: list[dict[str, float]] = []

    def record_times(run: Any, info: Any) -> None:
        timeline.append({**stopwatch.seconds, "all": time.process_time()})

    stages = [
        (ObjectiveProblem, "evaluate", "derivatives and rows"),
        (ObjectiveProblem, "losses", "trial points"),
        (natural_gradient, "assemble_stack", "assembly"),
        (PseudoInverse, "init", "factorization"),
        (Sketched, "init", "sketch and factorization"),
    ]
    with ExitStack() as stack:
        for owner, name, stage in stages:
            timed = stopwatch.wrap(stage, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed))
        options = {
            "points": 4 * count,
            "steps": steps + 1,
            "callbacks": [record_times],
            "measure": 1000,
        }
        pde.solve(pde.Poisson(2), network, progress=False, refine=None, **options)
    medians: dict[str, float] = {}
    for stage in timeline[-1]:
        pairs = pairwise(timeline)
        medians[stage] = statistics.median(b[stage] - a.get(stage, 0.0) for a, b in pairs)
    return {"parameters": count, "residuals": 5 * count, "seconds": medians}


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--parameters", nargs="*", type=int, default=[500, 1000, 2000, 5000])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "pde-step.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    about = {"environment": f"{describe_machine(torch.device('cpu'))}, one thread, float64"}
    record = Record(options.out, about, key="sizes")
    for parameters in options.parameters:
        result = measure_step(parameters, options.steps)
        record.put(str(parameters), result)
        stages = ", ".join(f"{stage} {value:.2f}" for stage, value in result["seconds"].items())
        print(f"p = {result['parameters']}: CPU seconds a step: {stages}", flush=True)
