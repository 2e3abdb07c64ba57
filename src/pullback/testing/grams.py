"""Laws of Grams: every view of G is a view of the same symmetric, positive semidefinite G."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grams import FactoredGram, Gram
from .assertions import assert_close


def check_gram(gram: Gram, *, tol: float | None = None) -> None:
    """`matvec` is linear, symmetric and ≥ 0; `dense`, `diagonal`, `trace` and, where there is a
    factor, `project`, `lift`, `rows` and `kernel` agree with it.

    >>> from pullback.grams import Rows
    >>> check_gram(Rows(torch.randn(3, 5)))
    """
    tol = 1000 * torch.finfo(gram.dtype).eps if tol is None else tol
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> Tensor:
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        return noise.to(gram.device, gram.dtype)

    u, v = draw(gram.size), draw(gram.size)
    g = gram.dense()
    if g.shape != (gram.size, gram.size):
        raise AssertionError(f"dense() is p × p: got {tuple(g.shape)} for p = {gram.size}")
    assert_close(gram.matvec(v), g @ v, tol, "matvec(v) = dense() v")
    assert_close(
        gram.matvec(2 * u - v), 2 * gram.matvec(u) - gram.matvec(v), tol, "matvec is linear"
    )
    assert_close(g.T, g, tol, "G is symmetric")
    lowest = float(torch.linalg.eigvalsh(g)[0])
    if not lowest >= -tol * float(g.norm()):
        raise AssertionError(f"G is positive semidefinite: lowest eigenvalue {lowest:.3e}")
    assert_close(gram.diagonal(), g.diagonal(), tol, "diagonal() is the diagonal of dense()")
    assert_close(gram.trace(), g.diagonal().sum(), tol, "trace() is the trace of dense()")
    if gram.structure.low_rank != (gram.count < gram.size):
        raise AssertionError(f"structure.low_rank is wrong for {gram.count} × {gram.size}")
    if gram.structure.factored != isinstance(gram, FactoredGram):
        raise AssertionError("structure.factored says whether project and lift exist")
    if isinstance(gram, FactoredGram):
        _check_factor(gram, v, draw(gram.count), tol)


def _check_factor(gram: FactoredGram, v: Tensor, c: Tensor, tol: float) -> None:
    a = gram.rows()
    if a.shape != (gram.count, gram.size):
        raise AssertionError(f"rows() is n × p: got {tuple(a.shape)}")
    assert_close(gram.project(v), a @ v, tol, "project(v) = rows() v")
    assert_close(gram.lift(c), a.T @ c, tol, "lift(c) = rows()ᵀ c")
    assert_close(gram.matvec(v), gram.lift(gram.project(v)), tol, "G = AᵀA")
    assert_close(gram.kernel(), a @ a.T, tol, "kernel() = rows() rows()ᵀ")
    norms = gram.row_norms()
    if norms is not None:
        assert_close(norms, a.norm(dim=1), max(tol, tol**0.5), "row_norms() are those of rows()")
