"""K-FAC's cost in two versions of the library, taking turns on one machine.

    git worktree add ../before COMMIT
    pullback bench kfac-versions ../before [--device cuda] [--rounds 2] [--out FILE]

How much a step costs over the baseline's depends on the host that launches its kernels: the same
code had ratios 0.2 apart on two hosts. Here each version runs in processes of its own, one after
the other, each beside a baseline of its own; all rounds are shown.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[4]
KINDS = {"plain": (10**9, 10**9), "statistics": (1, 10**9), "inversion": (1, 1)}
SCHEDULES = {"10/100": (10, 100), "25/250": (25, 250)}
SPECTRAL = "spectral, run"
RUN = "natural, run"


def import_benchmark(name: str) -> Any:
    """Return the module of a benchmark; trees of 0.1 have them in a folder of their own."""
    try:
        return importlib.import_module(f"pullback_experiments.benchmarks.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(f"benchmarks.{name}")


def repeat_step(step: Callable[[], Any], count: int) -> Callable[[], Any]:
    """Return what runs a step several times; the two trees have it under different names."""
    return lambda: [step() for _ in range(count)]


def measure(
    name: str, device: torch.device, repeats: int, *, quick: bool = False
) -> dict[str, float]:
    """Measure the library that lies in the current folder on one case.

    Returns:
        Milliseconds of a step by kind, those of the device's own kernels as "GPU, ...", and peak
        memory in MiB as "memory, ...".
    """
    kfac = import_benchmark("kfac")
    bench = kfac.Bench(kfac.cases(device, quick)[name], device)
    makers: dict[str, Any] = {"baseline": bench.baseline}
    for step_type, schedule in KINDS.items():
        makers[step_type] = natural_maker(bench.case.likelihood(), schedule)
    makers[SPECTRAL] = bench.rule("spectral")
    makers[RUN] = natural_maker(bench.case.likelihood(), SCHEDULES["10/100"])
    row = 1
    cycle = 1
    if device.type == "cuda":
        row = 4
        cycle = 20
    routes = {step_type: bench.route(makers[step_type]) for step_type in ("baseline", *KINDS)}
    in_rows = {step_type: repeat_step(step, row) for step_type, step in routes.items()}
    seconds = kfac.compare(in_rows, device, repeats=repeats, warmup=3, patience=30)
    numbers = {step_type: 1e3 * seconds[step_type] / row for step_type in routes}
    spectral = {SPECTRAL: repeat_step(bench.route(makers[SPECTRAL]), cycle)}
    seconds = kfac.compare(spectral, device, repeats=3, warmup=3, patience=30)
    numbers[SPECTRAL] = 1e3 * seconds[SPECTRAL] / cycle
    if device.type != "cuda":
        return numbers
    for step_type in ("baseline", "plain", "statistics", "inversion"):
        numbers[f"GPU, {step_type}"] = 1e3 * kfac.measure_kernel_seconds(
            routes[step_type], device, 2
        )
    numbers[f"GPU, {SPECTRAL}"] = (
        1e3 * kfac.measure_kernel_seconds(spectral[SPECTRAL], device, 1) / cycle
    )
    routes.clear()
    in_rows.clear()
    spectral.clear()
    for step_type in ("baseline", RUN, SPECTRAL):
        gc.collect()
        step = repeat_step(bench.route(makers[step_type]), 12)
        numbers[f"memory, {step_type}"] = kfac.peak_bytes(step, device) / 2**20
        del step
    return numbers


def natural_maker(likelihood: Any, schedule_steps: tuple[int, int]) -> Callable[[Any], Any]:
    """Return what makes the natural rule without a clip, at a rate of almost zero."""
    statistics_every, invert_every = schedule_steps

    def make(model: Any) -> Any:
        import pullback as pb
        from pullback.optim import kfac

        schedule: dict[str, Any] = {}
        schedule["statistics_every"] = statistics_every
        schedule["invert_every"] = invert_every
        if hasattr(kfac, "Estimation"):  # options of a rule live on the rule
            rule: Any = kfac.Natural
            return pb.KFAC(model, 1e-30, rule=rule(likelihood, kl_clip=None, warmup=0), **schedule)
        older: Any = {"likelihood": likelihood, "kl_clip": None}
        return pb.KFAC(model, 1e-30, **older, **schedule)

    return make


def ratios(times: dict[str, float]) -> dict[str, float]:
    """Return steps over the baseline's, by kind and by schedule."""
    out = {
        step_type: times[step_type] / times["baseline"]
        for step_type in ("plain", "statistics", SPECTRAL)
    }
    for schedule, (statistics, inversion) in SCHEDULES.items():
        extra = (times["statistics"] - times["plain"]) / statistics
        extra += max(0.0, times["inversion"] - times["statistics"]) / inversion
        out[schedule] = (times["plain"] + extra) / times["baseline"]
    for step_type in ("plain", "statistics", SPECTRAL):
        if f"GPU, {step_type}" in times:
            out[f"GPU, {step_type}"] = times[f"GPU, {step_type}"] / times["GPU, baseline"]
    for step_type in (RUN, SPECTRAL):
        if f"memory, {step_type}" in times:
            out[f"memory, {step_type}"] = times[f"memory, {step_type}"] / times["memory, baseline"]
    return out


def measure_apart(tree: Path, name: str, device: str, repeats: int) -> dict[str, float]:
    """Measure in a process whose library and benchmarks are those of `tree`."""
    call = [sys.executable, __file__, "--measure", name, "--device", device]
    paths = [tree, tree / "src", tree / "experiments" / "src", os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [*call, "--repeats", str(repeats)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pullback bench kfac-versions", description=__doc__)
    parser.add_argument("before", type=Path, nargs="?", help="a tree of the other version")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--measure", default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if asked.measure:
        print(json.dumps(measure(asked.measure, device, asked.repeats)))
        return

    from pullback_experiments.framework.timing import describe_machine

    if device.type == "cuda":
        names = ("gpt2", "resnet50")
    else:
        names = ("autoencoder", "convnet")
    trees = {"before": asked.before.resolve(), "now": ROOT}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    path = asked.out or ROOT / "experiments" / "results" / f"kfac-versions-{device.type}.json"
    for _, name in itertools.product(range(asked.rounds), asked.only or names):
        for version, tree in trees.items():
            times = measure_apart(tree, name, asked.device, asked.repeats)
            runs.setdefault(name, {}).setdefault(version, []).append(times)
            shown = "  ".join(
                f"{step_type} {ratio:.3f}" for step_type, ratio in ratios(times).items()
            )
            print(f"{name:12s} {version:7s} {times['baseline']:7.1f} ms  {shown}", flush=True)
            record: dict[str, Any] = {"environment": describe_machine(device), "results": runs}
            path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
