"""Poisson's equation in 10 and 100 dimensions with some 100,000 parameters and 20,000 points.

    pullback bench pde-large [--device cuda] [--only NAME ...] [--seconds 85] [--out FILE]

Steps are exact and damped, solved in the space of residuals: `Cholesky` of the kernel JJᵀ + λ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pullback import pde
from pullback.solvers import Cholesky
from pullback.steps import LevenbergMarquardt, Step

from ..framework.benchmark import Record, make_parser
from ..framework.timing import describe_machine

#: dimension, hidden layers, points inside and on the boundary, step
CASES: dict[str, tuple[int, tuple[int, ...], tuple[int, int], Step]] = {
    "10D, cautious steps": (10, (300, 300), (14_000, 6000), LevenbergMarquardt(1e-6)),
    "10D, long steps": (
        10, (300, 300), (14_000, 6000),
        LevenbergMarquardt(1e-2, decrease=1 / 16, target=0.01, tries=16),
    ),
    "100D, cautious steps": (100, (980,), (6000, 14_000), LevenbergMarquardt(1e-2)),
    "100D, long steps": (
        100, (980,), (6000, 14_000), LevenbergMarquardt(decrease=1 / 16, target=0.01),
    ),
}  # fmt: skip


def solve_case(name: str, device: str, seconds: float) -> dict[str, Any]:
    """Solve a case, as long as the budget lasts."""
    dim, hidden, (inside, outside), step = CASES[name]
    network = pde.mlp(dim, *hidden, 1, seed=0, activation="silu")
    solution = pde.solve(
        pde.Poisson(dim, boundary_weight=100), network, steps=1000, budget=seconds, device=device,
        points={"equation": inside, "dirichlet": outside}, sampler="sobol", progress=False,
        solver=Cholesky(), step=step, gram="kernel", memory=2**33, measure=5,
    )  # fmt: skip
    history = solution.history
    gibibytes = None
    if device == "cuda":
        gibibytes = torch.cuda.max_memory_allocated() / 2**30
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "residuals": inside + outside,
        "error": solution.error,
        "steps": len(history),
        "seconds": history.spent,
        "GiB": gibibytes,
        "stopped": solution.stopped,
        "curve": list(zip(history.clock, history.error, strict=True)),
    }


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    about = {"environment": describe_machine(torch.device(args.device))}
    record = Record(args.out, about, key="runs", resume=False)
    for name in args.only:
        run = solve_case(name, args.device, args.seconds)
        each = run["seconds"] / max(1, run["steps"])
        print(f"{name:22s} error {run['error']:.1e}  {run['steps']} steps of {each:.2f} s")
        record.put(name, run)
