"""Poisson's equation by `pde.solve` and by the reference algorithm of the energy natural gradient.

    pullback bench poisson [--seeds 0-9] [--steps 400] [--out FILE]

u* = sin πx sin πy on [0, 1]², mlp(2, 32, 1) (129 parameters), float64 on the CPU. Both start from
the same network, see the same points and are measured every ten steps by the same rule. Ours runs
with the defaults of `pde.solve`; `reference_engd` says what the other is. It gets 500 steps, but
not more than 20 times our seconds. The two take turns: after each of our steps the reference steps
until it has had as many seconds, so that what else the machine does meets both. CPU seconds (of
the process, all threads) are kept beside those of the wall.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback import pde
from pullback.pde.discretization.plan import SamplingPlan
from pullback.pde.judgement.yardstick import Yardstick
from pullback.steps import TargetRatio

from ..framework.benchmark import RESULTS, make_parser, write_record
from ..framework.timing import describe_machine
from .reference_engd import Reference

RECORD = RESULTS / "poisson.json"
TARGETS = (1e-6, 1e-9)


@dataclass(frozen=True)
class RaceLimits:
    """When the reference stops, and how often errors are measured."""

    #: steps of the reference, at most
    reference_steps: int = 500
    #: the reference may take so many times our seconds
    patience: float = 20.0
    #: steps between two measurements of the error
    measure_every: int = 10


LIMITS = RaceLimits()


def source(x: Tensor) -> Tensor:
    return 2 * math.pi**2 * torch.sin(math.pi * x).prod(1)


def poisson() -> pde.Problem:
    equation = pde.Equation(lambda u, points: u.laplacian + source(points))
    return pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [equation, pde.Dirichlet(0.0)],
        exact=lambda points: torch.sin(math.pi * points).prod(1),
        name="Poisson 2D",
    )


@dataclass
class Clock:
    """Seconds of the wall and of the CPU that some work took, and the errors on the way."""

    wall: float = 0.0
    cpu: float = 0.0
    steps: int = 0
    entries: list[tuple[float, float, float]] = field(default_factory=list)

    def time(self, work: Callable[[], Any]) -> Any:
        wall = time.perf_counter()
        cpu = time.process_time()
        out = work()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        return out

    def add_measurement(self, error: float) -> None:
        self.entries.append((self.wall, self.cpu, error))

    def report(self) -> dict[str, Any]:
        def first(target: float, which: int) -> float | None:
            return next((e[which] for e in self.entries if e[2] <= target), None)

        return {
            "error": self.entries[-1][2],
            "steps": self.steps,
            "seconds": self.wall,
            "CPU seconds": self.cpu,
            "seconds to": {f"{t:g}": first(t, 0) for t in TARGETS},
            "CPU seconds to": {f"{t:g}": first(t, 1) for t in TARGETS},
        }


class Rival:
    """The reference on its clock."""

    def __init__(self, seed: int, steps: int) -> None:
        network = pde.mlp(2, 32, 1, seed=seed)
        self._reference = make_reference(network, seed)
        self._steps = steps
        yardstick = Yardstick(poisson(), next(network.parameters()))
        self._error = lambda: yardstick.error(network)
        self.clock = Clock()
        self.clock.add_measurement(self._error())

    def until(self, seconds: float) -> None:
        """Step until so many seconds of the wall are spent."""
        clock = self.clock
        while clock.wall < seconds and clock.steps < self._steps:
            clock.time(self._reference.step)
            clock.steps += 1
            if clock.steps % LIMITS.measure_every == 0 or clock.steps == self._steps:
                clock.add_measurement(self._error())


def race(seed: int, steps: int, reference_steps: int) -> dict[str, Any]:
    rival = Rival(seed, reference_steps)
    clock = Clock()
    network = pde.mlp(2, 32, 1, seed=seed)
    mark = time.process_time()

    def turn(run: pde.Run, info: Any) -> None:
        nonlocal mark
        history = run.history
        clock.cpu += time.process_time() - mark  # with the measuring, which is a few milliseconds
        clock.wall = history.spent
        clock.steps = len(history)
        if history.measured[-1] == len(history):
            clock.add_measurement(history.error[-1])
        rival.until(clock.wall)
        mark = time.process_time()

    solution = pde.solve(
        poisson(),
        network,
        steps=steps,
        seed=seed,
        measure=LIMITS.measure_every,
        callbacks=[turn],
        progress=False,
    )
    clock.add_measurement(solution.error)
    rival.until(LIMITS.patience * clock.wall)
    return {
        "ours": {**clock.report(), "stopped": solution.stopped},
        "reference": rival.clock.report(),
    }


def make_reference(network: Any, seed: int, **options: Any) -> Reference:
    """Return the reference at the points that `pde.solve` uses."""
    problem = poisson()
    size = sum(p.numel() for p in network.parameters())
    plan = SamplingPlan(problem, size, seed=seed)
    sites = plan.draw(0)
    inside, boundary = (sites[c.name][0] for c in problem.conditions)
    return Reference(network, inside, boundary, source, **options)


def per_step(products: bool, steps: int = 10) -> float:
    """Return the CPU seconds of a reference step from a fresh network."""
    run = make_reference(pde.mlp(2, 32, 1, seed=0), 0, products=products)
    run.step()
    start = time.process_time()
    for _ in range(steps):
        run.step()
    return (time.process_time() - start) / steps


def summarize_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of the errors and times of one method over its seeds."""
    errors = [run["error"] for run in runs]
    row: dict[str, Any] = {
        "runs": len(runs),
        "median error": statistics.median(errors),
        "worst error": max(errors),
        "CPU ms per step": 1e3 * statistics.median(r["CPU seconds"] / r["steps"] for r in runs),
        "at most": {f"{target:g}": count_at_most(errors, target) for target in TARGETS},
        "never at 1e-06": sum(run["seconds to"]["1e-06"] is None for run in runs),
    }
    for clock in ("seconds", "CPU seconds"):
        times = [seconds_to_target(run, clock) for run in runs]
        row[f"median {clock} to 1e-06"] = statistics.median(times)
    return row


