"""What single parts of K-FAC gain on a GPU: the natural rule's steps with one part switched off.

    pullback bench kfac-parts [--device cuda] [--repeats 6] [--only NAME ...] [--out FILE]

All variants take turns with the baseline. A part is worth its code if the step by the schedule
10/100 is at least 3 % longer without it, or the peak memory larger. On a CPU no part is in use, and
the ratios show the noise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pullback.grams.kronecker import cholesky_inverse
from pullback.optim.kfac.rules import natural

from ..framework.benchmark import RESULTS, Record, make_parser, use_tensor_cores
from ..framework.timing import compare, peak_bytes
from .kfac import IN_A_ROW, NEVER, SCHEDULES, Bench, predict_schedule_ratio, repeat_step
from .kfac_cases import cases

#: parts, with the module and the test by which each is chosen
PARTS = {
    "float16 inverses": (natural, "pays_in_half"),
    "inverses by panels": (cholesky_inverse, "_has_panels"),
}
STEP_TYPES = {"plain": (NEVER, NEVER), "statistics": (1, NEVER), "inversion": (1, 1)}
SCHEDULE = "10/100"


@contextmanager
def switch_off(part: str | None) -> Iterator[None]:
    """Leave a part out of what runs meanwhile; None leaves all in."""
    if part is None:
        yield
        return
    module, name = PARTS[part]
    with mock.patch.object(module, name, return_value=False):
        yield


def run_without(part: str | None, run: Callable[[], Any]) -> Callable[[], Any]:
    """Return the same function with a part switched off."""

    def wrapped() -> None:
        with switch_off(part):
            run()

    return wrapped


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Return, for all parts and without each, milliseconds by type of step, ratio and memory."""
    row = IN_A_ROW[bench.device.type]
    routes = {"baseline": repeat_step(bench.route(bench.baseline), row)}
    for part in (None, *PARTS):
        for step_type, schedule in STEP_TYPES.items():
            step = bench.route(bench.kfac(*schedule))
            routes[f"{part} {step_type}"] = run_without(part, repeat_step(step, row))
    seconds = compare(routes, bench.device, repeats=repeats, warmup=3, patience=20)
    routes.clear()
    results: dict[str, Any] = {}
    for part in (None, *PARTS):
        gc.collect()
        step = run_without(part, repeat_step(bench.route(bench.kfac(*SCHEDULES[SCHEDULE])), 12))
        label = "all parts"
        if part is not None:
            label = f"without {part}"
        milliseconds = {t: 1e3 * seconds[f"{part} {t}"] / row for t in STEP_TYPES}
        results[label] = {
            "milliseconds": milliseconds,
            SCHEDULE: predict_schedule_ratio(seconds, str(part), SCHEDULES[SCHEDULE]),
            "MiB": peak_bytes(step, bench.device) / 2**20,
        }
    return results


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--repeats", type=int, default=6)
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
        results = measure(Bench(available[name], device), options.repeats)
        record.put(name, results)
        for label, numbers in results.items():
            steps = "  ".join(f"{t} {ms:.2f} ms" for t, ms in numbers["milliseconds"].items())
            print(
                f"{name:12} {label:28} {numbers[SCHEDULE]:.3f}  {steps}  {numbers['MiB']:.0f} MiB"
            )


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
