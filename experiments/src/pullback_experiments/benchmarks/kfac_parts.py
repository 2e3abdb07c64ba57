"""What single parts of K-FAC gain on a GPU: steps with one part switched off.

    pullback bench kfac-parts [--device cuda] [--repeats 3] [--only NAME ...] [--out FILE]

All variants take turns with the baseline. Of the natural rule single steps are timed, and of the
spectral rule whole cycles of twenty; of a transformer also Muon's steps. A part is worth its code
if the natural step by the schedule 10/100, or the spectral step on average, is at least 3 % longer
without it, or the peak memory larger. On a CPU no part is in use, and ratios of variants show the
noise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import pullback as pb
from pullback.grams.kronecker import cholesky_inverse
from pullback.optim.kfac import Spectral, direction_graph
from pullback.optim.kfac.rules import natural
from pullback.optim.kfac.state import KFACState

from ..framework.benchmark import RESULTS, Record, make_parser, use_tensor_cores
from ..framework.timing import compare, measure_kernel_seconds, peak_bytes, synchronize
from ..races import optimizers
from .kfac import IN_A_ROW, NEVER, SCHEDULES, STILL, Bench, predict_schedule_ratio, repeat_step
from .kfac_cases import cases
from .kfac_models import GPT
from .small_tasks import Together

#: parts of the natural rule, with the module or class and the test by which each is chosen
NATURAL_PARTS = {
    "float16 inverses": (natural, "pays_in_half"),
    "inverses by panels": (cholesky_inverse, "_has_panels"),
}
SPECTRAL_PARTS = {
    "CUDA graph": (direction_graph, "can_capture"),
    "refreshes without a wait": (KFACState, "can_refresh_on_device"),
}
PARTS = NATURAL_PARTS | SPECTRAL_PARTS
#: schedules under which each step is of one type; parts do not matter for statistics
STEP_TYPES = {"plain": (NEVER, NEVER), "inversion": (1, 1)}
STATISTICS = (1, NEVER)
SCHEDULE = "10/100"
BASELINE = "baseline"
#: of a transformer, beside the variants of the spectral rule
MUON = "Muon"
#: steps of the spectral rule from one refresh to the next
CYCLE = {"cpu": 2, "cuda": 20}


@contextmanager
def switch_off(part: str | None) -> Iterator[None]:
    """Context in which a part is left out; None leaves all parts in."""
    if part is None:
        yield
        return
    owner, name = PARTS[part]
    with mock.patch.object(owner, name, return_value=False):
        yield


def run_without(part: str | None, run: Callable[[], Any]) -> Callable[[], Any]:
    """Return the same function with a part switched off."""

    def wrapped() -> None:
        with switch_off(part):
            run()

    return wrapped


def describe_variant(part: str | None) -> str:
    """Return the label of a variant in records."""
    if part is None:
        return "all parts"
    return f"without {part}"


def measure_natural(bench: Bench, repeats: int) -> dict[str, Any]:
    """Return, for all parts and without each, milliseconds by type of step, ratio and memory."""
    row = IN_A_ROW[bench.device.type]
    routes = {
        BASELINE: repeat_step(bench.route(bench.baseline), row),
        "statistics": repeat_step(bench.route(bench.kfac(*STATISTICS)), row),
    }
    for part in (None, *NATURAL_PARTS):
        for step_type, schedule in STEP_TYPES.items():
            step = bench.route(bench.kfac(*schedule))
            routes[f"{part} {step_type}"] = run_without(part, repeat_step(step, row))
    seconds = compare(routes, bench.device, repeats=repeats, warmup=2, patience=20)
    routes.clear()
    results: dict[str, Any] = {}
    for part in (None, *NATURAL_PARTS):
        seconds[f"{part} statistics"] = seconds["statistics"]
        step = repeat_step(bench.route(bench.kfac(*SCHEDULES[SCHEDULE])), 12)
        results[f"natural, {describe_variant(part)}"] = {
            "milliseconds": {t: 1e3 * seconds[f"{part} {t}"] / row for t in STEP_TYPES},
            "ratio": predict_schedule_ratio(seconds, str(part), SCHEDULES[SCHEDULE]),
            "MiB": measure_memory(run_without(part, step), bench.device),
        }
    return results


def make_spectral(model: nn.Module) -> pb.KFAC:
    """Return K-FAC by the spectral rule with all parts, at a rate of almost zero."""
    return pb.KFAC(model, lr=STILL, rule=Spectral(cuda_graph=True))


def make_muon(model: nn.Module) -> Together:
    """Return the races' Muon, at a rate of almost zero, and AdamW for tables and the head.

    It handles matrices of one shape together, and knows hidden ones by the names of a transformer.
    """
    return Together(optimizers.muon(model, STILL, {"weight_decay": 0.0}))


def measure_spectral(bench: Bench, repeats: int) -> dict[str, Any]:
    """Return milliseconds and memory of a step, and its time over the baseline's.

    They are those of the baseline, of Muon if the model is a transformer, and of the spectral rule
    with all parts and without each.
    Beside the wall time, an average over a cycle, stand the device's own, and how often the host
    calls the device in a plain step.
    """
    cycle = CYCLE[bench.device.type]
    steps = {BASELINE: bench.route(bench.baseline)}
    makers: dict[str, Any] = {BASELINE: (None, bench.baseline)}
    if isinstance(bench.model, GPT):
        steps[MUON] = bench.route(make_muon)
        makers[MUON] = (None, make_muon)
    for part in (None, *SPECTRAL_PARTS):
        makers[describe_variant(part)] = (part, make_spectral)
        steps[describe_variant(part)] = run_without(part, bench.route(make_spectral))
    cycles = {label: repeat_step(step, cycle) for label, step in steps.items()}
    seconds = compare(cycles, bench.device, repeats=repeats, warmup=1, patience=20)
    results: dict[str, Any] = {}
    for label, step in steps.items():
        results[label] = {
            "milliseconds": {"wall": 1e3 * seconds[label] / cycle},
            "ratio": seconds[label] / seconds[BASELINE],
        }
        if bench.device.type == "cuda":
            gpu_seconds = measure_kernel_seconds(cycles[label], bench.device) / cycle
            results[label]["milliseconds"]["GPU"] = 1e3 * gpu_seconds
            step()  # takes statistics; the next one is plain
            results[label]["launches"] = count_launches(step, bench.device)
    steps.clear()
    cycles.clear()
    for label, (part, make) in makers.items():
        run = run_without(part, repeat_step(bench.route(make), 12))
        results[label]["MiB"] = measure_memory(run, bench.device)
    return {_name_result(label): numbers for label, numbers in results.items()}


def _name_result(label: str) -> str:
    """Return the name in the record of a variant of the spectral rule, or of Muon."""
    if label == MUON:
        return label
    return f"spectral, {label}"


def count_launches(run: Callable[[], Any], device: torch.device) -> int:
    """Return how often the host launches a kernel, a copy or a graph."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        run()
        synchronize(device)
    names = [event.name for event in trace.events() or []]
    calls = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
    return sum(name.startswith(calls) for name in names)


def measure_memory(step: Callable[[], Any], device: torch.device) -> float:
    """Return the peak in MiB."""
    gc.collect()
    return peak_bytes(step, device) / 2**20


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    use_tensor_cores(device)
    path = None
    if not options.quick:
        path = options.out or RESULTS / f"kfac-parts-{device.type}.json"
    record = Record.on_device(path, device, resume=False)
    available = cases(device, options.quick)
    for name in options.only or available:
        bench = Bench(available[name], device)
        results: dict[str, Any] = {}
        for measure in (measure_spectral, measure_natural):
            gc.collect()
            new = measure(bench, options.repeats)
            results |= new
            record.put(name, results)
            for label, numbers in new.items():
                steps = "  ".join(f"{t} {ms:.2f} ms" for t, ms in numbers["milliseconds"].items())
                others = [f"{k} {v:.3f}" for k, v in numbers.items() if k != "milliseconds"]
                print(f"{name:12} {label:36} {steps}  {'  '.join(others)}", flush=True)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
