"""Times and memory of competing routes, measured in turn within one run."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that times mean something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_cpu_seconds() -> AbstractContextManager[Any]:
    """Make budgets inside it CPU seconds of this process, which a busy machine does not shorten."""
    return patch.object(time, "perf_counter", time.process_time)


def compare(
    routes: dict[str, Callable[[], Any]],
    device: torch.device,
    repeats: int = 5,
    warmup: int = 1,
    patience: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return median seconds per route; routes take turns, so that drift affects all of them.

    A route that has used up `patience` seconds is not repeated any more. `time.process_time` as the
    clock counts the processor's seconds, which other programs on the machine do not lengthen.
    """
    times: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(warmup + repeats):
        for name, route in routes.items():
            if sum(times[name]) > patience:
                continue
            synchronize(device)
            start = clock()
            route()
            synchronize(device)
            times[name].append(clock() - start)
    return {name: statistics.median(values[warmup:] or values) for name, values in times.items()}


def first_and_later(
    step: Callable[[], Any],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    steps: int = 7,
) -> tuple[float, float]:
    """Return the seconds of K-FAC's first step and of a later statistics step.

    Statistics are to be taken on every step and inverses as seldom as possible: then the first,
    second, fourth, eighth step and so on invert too. The last four others are the later ones.
    """
    took = []
    for _ in range(steps):
        synchronize(device)
        start = clock()
        step()
        synchronize(device)
        took.append(clock() - start)
    later = [seconds for count, seconds in enumerate(took, 1) if count & (count - 1)]
    return took[0], statistics.median(later[-4:])


def measure_kernel_seconds(route: Callable[[], Any], device: torch.device, steps: int = 1) -> float:
    """Return the GPU's own seconds per step: its kernels and copies, not the waits between."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(steps):
            route()
        synchronize(device)
    events = trace.events() or []
    spent = [e.device_time for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(spent) / steps / 1e6


def peak_bytes(route: Callable[[], Any], device: torch.device) -> int:
    """Return the peak device memory of a route; on the CPU the process's peak so far."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        route()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    route()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_machine(device: torch.device) -> str:
    """Return the versions and the device on which times depend, in a line."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = "CPU"
    return f"torch {torch.__version__}, {name}, {torch.get_num_threads()} CPU threads"
