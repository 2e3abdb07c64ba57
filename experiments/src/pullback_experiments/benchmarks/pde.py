"""The benchmark set of PDEs: error, steps and time of every set-up, beside what others report.

    pullback bench pde [--device cuda] [--only NAME ...] [--seeds 0 1] [--seconds 240]
                             [--parallel 1] [--out FILE]

Every run is a process of its own; with `--parallel` several share the device, so that times are
upper bounds. Results are merged into the file, run by run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import torch

from .. import problems
from ..framework.benchmark import RESULTS, Record, make_parser
from ..framework.timing import describe_machine
from ..pde_benchmarks.methods import GOALS, TARGETS

ERRORS = {**TARGETS, **GOALS}


def solve_once(name: str, seed: int, device: str, seconds: float | None) -> dict[str, Any]:
    if device != "cpu":
        torch.set_num_threads(1)
    setup = problems.setup(name)
    start = time.perf_counter()
    solution = setup.solve(seed, device=device, progress=False, budget=seconds)
    history = solution.history
    target = ERRORS.get(name)
    reached = None
    if target is not None and "slabs" not in setup.options:
        reached = history.seconds_to(target)
    elif target is not None and solution.error <= target:
        reached = history.spent  # the errors on the way are those of one slab
    stride = max(1, len(history.error) // 60)
    return {
        "name": name,
        "seed": seed,
        "problem": solution.problem.name,
        "parameters": sum(p.numel() for p in solution.network.parameters()),
        "error": solution.error,
        "target": target,
        "seconds to target": reached,
        "steps": len(history),
        "seconds": history.spent,
        "wall": time.perf_counter() - start,
        "loss": solution.loss,
        "stopped": solution.stopped,
        "curve": list(zip(history.measured, history.clock, history.error, strict=True))[::stride],
    }


def line(r: dict[str, Any]) -> str:
    target = r["target"]
    to = r["seconds to target"]
    if target is None:
        goal = ""
    elif to is None:
        goal = f"  target {target:.1e} missed"
    else:
        goal = f"  target {target:.1e} in {to:.0f} s"
    return (
        f"{r['name']:16s} seed {r['seed']}  p {r['parameters']:6d}  error {r['error']:.2e}  "
        f"{r['steps']:5d} steps  {r['seconds']:6.1f} s{goal}"
    )


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=list(ERRORS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    path = options.out or RESULTS / f"pde-{options.device}.json"
    about = {"environment": describe_machine(torch.device(options.device))}
    record = Record(path, about, key="runs")
    with ThreadPoolExecutor(options.parallel) as pool:
        jobs = []
        for seed, name in product(options.seeds, options.only):
            arguments = (name, seed, options.device, options.seconds)
            jobs.append(pool.submit(in_its_own_process, *arguments))
        for job in as_completed(jobs):
            run = job.result()
            if "failed" in run:  # one failed run does not take the others along
                print(f"{run['name']} seed {run['seed']}: {run['failed']}", flush=True)
                continue
            print(line(run), flush=True)
            record.put(f"{run['name']}/{run['seed']}", {**run, "parallel": options.parallel})


def in_its_own_process(name: str, seed: int, device: str, seconds: float | None) -> dict[str, Any]:
    arguments = (name, seed, device, seconds)
    module = "pullback_experiments.benchmarks.pde"
    call = (
        f"from {module} import solve_once as run; import json; print(json.dumps(run{arguments!r}))"
    )
    process = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip() or f"status {process.returncode}").splitlines()[-1]
        return {"name": name, "seed": seed, "failed": last}
    return json.loads(process.stdout.splitlines()[-1])
