"""What staying on a slice costs beside torch's SGD, for the whole training step and the step alone.

    pullback bench slices [--device cuda] [--quick] [--only NAME ...] [--out FILE]

Models: the seven-layer ReLU network for CIFAR-10 of the paper (21.6M parameters, batch 128), with
biases ("mlp") and without as in the paper's figure ("bare"), where approach I needs no projection,
and ResNet-50 (on a GPU batch 64 of 224×224, on a CPU two images of 64×64). Steps are taken
*eagerly* and, on a GPU, *captured*: a block of them is recorded as one CUDA graph and replayed, so
that no launch is waited for and what is measured is the device's own work.

Routes take turns: in every round, in random order, a short block of each. A ratio is the median
over rounds of a block's time over that of the baseline **in the same round**, with the 95 %
interval of that median; the baseline is the faster of torch's foreach and fused SGD. "SGD again" is
fused SGD a second time: its ratio to the first is what the measurement itself can tell.

Beside the times stand the operations of a step (no views; one foreach is one) and the bytes that
they read and write, with the time that takes at the bandwidth of a plain copy. SGD needs three
passes over the parameters; to balance a class of units is to read its weights once for the norms,
and to read and write them once to rescale: three more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..framework.benchmark import RESULTS, Record, make_parser, use_tensor_cores
from ..framework.timing import describe_machine, synchronize
from .slices_routes import Bench, Route

PLAIN = ("SGD foreach", "SGD fused")
BASES = {
    "SGD again": ("SGD fused",),
    "units, momentum": ("SGD momentum",),
    "Sliced Adam": ("Adam",),
}


def in_rounds(
    blocks: Mapping[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    seconds: float,
    warmup: int = 2,
) -> dict[str, list[float]]:
    """Return the seconds of each block in each round; at least three rounds are run."""
    order = list(blocks)
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in blocks}
    round_start = time.perf_counter()
    for round_number in range(-warmup, rounds):
        if round_number >= 3 and time.perf_counter() - round_start > seconds:
            break
        shuffle(order)
        for name in order:
            synchronize(device)
            start = time.perf_counter()
            blocks[name]()
            synchronize(device)
            if round_number >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def summarize_ratios(values: list[float]) -> dict[str, float]:
    """The median, a 95 % interval of it from order statistics, and the quartiles."""
    ranked = sorted(values)
    n = len(values)
    reach = round(0.98 * n**0.5)
    low = max(0, n // 2 - reach)
    high = min(n - 1, (n - 1) // 2 + reach)
    return {
        "ratio": statistics.median(ranked),
        "low": ranked[low],
        "high": ranked[high],
        "quartile_1": ranked[n // 4],
        "quartile_3": ranked[min((3 * n) // 4, n - 1)],
    }


def ratios(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return each route's time over its baseline's, round by round, from seconds of one step."""
    out = {}
    for name, seconds in times.items():
        known = [b for b in BASES.get(name, PLAIN) if b in times and b != name]
        if known and name not in (*PLAIN, "Adam", "SGD momentum"):
            base = min(known, key=lambda b: statistics.median(times[b]))
            out[name] = summarize_ratios([a / b for a, b in zip(seconds, times[base], strict=True)])
    return out


def bandwidth(device: torch.device, quick: bool) -> float:
    """Bytes per second of a copy, read and written."""
    if quick:
        entries = 2**16
    elif device.type == "cuda":
        entries = 2**28
    else:
        entries = 2**24
    source = torch.ones(entries, device=device)
    target = torch.empty_like(source)
    times = in_rounds({"copy": lambda: target.copy_(source)}, device, 10, 1.0)["copy"]
    return 8 * source.numel() / min(times)


