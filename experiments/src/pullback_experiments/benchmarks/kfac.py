"""What a K-FAC step costs beside a step of the ordinary optimizer of the same model and batch.

    pullback bench kfac [--device cuda] [--quick] [--only NAME ...] [--out FILE]

A step is zero_grad, forward, backward and the optimizer's step. Three kinds of steps are timed in
turn with the baseline (SGD on a CPU, fused AdamW on a GPU): plain ones, ones that take statistics,
and ones that also invert. A schedule's cost is computed from these three, and that of 10/100 also
measured by running it. A GPU is waited for after a few steps of one kind, since no training loop
waits after each; its own time, without the waits for Python to launch its kernels, is measured
too. Beside each cost stands the floor: the baseline's time, and the extra products at
this machine's rate for large ones. The peer is `naive_kfac`, with the cheaper empirical Fisher. It
is timed by itself, with a baseline of its own.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Natural

from ..framework.benchmark import RESULTS, Record, make_parser, use_tensor_cores
from ..framework.timing import compare, describe_machine, kernel_seconds, peak_bytes
from .kfac_cases import Case, cases
from .kfac_floor import Rates, floor, rates
from .naive_kfac import NaiveKFAC

NEVER = 10**9
STILL = 1e-30  # a rate that moves no parameter; a step with rates of zero asks for its gradients
SCHEDULES = {"every step": (1, 1), "10/100": (10, 100), "25/250": (25, 250)}
RULES = ("eigenbasis", "spectral")
IN_A_ROW = {"cpu": 1, "cuda": 4}


class Bench:
    """A case on a device: routes are training steps on copies of one model."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case = case
        self.device = device
        with torch.device(device):
            self.model = case.model()
            self.x, self.y = case.batch()

    def forward(self, model: nn.Module) -> Tensor:
        half = self.case.half
        if half:
            amp = torch.autocast(self.device.type, half)
        else:
            amp = contextlib.nullcontext()
        with amp:
            return model(self.x)

    def route(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], Any]:
        model = copy.deepcopy(self.model)
        optimizer = make(model)

        def step() -> None:
            optimizer.zero_grad()
            self.case.loss(self.forward(model), self.y).backward()
            optimizer.step()

        return step

    def baseline(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.device.type == "cuda":
            return torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def kfac(self, statistics: int, inversion: int) -> Callable[[nn.Module], pb.KFAC]:
        return lambda model: pb.KFAC(
            model,
            lr=STILL,
            rule=Natural(self.case.likelihood(), kl_clip=None, warmup=0),
            statistics_every=statistics,
            invert_every=inversion,
        )

    def rule(self, name: str) -> Callable[[nn.Module], pb.KFAC]:
        return lambda model: pb.KFAC(model, lr=STILL, rule=name)

    def naive(self, statistics: int, inversion: int) -> Callable[[nn.Module], NaiveKFAC]:
        return lambda model: NaiveKFAC(
            model, 0.0, damping=1e-1, statistics_every=statistics, invert_every=inversion
        )

    def routes(self, who: str) -> dict[str, Callable[[], Any]]:
        """A step of each kind, and the baseline's; inverting ones take statistics as well."""
        make = {"kfac": self.kfac, "naive": self.naive}[who]
        schedules = {"plain": (NEVER, NEVER), "statistics": (1, NEVER), "inversion": (1, 1)}
        routes_of_kfac = {
            f"{who} {step_type}": self.route(make(*s)) for step_type, s in schedules.items()
        }
        return {"baseline": self.route(self.baseline), **routes_of_kfac}

    def kernels(self) -> dict[str, float]:
        """The GPU's own time over that of the baseline, by schedule, kind of step and rule."""
        seconds = {}
        for step_type, step in self.routes("kfac").items():
            repeat_step(step, 4)()  # the fifth and sixth statistics renew no inverse
            seconds[step_type] = kernel_seconds(step, self.device, 2)
        out = {s: predict_schedule_ratio(seconds, "kfac", v) for s, v in SCHEDULES.items()}
        for step_type in ("plain", "statistics"):
            out[step_type] = seconds[f"kfac {step_type}"] / seconds["baseline"]
        for rule in RULES:  # a whole cycle of statistics and renewals
            step = self.route(self.rule(rule))
            repeat_step(step, 61)()  # every basis has been begun
            out[f"{rule}, run"] = kernel_seconds(step, self.device, 20) / seconds["baseline"]
        return out

    def seconds(self, who: str, repeats: int) -> dict[str, float]:
        """Of a step of each kind, and of the baseline."""
        row = IN_A_ROW[self.device.type]
        routes = self.routes(who)
        in_rows = {step_type: repeat_step(step, row) for step_type, step in routes.items()}
        seconds_of_rows = compare(in_rows, self.device, repeats=repeats, warmup=3, patience=90)
        return {step_type: seconds / row for step_type, seconds in seconds_of_rows.items()}

    def memory(self) -> dict[str, int]:
        """Peak bytes of each optimizer alone, statistics and inversion included."""
        out = {}
        makers = {"baseline": self.baseline, "kfac": self.kfac(10, 100)}
        makers |= {name: self.rule(name) for name in RULES}
        for name, make in makers.items():
            gc.collect()
            step = self.route(make)
            out[name] = peak_bytes(lambda run=step: [run() for _ in range(12)], self.device)
            del step
        return out


def repeat_step(step: Callable[[], Any], count: int) -> Callable[[], Any]:
    return lambda: [step() for _ in range(count)]


def predict_schedule_ratio(seconds: dict[str, float], who: str, schedule: tuple[int, int]) -> float:
    """Seconds per step by the schedule, in multiples of the baseline."""
    plain = seconds[f"{who} plain"]
    statistics = seconds[f"{who} statistics"]
    inversion = seconds[f"{who} inversion"] - statistics
    mean = plain + (statistics - plain) / schedule[0] + max(0.0, inversion) / schedule[1]
    return mean / seconds["baseline"]


def least(seconds: dict[str, float], at: dict[str, float], schedule: tuple[int, int]) -> float:
    """The same of the floor."""
    extra = at["apply"] + at["statistics"] / schedule[0] + at["inversion"] / schedule[1]
    return 1 + extra / seconds["baseline"]


def measure_schedule_ratio(bench: Bench, make: Callable[[nn.Module], pb.KFAC], steps: int) -> float:
    """Return the time of `steps` steps over the baseline's, after as many to warm up."""
    routes = {"baseline": bench.route(bench.baseline), "kfac": bench.route(make)}
    for _ in range(steps):
        routes["kfac"]()
    chunk = max(1, min(10, steps // 3))
    totals = dict.fromkeys(routes, 0.0)
    for _ in range(max(1, steps // chunk)):
        times = compare(
            {n: repeat_step(run, chunk) for n, run in routes.items()},
            bench.device,
            repeats=1,
            warmup=0,
        )
        totals = {n: totals[n] + times[n] for n in totals}
    return totals["kfac"] / totals["baseline"]


def measure(name: str, case: Case, device: torch.device, quick: bool) -> dict[str, Any]:
    bench = Bench(case, device)
    at = rates(device, case.half)
    work = floor(bench.model, lambda: bench.forward(bench.model), lambda z: case.loss(z, bench.y))
    if device.type == "cuda":
        memory = bench.memory()
    else:
        memory = {}
    if device.type == "cuda":
        kernels = bench.kernels()
    else:
        kernels = {}
    gc.collect()
    if quick:
        repeats = 2
    else:
        repeats = max(10, 40 // IN_A_ROW[device.type])
    step_seconds = bench.seconds("kfac", repeats)
    gc.collect()
    if case.naive:
        theirs = bench.seconds("naive", max(2, repeats // 2))
    else:
        theirs = {}
    gc.collect()
    # no floor lies above what was reached: the baseline's own rate is one that the machine has
    reached = work.gradient / step_seconds["baseline"]
    full = 0.0 if case.half else reached
    lowest = work.seconds(at.best(rates(device, case.half)).best(Rates(reached, full, 0.0)))
    ratios = {s: predict_schedule_ratio(step_seconds, "kfac", v) for s, v in SCHEDULES.items()}
    ratios["statistics"] = step_seconds["kfac statistics"] / step_seconds["baseline"]
    ratios["plain"] = step_seconds["kfac plain"] / step_seconds["baseline"]
    floors = {s: least(step_seconds, lowest, v) for s, v in SCHEDULES.items()}
    floors["statistics"] = 1 + (lowest["apply"] + lowest["statistics"]) / step_seconds["baseline"]
    floors["plain"] = 1 + lowest["apply"] / step_seconds["baseline"]
    if theirs:
        peer = {s: predict_schedule_ratio(theirs, "naive", v) for s, v in SCHEDULES.items()}
    else:
        peer = {}
    ratios["10/100, run"] = measure_schedule_ratio(bench, bench.kfac(10, 100), 6 if quick else 100)
    for rule in RULES if device.type == "cuda" or quick else ():  # each by its own schedule
        ratios[f"{rule}, run"] = measure_schedule_ratio(bench, bench.rule(rule), 6 if quick else 60)
    floors["10/100, run"] = floors["10/100"]
    if memory:
        ratios["memory"] = memory["kfac"] / memory["baseline"]
        ratios |= {f"{rule}, memory": memory[rule] / memory["baseline"] for rule in RULES}
    print(f"\n{name}: {sum(p.numel() for p in bench.model.parameters()):,} parameters")
    step_seconds = {**theirs, **step_seconds}
    for step_type, seconds in step_seconds.items():
        print(f"  {step_type:18} {1e3 * seconds:9.2f} ms")
    print(
        "  floor " + ", ".join(f"{operation} {1e3 * s:.2f} ms" for operation, s in lowest.items())
    )
    print(f"  {'× baseline':18} {'kfac':>6} {'GPU':>7} {'floor':>7} {'naive':>7} {'target':>7}")
    for step_type, ratio in ratios.items():
        cells = [kernels.get(step_type), floors.get(step_type), peer.get(step_type)]
        cells.append(case.targets.get(step_type.removesuffix(", run")))
        shown = " ".join(f"{'' if c is None else format(c, '.2f'):>7}" for c in cells)
        print(f"  {step_type:18} {ratio:6.2f} {shown}")
    return {
        "milliseconds": {k: 1e3 * s for k, s in step_seconds.items()},
        "floor_milliseconds": {k: 1e3 * s for k, s in lowest.items()},
        "ratio": ratios,
        "kernels": kernels,
        "floor": floors,
        "naive": peer,
        "target": case.targets | {f"{r}, run": case.targets[r] for r in RULES if r in case.targets},
        "peak_bytes": memory,
    }


def profile(bench: Bench, schedule: tuple[int, int]) -> None:
    """Where the time of one K-FAC step goes."""
    step = bench.route(bench.kfac(*schedule))
    for _ in range(5):
        step()
    with torch.profiler.profile() as trace:
        for _ in range(3):
            step()
    order = f"self_{bench.device.type}_time_total"
    print(trace.key_averages().table(sort_by=order, row_limit=22, max_name_column_width=50))


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--profile", nargs=2, type=int, metavar=("STATISTICS", "INVERSION"))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    use_tensor_cores(device)
    print(describe_machine(device))
    path = None if options.quick else options.out or RESULTS / f"kfac-{device.type}.json"
    record = Record.on_device(path, device)
    for name, case in cases(device, options.quick).items():
        if options.only is not None and name not in options.only:
            continue
        if options.profile is not None:
            profile(Bench(case, device), tuple(options.profile))
            continue
        record.put(name, measure(name, case, device, options.quick))
