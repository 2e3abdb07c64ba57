"""Every ready problem by `solve(problem, network_for(problem))`, with nothing tuned; and by set-up.

    pullback bench pde-defaults [--problems a,b] [--seeds 0,1 | 0-49] [--tuned]
                                      [--workers 2] [--threads 2] [--budget 500] [--ends 600]
                                      [--device cpu] [--options JSON] [--hidden SIZES] [--balanced]
                                      --out FILE

Problems have the names of `pullback list`. By default they are as their classes make them, without
hard conditions or weights, and the network is `network_for(problem, seed=seed)` (in float32 for
`burgers-single`). With --tuned they are solved by `setup(name).solve(seed)` instead. The only
option that is given is the budget in seconds. For choosing other defaults there are --options
'{"slabs": "auto"}', --hidden 16,16,16 (tanh layers instead of those of `network_for`) and
--balanced, which weighs boundary and initial conditions against the equations.

Every run is a process of its own. The file is written after each, so that a run which is killed
costs itself alone; runs that it holds already are not repeated. No run begins that could not use
its budget before --ends, in seconds from the start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pullback as pb
from pullback import pde
from pullback.pde.networks.modules import Slabs

from .. import problems
from ..framework.benchmark import make_parser, write_record
from ..framework.timing import describe_machine
from ..pde_benchmarks.methods import TARGETS

#: as a user would write them who has read nothing about weights and hard conditions
PROBLEMS: dict[str, Callable[[], pde.Problem]] = {
    "poisson100d": lambda: pde.Poisson(100),
    "poisson10d": lambda: pde.Poisson(10),
    "poisson100d-separable": lambda: pde.Poisson(100),
    "poisson10d-separable": lambda: pde.Poisson(10),
    "heat10d": lambda: pde.Heat(10),
    "fokker-planck": lambda: pde.LogFokkerPlanck(),
    "fokker-planck10d": lambda: pde.LogFokkerPlanck(10),
    "cavity-400": lambda: problems.Cavity(400.0),
    "cavity-1000": lambda: problems.Cavity(1000.0),
    "wave-long": lambda: pde.Wave(time=5.0),
    "multiscale": lambda: pde.Multiscale(),
    "cavity": lambda: problems.Cavity(),
    "kovasznay": lambda: pde.Kovasznay(),
    "kuramoto-sivashinsky": lambda: problems.KuramotoSivashinsky(),
    "gray-scott": lambda: problems.GrayScott(),
    "schroedinger": lambda: pde.Schroedinger(),
    "kdv": lambda: problems.KdV(),
    "allen-cahn": lambda: problems.AllenCahn(),
    "burgers": lambda: pde.Burgers(),
    "burgers-smooth": lambda: pde.Burgers(0.01),
    "wave": lambda: pde.Wave(),
    "convection": lambda: pde.Convection(),
    "poisson5d": lambda: pde.Poisson(5),
    "heat4d": lambda: pde.Heat(4),
    "helmholtz": lambda: pde.Helmholtz(),
    "heat1d": lambda: pde.Heat(),
    "poisson2d": lambda: pde.Poisson(),
    "burgers-single": lambda: pde.Burgers(0.01),
    "ritz": lambda: pde.Ritz1D(),
}
#: errors that every seed of a set-up is to reach
GOALS = {**TARGETS, "poisson2d": 1e-11}
_SINGLE = ("burgers-single",)


def network(problem: pde.Problem, name: str, seed: int, hidden: Sequence[int] = ()) -> nn.Module:
    """Return the network that a user would be given, or one with other hidden layers."""
    default_network = pde.network_for(problem, seed=seed)
    if hidden:
        inner = list(default_network.get_submodule("network").children())
        first = next(m for m in inner if isinstance(m, nn.Linear))
        sizes = first.in_features, *hidden, len(problem.fields)
        embeddings = [m for m in inner if isinstance(m, pde.PeriodicEmbedding)]
        default_network.network = nn.Sequential(*embeddings, *pde.mlp(*sizes, seed=seed))
    if name in _SINGLE:
        return default_network.float()
    return default_network


def balance_conditions(problem: pde.Problem) -> None:
    """Let the weights of boundary and initial conditions, and of no others, be chosen."""
    for condition in problem.conditions:
        is_data = isinstance(condition, (pde.Dirichlet, pde.Initial, pde.Periodic))
        condition.balanced = is_data


def run_once(
    name: str,
    seed: int,
    threads: int,
    tuned: bool,
    balanced: bool,
    hidden: Sequence[int],
    options: dict[str, Any],
) -> dict[str, Any]:
    """A run and everything that it says of itself."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if tuned:
            solution = problems.setup(name).solve(seed, progress=False, **options)
        else:
            problem = PROBLEMS[name]()
            if balanced:
                balance_conditions(problem)
            fresh = network(problem, name, seed, hidden)
            solution = pde.solve(problem, fresh, seed=seed, progress=False, **options)
    history = solution.history
    verdict = solution.verdict
    solved = time.perf_counter() - start
    check = solution.check()
    estimated = None
    affine = None
    if check.estimate is not None:
        estimated = check.estimate.error
        affine = check.estimate.affine
    stride = max(1, len(history.error) // 60)
    if isinstance(solution.network, Slabs):
        slabs = len(solution.network.networks)
    else:
        slabs = 1
    return {
        "name": name,
        "seed": seed,
        "tuned": tuned,
        "target": GOALS.get(name),
        "options": options,
        "hidden": hidden,
        "weights": solution.weights,
        "problem": solution.problem.name,
        "parameters": sum(p.numel() for p in solution.network.parameters()),
        "slabs": slabs,
        "threads": threads,
        "error": solution.error,
        "loss": solution.loss,
        "own": verdict.training_loss,
        "fresh": verdict.fresh_loss,
        "relative": verdict.relative,
        "verdict": verdict.name,
        "stopped": solution.stopped,
        "warnings": [str(w.message) for w in said if issubclass(w.category, UserWarning)],
        "estimated": estimated,
        "affine": affine,
        "residuals": {n: asdict(r) for n, r in check.residuals.items()},
        "check": str(check),
        "steps": len(history),
        "moved": list(history.moved),
        "restarted": list(history.restarted),
        "seconds": history.spent,
        "solved in": solved,
        "wall": time.perf_counter() - start,
        "curve": list(zip(history.measured, history.clock, history.error, strict=True))[::stride],
    }


def run_in_process(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the record of a run in a process of its own, or the reason of a failure."""
    module = "pullback_experiments.benchmarks.pde_defaults"
    call = f"from {module} import run_once; import json; print(json.dumps(run_once{arguments}))"
    threads = {n: str(arguments[2]) for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    process = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, env={**os.environ, **threads}
    )
    if process.returncode:
        last = (process.stderr.strip() or f"status {process.returncode}").splitlines()[-1]
        return {"name": arguments[0], "seed": arguments[1], "failed": last}
    return json.loads(process.stdout.splitlines()[-1])


def line(r: dict[str, Any]) -> str:
    """Return the line that is printed about a run."""
    if r["estimated"] is None:
        estimated = ""
    else:
        estimated = f"  estimated {r['estimated']:.0e}"
    warned = " " * len("warned")
    if r["warnings"]:
        warned = "warned"
    return (
        f"{r['name']:16s} seed {r['seed']:2d}  p {r['parameters']:6,d}  error {r['error']:.1e}"
        f"{estimated}  residual {r['relative']:.0e}  {r['verdict'] or '–':11s} "
        f"{warned}  {r['steps']:4d} steps  {r['seconds']:5.0f} s"
    )


def seeds(text: str) -> list[int]:
    """Return the seeds of "0,3" or "0-49"."""
    first, _, last = text.partition("-")
    if last:
        return list(range(int(first), int(last) + 1))
    return [int(s) for s in text.split(",")]


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--problems", type=lambda t: t.split(","), default=list(PROBLEMS))
    parser.add_argument("--seeds", type=seeds, default=[0])
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=500.0)
    parser.add_argument("--ends", type=float, default=float("inf"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--hidden", type=seeds, default=[])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)  # which the environment states
    end = time.monotonic() + asked.ends
    if asked.out.exists():
        runs = json.loads(asked.out.read_text())["runs"]
    else:
        runs = {}
    where = {
        "environment": describe_machine(torch.device(asked.device)),
        "version": pb.__version__,
        "workers": asked.workers,
    }

    def begin(name: str, seed: int) -> dict[str, Any]:
        # imports, references and the check take up to 45 seconds beside the budget
        if time.monotonic() + asked.budget + 45.0 > end:
            return {"name": name, "seed": seed, "failed": "no time is left, call again"}
        options = {"device": asked.device, "budget": asked.budget, **asked.options}
        how = asked.threads, asked.tuned, asked.balanced, asked.hidden
        return run_in_process((name, seed, *how, options))

    with ThreadPoolExecutor(asked.workers) as pool:
        missing = [p for p in product(asked.problems, asked.seeds) if f"{p[0]}/{p[1]}" not in runs]
        for job in as_completed([pool.submit(begin, name, seed) for name, seed in missing]):
            run = job.result()
            if "failed" in run:  # one failed run does not take the others along
                print(f"{run['name']} seed {run['seed']}: {run['failed']}", flush=True)
                continue
            runs[f"{run['name']}/{run['seed']}"] = run
            print(line(run), flush=True)
            write_record(asked.out, {**where, "runs": runs})