def count_at_most(errors: Sequence[float], target: float) -> int:
    """Return how many of the errors are at most the target."""
    return sum(error <= target for error in errors)


def seconds_to_target(run: Mapping[str, Any], clock: str) -> float:
    """Return the seconds until the error was 1e-6; a run that never got there took all its time."""
    seconds = run[f"{clock} to"]["1e-06"]
    if seconds is None:
        return run[clock]
    return seconds


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of both methods, and the ratio of their times to an error of 1e-6."""
    out: dict[str, Any] = {}
    for name in ("ours", "reference"):
        out[name] = summarize_runs([run[name] for run in runs.values()])
    for clock in ("seconds", "CPU seconds"):
        key = f"median {clock} to 1e-06"
        out[f"ratio of {key}"] = out["reference"][key] / out["ours"][key]
    return out


def format_race(seed: str, run: dict[str, Any]) -> str:
    def one(name: str) -> str:
        r = run[name]
        to = r["seconds to"]["1e-06"]
        if to is None:
            reached = "never at 1e-6"
        else:
            reached = f"1e-6 after {to:.1f} s"
        return f"{name} {r['error']:.1e} in {r['steps']} steps, {r['seconds']:.1f} s, {reached}"

    return f"seed {seed}: {one('ours')}; {one('reference')}"


def parse_seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--seeds", default="0-9", help="one, or the first and the last")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--reference-steps", type=int, default=LIMITS.reference_steps)
    parser.add_argument("--out", type=Path, default=RECORD, help="finished seeds are kept")
    options = parser.parse_args(arguments)
    about = {
        "environment": f"{describe_machine(torch.device('cpu'))}, {os.cpu_count()} cores, float64",
        "steps": options.steps,
        "reference steps": options.reference_steps,
        "ours": f"defaults of pde.solve, {TargetRatio()!r}",
    }
    if options.out.exists():
        record = json.loads(options.out.read_text())
    else:
        record = {}
    if {k: record.get(k) for k in about} != about:
        record = {**about, "runs": {}}
    print(about["environment"], flush=True)
    race(0, 2, 1)  # torch loads what it needs
    for seed in map(str, parse_seeds(options.seeds)):
        if seed not in record["runs"]:
            record["runs"][seed] = race(int(seed), options.steps, options.reference_steps)
            write_record(options.out, record)
        print(format_race(seed, record["runs"][seed]), flush=True)
    record["summary"] = summary(record["runs"])
    record["CPU ms of a reference step"] = {
        "products held": 1e3 * per_step(True),
        "one matrix product": 1e3 * per_step(False),
    }
    write_record(options.out, record)
    print(json.dumps(record["summary"], indent=1))
    print(record["CPU ms of a reference step"])