def capture_blocks(
    routes: Mapping[str, Route], step_only: bool, device: torch.device
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return blocks as graphs in one pool of memory, and those that could not be recorded."""
    blocks = {}
    failed = {}
    pool = torch.cuda.graph_pool_handle()
    for name, route in routes.items():
        try:
            blocks[name] = route.capture_graph(route.choose_step(step_only), pool, device)
        except RuntimeError as error:
            torch.cuda.synchronize(device)
            failed[name] = str(error).splitlines()[0]
    return blocks, failed


def show(title: str, ratios: Mapping[str, Any]) -> None:
    print(f"\n{title}: {ratios['rounds']} rounds")
    for name, ms in ratios["milliseconds"].items():
        ratio = ratios["ratio"].get(name)
        if ratio:
            shown = f"{ratio['ratio']:6.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        else:
            shown = ""
        print(f"  {name:24} {ms:9.4f} ms {shown}", flush=True)
    for name, why in ratios.get("failed", {}).items():
        print(f"  {name:24} not captured: {why}")


def traffic(bench: Bench, routes: Mapping[str, Route], speed: float) -> dict[str, Any]:
    """Return the bytes that the steps move and the least they need, at `speed` bytes per second."""
    size = sum(p.numel() * p.element_size() for p in bench.model.parameters())
    count = sum(p.numel() for p in bench.model.parameters())
    print(f"\n{bench.name}, {count:,} parameters; copy at {1e-9 * speed:.0f} GB/s")
    for n, r in routes.items():
        ms = 1e3 * r.bytes / speed
        print(f"  {n:24} {r.operations:7.1f} operations, {ms:9.4f} ms of traffic")
    floor = 3e3 * size / speed
    return {
        "parameters": count,
        "batch": list(bench.x.shape),
        "target": 1.05,
        "copy_gigabytes_per_second": 1e-9 * speed,
        "floor_milliseconds": {"SGD": floor, "retraction": floor},
        "operations": {n: r.operations for n, r in routes.items()},
        "gigabytes": {n: 1e-9 * r.bytes for n, r in routes.items()},
        "traffic_milliseconds": {n: 1e3 * r.bytes / speed for n, r in routes.items()},
    }


def name_table(step_only: bool, is_captured: bool) -> str:
    """Return the name of a table in the record, such as "eager training step"."""
    launch = "eager"
    if is_captured:
        launch = "captured"
    if step_only:
        return f"{launch} step alone"
    return f"{launch} training step"


def measure_table(
    routes: Mapping[str, Route],
    step_only: bool,
    is_captured: bool,
    device: torch.device,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return times and ratios of all routes: whole training steps or the optimizer's alone."""
    failed: dict[str, str] = {}
    if is_captured:
        blocks, failed = capture_blocks(routes, step_only, device)
    else:
        blocks = {name: route.block(route.choose_step(step_only)) for name, route in routes.items()}
    times = in_rounds(blocks, device, options.rounds, options.seconds)
    per_step = {}
    for name, seconds in times.items():
        per_step[name] = [block_seconds / routes[name].steps for block_seconds in seconds]
    return {
        "rounds": len(next(iter(times.values()), [])),
        "milliseconds": {n: 1e3 * statistics.median(t) for n, t in per_step.items()},
        "ratio": ratios(per_step),
        "failed": failed,
    }


def measure(
    name: str, device: torch.device, options: argparse.Namespace, save: Callable[[Any], None]
) -> None:
    """Measure a model's routes, and save the result after every table."""
    bench = Bench(name, device, options.quick)
    chosen = [n for n in bench.optimizers() if not options.routes or n in options.routes]
    routes = {n: bench.route(n) for n in chosen}
    result = traffic(bench, routes, bandwidth(device, options.quick))
    launches = [False]
    if device.type == "cuda":
        launches = [False, True]
    for step_only, is_captured in product((False, True), launches):
        title = name_table(step_only, is_captured)
        result[title] = measure_table(routes, step_only, is_captured, device, options)
        show(f"{name}, {title}", result[title])
        result["finite"] = {n: r.finite() for n, r in routes.items()}
        save(result)


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--only", nargs="*", default=None, help="mlp, bare, resnet50")
    parser.add_argument("--routes", nargs="*", default=None, help="some of the optimizers")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=18.0, help="of each table, at most")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if options.rounds is None:
        options.rounds = 40
        if options.quick:
            options.rounds = 3
    use_tensor_cores(device)
    print(describe_machine(device))
    path = None
    if not options.quick:
        path = options.out or RESULTS / f"slices-{device.type}.json"
    record = Record.on_device(path, device)
    for name in ("mlp", "bare", "resnet50"):
        if options.only is None or name in options.only:
            measure(name, device, options, partial(record.put, name))
