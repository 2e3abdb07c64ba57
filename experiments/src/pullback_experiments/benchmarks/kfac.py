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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Natural

from ..framework.benchmark import RESULTS, Record, make_parser, use_tensor_cores
from ..framework.timing import compare, describe_machine, measure_kernel_seconds, peak_bytes
from .kfac_cases import Case, cases
from .kfac_floor import Floor, Rates, floor, rates
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
            seconds[step_type] = measure_kernel_seconds(step, self.device, 2)
        out = {s: predict_schedule_ratio(seconds, "kfac", v) for s, v in SCHEDULES.items()}
        for step_type in ("plain", "statistics"):
            out[step_type] = seconds[f"kfac {step_type}"] / seconds["baseline"]
        for rule in RULES:  # a whole cycle of statistics and renewals
            step = self.route(self.rule(rule))
            repeat_step(step, 61)()  # every basis has been begun
            out[f"{rule}, run"] = (
                measure_kernel_seconds(step, self.device, 20) / seconds["baseline"]
            )
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
    """Return a route of `count` steps in a row."""
    return lambda: [step() for _ in range(count)]


def predict_schedule_ratio(
    seconds: Mapping[str, float], who: str, schedule: tuple[int, int]
) -> float:
    """Seconds per step by the schedule, in multiples of the baseline."""
    plain = seconds[f"{who} plain"]
    statistics = seconds[f"{who} statistics"]
    inversion = seconds[f"{who} inversion"] - statistics
    mean = plain + (statistics - plain) / schedule[0] + max(0.0, inversion) / schedule[1]
    return mean / seconds["baseline"]


def compute_floor_ratio(
    baseline: float, floor_seconds: Mapping[str, float], schedule: tuple[int, int]
) -> float:
    """Return the least time of a step by the schedule, in multiples of the baseline's seconds."""
    statistics_every, invert_every = schedule
    extra = floor_seconds["apply"]
    extra += floor_seconds["statistics"] / statistics_every
    extra += floor_seconds["inversion"] / invert_every
    return 1 + extra / baseline


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


@dataclass(frozen=True)
class RunLengths:
    """How often and how long the steps of a case are timed.

    Attributes:
        repeats: timings of each kind of step.
        natural_steps: steps of the run by the schedule 10/100.
        rule_steps: steps of the run of each other rule, by its own schedule; 0 for none.
    """

    repeats: int
    natural_steps: int
    rule_steps: int

    @classmethod
    def choose(cls, device: torch.device, quick: bool) -> RunLengths:
        """Return short runs for a test, and otherwise ones that hold whole schedules."""
        if quick:
            return cls(repeats=2, natural_steps=6, rule_steps=6)
        if device.type == "cuda":
            return cls(repeats=10, natural_steps=100, rule_steps=60)
        return cls(repeats=40, natural_steps=100, rule_steps=0)


@dataclass(frozen=True)
class CaseCosts:
    """What the steps of a case cost; a ratio is in multiples of the baseline's step.

    Attributes:
        seconds: of each kind of step, the peer's and the baseline's included.
        floor_seconds: the least time of each extra operation.
        ratios: of K-FAC by schedule, kind of step and rule.
        kernels: the same of the GPU's own time; empty on a CPU.
        floors: the least ratios.
        naive: the peer's ratios; empty for a case without it.
        targets: the ratios that are aimed at.
        memory: peak bytes by optimizer; empty on a CPU.
    """

    seconds: Mapping[str, float]
    floor_seconds: Mapping[str, float]
    ratios: Mapping[str, float]
    kernels: Mapping[str, float]
    floors: Mapping[str, float]
    naive: Mapping[str, float]
    targets: Mapping[str, float]
    memory: Mapping[str, int]

    def as_record(self) -> dict[str, Any]:
        """Return what is written to the file of results."""
        rules = [rule for rule in RULES if rule in self.targets]
        return {
            "milliseconds": {k: 1e3 * s for k, s in self.seconds.items()},
            "floor_milliseconds": {k: 1e3 * s for k, s in self.floor_seconds.items()},
            "ratio": self.ratios,
            "kernels": self.kernels,
            "floor": self.floors,
            "naive": self.naive,
            "target": {**self.targets, **{f"{r}, run": self.targets[r] for r in rules}},
            "peak_bytes": self.memory,
        }

    def show(self) -> None:
        """Print the times and a table of the ratios."""
        for step_type, seconds in self.seconds.items():
            print(f"  {step_type:18} {1e3 * seconds:9.2f} ms")
        floor_times = [f"{name} {1e3 * s:.2f} ms" for name, s in self.floor_seconds.items()]
        print("  floor " + ", ".join(floor_times))
        print(f"  {'× baseline':18} {'kfac':>6} {'GPU':>7} {'floor':>7} {'naive':>7} {'target':>7}")
        for step_type, ratio in self.ratios.items():
            cells = [columns.get(step_type) for columns in (self.kernels, self.floors, self.naive)]
            cells.append(self.targets.get(step_type.removesuffix(", run")))
            print(f"  {step_type:18} {ratio:6.2f} {' '.join(map(format_ratio, cells))}")


