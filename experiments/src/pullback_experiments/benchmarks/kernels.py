"""The NTK of networks against torch.func's two documented ways to compute it.

    pullback bench kernels [--device cuda] [--quick] [--only mlp] [--out record.json]

The full kernel (N, N, 10, 10) in float32. The peers are those of torch.func's tutorial: contraction
of per-sample Jacobians, and NTK-vector products (jvp after vjp, vmapped over all pairs). All routes
take turns within one run; each is compared with a float64 contraction on a few inputs; the peak of
memory is that of the route alone, above the model and its inputs, on the CPU in a process of its
own. A route whose time or memory, by its last size, would pass the limits is left out and named.
With --cpu-time the seconds are the processor's (one thread: OMP_NUM_THREADS=1), for machines that
others use too. --merge adds to a record: sizes measured one at a time make one table.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

from pullback.kernels import ntk

from ..framework.benchmark import make_parser, write_record
from ..framework.timing import compare, describe_machine, peak_bytes
from .models import Attention, mlp, small_conv

Route = Callable[[nn.Module, Tensor], Tensor]

PROBLEMS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": ("MLP 784-512-512-10", lambda: mlp([784, 512, 512, 10]), (784,)),
    "conv": ("conv net, 16-64 channels", lambda: small_conv(16), (3, 32, 32)),
    "attention": ("transformer block, width 64, 16 tokens", lambda: Attention(64), (16, 64)),
    "wide-attention": (
        "transformer block, width 256, 16 tokens",
        lambda: Attention(256),
        (16, 256),
    ),
}
SIZES = (128, 512, 2048)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def single(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda params, x: functional_call(model, params, (x[None],))[0]


def contraction(model: nn.Module, x: Tensor) -> Tensor:
    """Jacobians of all samples, contracted: the tutorial's first form, J formed once."""
    rows = vmap(jacrev(single(model)), (None, 0))(parameters(model), x)
    flat = [j.flatten(2) for j in rows.values()]
    return torch.stack([torch.einsum("Naf,Mbf->NMab", j, j) for j in flat]).sum(0)


def products(model: nn.Module, x: Tensor) -> Tensor:
    """NTK-vector products: the tutorial's second form."""
    params = parameters(model)
    function = single(model)

    def pair(one: Tensor, two: Tensor) -> Tensor:
        value, pull, *_ = vjp(lambda p: function(p, one), params)
        eye = torch.eye(value.numel(), dtype=value.dtype, device=value.device)
        return vmap(lambda v: jvp(lambda p: function(p, two), (params,), pull(v))[1])(eye)

    return vmap(vmap(pair, (None, 0)), (0, None))(x, x)


ROUTES: dict[str, Route] = {
    "pullback": lambda model, x: ntk(model, x),
    "torch.func contraction": contraction,
    "torch.func vector products": products,
}


