"""The orthogonal greedy solve against the least that it could cost, and against the naive loop.

    pullback bench greedy [--device cuda] [--forms rows dense matrix-free] [--vectors 500]

*floor*: the k products that the selection needs in this form (and, matrix-free, those for the
diagonal of G), and one Cholesky factorization of a k × k block. *naive*: matching pursuit that
forms and factorizes the block anew for every vector. The routes take turns within one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.grams import Dense, Gram, Operator, Rows
from pullback.solvers import OrthogonalGreedy

from ..framework.benchmark import Record, make_parser
from ..framework.timing import compare, describe_machine

Route = Callable[[], Any]


def problem(n: int, p: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A with correlated columns, and r."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(n, p, generator=generator, dtype=dtype)
    a += torch.randn(n, 1, generator=generator, dtype=dtype)
    a *= torch.logspace(0, -2, p, dtype=dtype)
    r = torch.randn(n, generator=generator, dtype=dtype)
    return a.to(device), r.to(device)


def ours(gram: Gram, g: Tensor, r: Tensor | None, k: int, **options: Any) -> Route:
    solver = OrthogonalGreedy(k, **options)
    return lambda: solver.solve(solver.init(gram), g, whitened=r).x


def floor(product: Route, gradient: Tensor, k: int, other: Route = lambda: None) -> Route:
    block = torch.eye(k, dtype=gradient.dtype, device=gradient.device) + 0.5

    def route() -> None:
        other()
        for _ in range(k):
            product()
        torch.linalg.cholesky(block)

    return route


def naive(a: Tensor, g: Tensor, k: int) -> Route:
    """Select greedily, computing ρ = g − Aᵀ(A h) and a Cholesky factor of A_IᵀA_I per vector."""

    def route() -> Tensor:
        length = a.norm(dim=0)
        h = torch.zeros_like(g)
        chosen = torch.empty(0, dtype=torch.long, device=g.device)
        columns = a[:, :0]
        for _ in range(k):
            score = (g - a.T @ (columns @ h[chosen])).abs() / length
            score[chosen] = -1
            chosen = torch.cat([chosen, score.argmax()[None]])
            columns = a[:, chosen]
            lower = torch.linalg.cholesky(columns.T @ columns)
            h = torch.zeros_like(g)
            h[chosen] = torch.cholesky_solve(g[chosen, None], lower)[:, 0]
        return h

    return route


def from_rows(a: Tensor, r: Tensor, k: int) -> dict[str, Route]:
    g = a.T @ r
    gram = Rows(a)
    return {
        "floor": floor(lambda: a.T @ r, g, k),
        "greedy": ours(gram, g, r, k),
        "greedy, decrease": ours(gram, g, r, k, rule="decrease"),
        "greedy, block of 10": ours(gram, g, r, k, block=10),
        "naive": naive(a, g, k),
    }


def from_dense(a: Tensor, r: Tensor, k: int) -> dict[str, Route]:
    g = a.T @ r
    gram = Dense(a.T @ a, len(a))
    return {
        "floor": floor(lambda: gram.matvec(g), g, k),
        "greedy": ours(gram, g, None, k),
        "greedy, decrease": ours(gram, g, None, k, rule="decrease"),
    }


def matrix_free(a: Tensor, r: Tensor, k: int) -> dict[str, Route]:
    n, p = a.shape
    g = a.T @ r
    gram = Operator(a.matmul, a.T.matmul, (n, p), a.dtype, a.device)
    return {
        "floor": floor(lambda: a.T @ (a @ g), g, k, gram.diagonal),
        "greedy": ours(gram, g, r, k),
        "greedy, decrease": ours(gram, g, r, k, rule="decrease"),
        "greedy, block of 10": ours(gram, g, r, k, block=10),
    }


FORMS = {"rows": from_rows, "dense": from_dense, "matrix-free": matrix_free}


def measure(name: str, a: Tensor, r: Tensor, k: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}

    def keep_answer(route: str, run: Route) -> Route:
        return lambda: answers.update({route: run()})

    routes = {route: keep_answer(route, run) for route, run in FORMS[name](a, r, k).items()}
    times = compare(routes, a.device, repeats=3, warmup=0, patience=10.0)
    ratios = {route: times[route] / times["floor"] for route in times}
    n, p = a.shape
    print(f"\n{name}, {a.dtype}: n = {n}, p = {p}, k = {k}")
    for route, seconds in times.items():
        print(f"  {route:20} {seconds:8.3f} s {ratios[route]:7.2f}×")
    out = {
        "rows": n,
        "parameters": p,
        "vectors": k,
        "dtype": str(a.dtype),
        "seconds": times,
        "ratio": ratios,
    }
    if "naive" in answers:
        difference = (answers["greedy"] - answers["naive"]).norm() / answers["naive"].norm()
        out["difference_from_naive"] = float(difference)
        print(f"  greedy differs from naive by {float(difference):.1e}")
    return out


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--vectors", type=int, default=500)
    parser.add_argument("--dtype", default="float64", choices=["float32", "float64"])
    parser.add_argument("--out", type=Path, default=None, help="results are added to this file")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    print(describe_machine(device))
    a, r = problem(options.rows, options.parameters, device, dtype)
    record = Record.on_device(options.out, device)
    for name in options.forms:
        record.put(name, measure(name, a, r, options.vectors))
