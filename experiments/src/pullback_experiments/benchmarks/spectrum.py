"""The singular value decomposition behind `PseudoInverse`, beside torch's own.

    pullback bench spectrum [--device cuda] [--only 4000x449 ...] [--out FILE]

Time of the decomposition together with x = A⁺r, in float64 and float32, for matrices of condition
1e10 (float32: 1e4), and the error of x against the x that A was made with. The result is written to
experiments/results/spectrum-<device>.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback._core.svd import svd

from ..framework.benchmark import RESULTS, make_parser, write_results
from ..framework.timing import compare, describe_machine

#: what a CPU does in seconds
SMALL = ((1000, 129), (4000, 449), (300, 3000))
SIZES = (*SMALL, (4096, 1024), (8000, 2000), (3000, 12000))
LARGE = ((20000, 5000),)
CONDITION = {torch.float64: 1e10, torch.float32: 1e4}


def matrix(n: int, p: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return A with a geometric spectrum, and x with equal shares of its right singular vectors."""
    k = min(n, p)
    generator = torch.Generator(device).manual_seed(0)

    def draw(m: int) -> Tensor:
        noise = torch.randn(m, k, generator=generator, dtype=torch.float64, device=device)
        return torch.linalg.qr(noise).Q

    v = draw(p)
    sigma = CONDITION[dtype] ** -torch.linspace(0, 1, k, dtype=torch.float64, device=device)
    return ((draw(n) * sigma) @ v.T).to(dtype), v.sum(1).to(dtype)


def by_torch(a: Tensor, r: Tensor) -> Tensor:
    u, sigma, vt = torch.linalg.svd(a, full_matrices=False)
    return vt.T @ ((u.T @ r) / sigma)


def by_pullback(a: Tensor, r: Tensor) -> Tensor:
    decomposition = svd(a)
    return decomposition.combine(decomposition.left(r) / decomposition.sigma)


ROUTES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": by_torch,
    "pullback": by_pullback,
}


def measure(n: int, p: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    a, want = matrix(n, p, dtype, device)
    r = (a.double() @ want.double()).to(dtype)
    errors = {
        name: float((route(a, r) - want).norm() / want.norm()) for name, route in ROUTES.items()
    }
    routes = {name: lambda route=route: route(a, r) for name, route in ROUTES.items()}
    times = compare(routes, device, repeats=3, warmup=1, patience=20.0)
    ratio = times["torch"] / times["pullback"]
    precision = str(dtype).removeprefix("torch.")
    cells = "".join(f"{1e3 * times[name]:12.1f}{errors[name]:10.1e}" for name in ROUTES)
    print(f"{n:6} × {p:<6} {precision:8}{cells}{ratio:9.1f}×", flush=True)
    return {
        "rows": n,
        "parameters": p,
        "dtype": precision,
        "milliseconds": {name: 1e3 * t for name, t in times.items()},
        "error": errors,
        "ratio": ratio,
    }


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=None, metavar="NxP")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cpu":
        sizes = SMALL
    else:
        sizes = SIZES + LARGE
    if options.only:
        sizes = tuple(s for s in SIZES + LARGE if f"{s[0]}x{s[1]}" in options.only)
    print(describe_machine(device))
    heads = "".join(f"{name + ' ms':>12}{'error':>10}" for name in ROUTES)
    print(f"{'rows × parameters':24}{heads}{'ratio':>9}")
    results = []
    for dtype in CONDITION:
        results += [measure(n, p, dtype, device) for n, p in sizes]
    out = options.out or RESULTS / f"spectrum-{device.type}.json"
    write_results(out, device, results)