def format_ratio(ratio: float | None) -> str:
    """Return a ratio in seven characters; blanks for None."""
    if ratio is None:
        return " " * 7
    return f"{ratio:7.2f}"


def measure(name: str, case: Case, device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure a case, print what it costs, and return its entry of the record."""
    bench = Bench(case, device)
    lengths = RunLengths.choose(device, quick)
    machine_rates = rates(device, case.half)
    work = floor(bench.model, lambda: bench.forward(bench.model), lambda z: case.loss(z, bench.y))
    memory: dict[str, int] = {}
    kernels: dict[str, float] = {}
    if device.type == "cuda":
        memory = bench.memory()
        kernels = bench.kernels()
    gc.collect()
    seconds = bench.seconds("kfac", lengths.repeats)
    gc.collect()
    naive_seconds: dict[str, float] = {}
    if case.naive:
        naive_seconds = bench.seconds("naive", max(2, lengths.repeats // 2))
    gc.collect()
    machine_rates = machine_rates.best(rates(device, case.half))
    baseline = seconds["baseline"]
    floor_seconds = find_floor_seconds(work, machine_rates, baseline, is_half=bool(case.half))
    costs = CaseCosts(
        seconds={**naive_seconds, **seconds},
        floor_seconds=floor_seconds,
        ratios=measure_ratios(bench, seconds, lengths) | compare_memory(memory),
        kernels=kernels,
        floors=compute_floors(baseline, floor_seconds),
        naive=predict_naive_ratios(naive_seconds),
        targets=case.targets,
        memory=memory,
    )
    print(f"\n{name}: {sum(p.numel() for p in bench.model.parameters()):,} parameters")
    costs.show()
    return costs.as_record()


def find_floor_seconds(
    work: Floor, machine_rates: Rates, baseline: float, *, is_half: bool
) -> dict[str, float]:
    """Return the least seconds of the extra products, at the best rates that were seen.

    The rate that the baseline's step reaches counts too, so that no floor lies above a step that
    was taken. In half precision it says nothing of products in float32.
    """
    reached = work.gradient / baseline
    if is_half:
        baseline_rates = Rates(reached, 0.0, 0.0)
    else:
        baseline_rates = Rates(reached, reached, 0.0)
    return work.seconds(machine_rates.best(baseline_rates))


def measure_ratios(
    bench: Bench, seconds: Mapping[str, float], lengths: RunLengths
) -> dict[str, float]:
    """Return K-FAC's time over the baseline's: by schedule and kind of step, then of whole runs."""
    ratios = {s: predict_schedule_ratio(seconds, "kfac", v) for s, v in SCHEDULES.items()}
    ratios["statistics"] = seconds["kfac statistics"] / seconds["baseline"]
    ratios["plain"] = seconds["kfac plain"] / seconds["baseline"]
    natural = bench.kfac(10, 100)
    ratios["10/100, run"] = measure_schedule_ratio(bench, natural, lengths.natural_steps)
    if lengths.rule_steps:
        for rule in RULES:
            steps = lengths.rule_steps
            ratios[f"{rule}, run"] = measure_schedule_ratio(bench, bench.rule(rule), steps)
    return ratios


def compare_memory(memory: Mapping[str, int]) -> dict[str, float]:
    """Return each optimizer's peak over the baseline's; nothing where none was measured."""
    if not memory:
        return {}
    ratios = {"memory": memory["kfac"] / memory["baseline"]}
    for rule in RULES:
        ratios[f"{rule}, memory"] = memory[rule] / memory["baseline"]
    return ratios


def compute_floors(baseline: float, floor_seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the least ratio of every schedule and kind of step."""
    floors = {s: compute_floor_ratio(baseline, floor_seconds, v) for s, v in SCHEDULES.items()}
    applied = floor_seconds["apply"]
    floors["statistics"] = 1 + (applied + floor_seconds["statistics"]) / baseline
    floors["plain"] = 1 + applied / baseline
    floors["10/100, run"] = floors["10/100"]
    return floors


def predict_naive_ratios(naive_seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the peer's ratio by schedule; nothing where it was not timed."""
    if not naive_seconds:
        return {}
    return {s: predict_schedule_ratio(naive_seconds, "naive", v) for s, v in SCHEDULES.items()}


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
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--profile", nargs=2, type=int, metavar=("STATISTICS", "INVERSION"))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    use_tensor_cores(device)
    print(describe_machine(device))
    path = None
    if not options.quick:
        path = options.out or RESULTS / f"kfac-{device.type}.json"
    record = Record.on_device(path, device)
    for name, case in cases(device, options.quick).items():
        if options.only is not None and name not in options.only:
            continue
        if options.profile is not None:
            profile(Bench(case, device), tuple(options.profile))
            continue
        record.put(name, measure(name, case, device, options.quick))