def build(problem: str, n: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    _, make, shape = PROBLEMS[problem]
    return make().to(device), torch.randn(n, *shape).to(device)


def error(route: str, problem: str, device: torch.device) -> float:
    """Return the relative error of a route against a float64 contraction."""
    model, x = build(problem, 4, device)
    want = contraction(copy.deepcopy(model).double(), x.double())
    return float((ROUTES[route](model, x).double() - want).norm() / want.norm())


def peak(problem: str, n: int, route: str, device: torch.device) -> int:
    """Return the peak memory of a route in bytes, without model and inputs; −1 if it failed."""
    if device.type == "cuda":
        model, x = build(problem, n, device)
        before = torch.cuda.memory_allocated(device)
        return peak_bytes(lambda: ROUTES[route](model, x), device) - before
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (problem, n, route, torch.get_num_threads(), queue)
    process = context.Process(target=_send_memory_rise, args=arguments)
    process.start()
    process.join()
    if process.exitcode == 0:
        return queue.get(timeout=5)
    return -1


def _send_memory_rise(problem: str, n: int, route: str, threads: int, queue: Any) -> None:
    torch.set_num_threads(threads)
    model, x = build(problem, n, torch.device("cpu"))
    ROUTES[route](model, x[:2])  # what a first call loads is not the route's
    before = read_peak_bytes()
    ROUTES[route](model, x)
    queue.put(read_peak_bytes() - before)


def read_peak_bytes() -> int:
    """Return the process's peak in bytes; `getrusage` would count that of the parent too."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except (OSError, StopIteration):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(problem: str, sizes: tuple[int, ...], options: Any) -> dict[str, Any]:
    """Return errors, times and memory of all routes that can do a problem at these sizes."""
    device = torch.device(options.device)
    errors = {route: error(route, problem, device) for route in ROUTES}
    result: dict[str, Any] = {"error": errors, "sizes": {}}
    last = {route: time_small_run(route, problem, device) for route in ROUTES}
    print(f"\n{PROBLEMS[problem][0]}")
    for n in sizes:
        model, x = build(problem, n, device)
        skipped = find_unusable_routes(last, model, x, options)
        usable = [route for route in ROUTES if route not in skipped]
        times = time_routes(usable, model, x, options)
        peaks = measure_peaks(usable, problem, n, options)
        for route in usable:
            last[route] = (n, times[route], peaks[route])
        result["sizes"][n] = report(n, times, peaks, errors, skipped)
    return result


def time_routes(routes: list[str], model: nn.Module, x: Tensor, options: Any) -> dict[str, float]:
    """Return the median seconds of three calls of every route, taken in turn."""
    clock = time.perf_counter
    if options.cpu_time:
        clock = time.process_time
    runs = {route: partial(ROUTES[route], model, x) for route in routes}
    device = torch.device(options.device)
    return compare(runs, device, repeats=3, patience=options.patience, clock=clock)


def measure_peaks(routes: list[str], problem: str, n: int, options: Any) -> dict[str, int]:
    """Return the peak memory of every route in bytes; 0 in a quick run on the CPU."""
    device = torch.device(options.device)
    if device.type != "cuda" and options.quick:
        return dict.fromkeys(routes, 0)
    return {route: peak(problem, n, route, device) for route in routes}


def find_unusable_routes(
    last: dict[str, tuple[int, float, int]], model: nn.Module, x: Tensor, options: Any
) -> dict[str, str]:
    """Return why routes other than ours are left out: too slow, or too large for the device."""
    reasons: dict[str, str] = {}
    for route in ROUTES:
        if route == "pullback":
            continue
        reason = explain_excess(last[route], len(x), options)
        if not reason and not fits(ROUTES[route], model, x):
            reason = "does not fit the device"
        if reason:
            reasons[route] = reason
    return reasons


def fits(route: Route, model: nn.Module, x: Tensor) -> bool:
    """Return False if a GPU's memory is too small; the CPU's is not checked."""
    if x.device.type == "cpu":
        return True
    try:
        route(model, x)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def time_small_run(route: str, problem: str, device: torch.device) -> tuple[int, float, int]:
    """Return (inputs, seconds, bytes) of a small run."""
    for n in (4, 16):
        model, x = build(problem, n, device)
        seconds = compare({"": partial(ROUTES[route], model, x)}, device, repeats=1)[""]
        if seconds > 3:
            break
    return n, seconds, 0


def explain_excess(last: tuple[int, float, int], n: int, options: Any) -> str:
    """Return why n inputs take too long or too much memory, or ""; time grows as n²."""
    before, seconds, peak = last
    if seconds * (n / before) ** 2 > options.limit:
        return f"would take {seconds * (n / before) ** 2:.0f} s"
    if peak * n / before > options.memory * 2**30:
        return f"would take {peak * n / before / 2**30:.0f} GB"
    return ""


def report(
    n: int,
    times: dict[str, float],
    peaks: dict[str, int],
    errors: dict[str, float],
    skipped: dict[str, str],
) -> dict[str, Any]:
    ours = times["pullback"]
    own_peak = max(peaks["pullback"], 1)
    for route, seconds in times.items():
        print(
            f"  N={n:5} {route:27} {seconds:9.3f} s {seconds / ours:8.1f}×"
            f"   {peaks[route] / 2**20:8.0f} MB {peaks[route] / own_peak:6.1f}×"
            f"   error {errors[route]:.0e}",
            flush=True,
        )
    for route, reason in skipped.items():
        print(f"  N={n:5} {route:27} {reason}", flush=True)
    others = [seconds for route, seconds in times.items() if route != "pullback"]
    ratio = None
    if others:
        ratio = min(others) / ours
    return {
        "seconds": times,
        "peak_bytes": peaks,
        "ratio": ratio,
        "skipped": skipped,
    }


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="few inputs, for a test")
    parser.add_argument("--only", choices=PROBLEMS, default=None)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a peer may take")
    parser.add_argument("--memory", type=float, default=12.0, help="GB a peer may take")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds of repeats")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--merge", action="store_true", help="keep what the record has besides")
    options = parser.parse_args(arguments)
    if options.quick:
        sizes = (4,)
    else:
        sizes = tuple(options.sizes)
    if options.only:
        names = [options.only]
    else:
        names = list(PROBLEMS)
    print(describe_machine(torch.device(options.device)))
    print("time and peak memory of the full NTK, and as multiples of pullback's; error vs float64")
    results = {name: measure(name, sizes, options) for name in names}
    if options.out is not None:
        machine = describe_machine(torch.device(options.device))
        clock = "wall"
        if options.cpu_time:
            clock = "processor"
        record = {"environment": machine, "clock": clock, "results": results}
        if options.merge and options.out.exists():
            record = merge_records(json.loads(options.out.read_text()), record)
        write_record(options.out, record)


def merge_records(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return problems and sizes of both records; the new ones replace the old ones."""
    if any(old[key] != new[key] for key in ("environment", "clock")):
        raise SystemExit(f"the record is from {old['environment']} by {old['clock']} time")
    results = dict(old["results"])
    for name, result in new["results"].items():
        sizes = results.get(name, {}).get("sizes", {})
        sizes |= {str(n): size for n, size in result["sizes"].items()}
        ordered = {n: sizes[n] for n in sorted(sizes, key=int)}
        results[name] = {"error": result["error"], "sizes": ordered}
    return {**new, "results": results}
