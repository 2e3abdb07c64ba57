"""Laws that every Gram, metric and solver keeps, as assertions that a third party can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._core.errors import Status
from ..grams import FactoredGram, Gram
from ..metrics import Factor, Metric
from ..solvers import Relative, Solution, Solver


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖/‖want‖, or ‖got‖ where want vanishes.

    >>> import torch
    >>> relative_error(torch.tensor([1.5]), torch.tensor([1.0]))
    0.5
    """
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: {tuple(got.shape)} and {tuple(want.shape)}")
    size = float(want.detach().double().norm())
    error = float((got.detach().double() - want.detach().double()).norm())
    return error / size if size > 0 else error


def assert_close(got: Tensor, want: Tensor, tol: float, law: str) -> None:
    """Raise unless the relative error is at most `tol`; NaN never passes."""
    error = relative_error(got, want)
    if not error <= tol:
        raise AssertionError(f"{law}: relative error {error:.3e}, allowed {tol:.1e}")


def _noise(like: Tensor) -> Callable[..., Tensor]:
    """(*shape) ↦ random numbers, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def check_gram(gram: Gram, *, tol: float | None = None) -> None:
    """`matvec` is linear, symmetric and ≥ 0; `dense`, `diagonal`, `trace` and, where there is a
    factor, `project`, `lift`, `rows` and `kernel` agree with it.

    >>> from pullback.grams import Rows
    >>> check_gram(Rows(torch.randn(3, 5)))
    """
    tol = 1000 * torch.finfo(gram.dtype).eps if tol is None else tol
    draw = _noise(torch.empty(0, dtype=gram.dtype, device=gram.device))
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


def check_metric(
    metric: Metric, z: Tensor, inputs: Tensor | None = None, *, tol: float | None = None
) -> None:
    """Every law of a metric at function values z, (N, *event).

    Args:
        metric: what to check.
        z: function values, samples first.
        inputs: the model's inputs, for metrics that depend on them.
        tol: relative tolerance; by default 1000·ε of z's dtype.

    >>> from pullback.metrics import Euclidean
    >>> check_metric(Euclidean(), torch.randn(4, 3))
    """
    samples = metric.samples(z)
    if not samples > 0:
        raise AssertionError(f"samples(z) counts samples of a mean: got {samples}")
    check_factor(metric.factor(z, inputs=inputs), z, tol=tol)


def check_factor(factor: Factor, z: Tensor, *, tol: float | None = None) -> None:
    """Sᵀ is the transpose of S, M v = S Sᵀv is symmetric and ≥ 0, batches agree with loops,
    `covectors` are S's columns, samples stay apart unless declared, and S(whiten(S r)) = S r.
    """
    tol = 1000 * torch.finfo(z.dtype).eps if tol is None else tol
    draw = _noise(z)
    n, white = z.shape[0], factor.white
    u, v, r = draw(*z.shape), draw(*z.shape), draw(n, *white)
    _finite(factor, v, r)
    _equal_products("⟨S r, v⟩ = ⟨r, Sᵀv⟩", factor.apply(r), v, r, factor.transpose(v), tol)
    _symmetric(factor, u, v, tol)
    _batched(factor, draw(3, n, *white), draw(3, *z.shape), tol)
    if not factor.couples_samples:
        _separate(factor, v, r)
        _columns(factor, z, r, tol)
    _inverse(factor, r, max(tol, torch.finfo(z.dtype).eps ** 0.5))


def _finite(factor: Factor, v: Tensor, r: Tensor) -> None:
    named = {"S r": factor.apply(r), "Sᵀv": factor.transpose(v), "M v": factor.matvec(v)}
    for name, value in named.items():
        if not bool(torch.isfinite(value).all()):
            raise AssertionError(f"{name} is not finite: {value}")


def _equal_products(law: str, x: Tensor, v: Tensor, r: Tensor, y: Tensor, tol: float) -> None:
    """⟨x, v⟩ = ⟨r, y⟩, to `tol` of their lengths."""
    scale = float(x.norm() * v.norm() + r.norm() * y.norm())
    gap = abs(float((x * v).sum() - (r * y).sum()))
    if not gap <= tol * scale:
        raise AssertionError(f"{law}: the two sides differ by {gap:.3e} of {scale:.3e}")


def _symmetric(factor: Factor, u: Tensor, v: Tensor, tol: float) -> None:
    mu, mv = factor.matvec(u), factor.matvec(v)
    _equal_products("M is symmetric", mu, v, u, mv, tol)
    energy = float((v * mv).sum())
    if not energy >= -tol * float(v.norm() * mv.norm()):
        raise AssertionError(f"M is positive semidefinite: ⟨v, M v⟩ = {energy:.3e}")
    assert_close(mv, factor.apply(factor.transpose(v)), tol, "M v = S (Sᵀ v)")


def _batched(factor: Factor, r: Tensor, v: Tensor, tol: float) -> None:
    assert_close(
        factor.apply(r), torch.stack([factor.apply(x) for x in r]), tol, "S takes leading axes"
    )
    one_by_one = torch.stack([factor.transpose(x) for x in v])
    assert_close(factor.transpose(v), one_by_one, tol, "Sᵀ takes leading axes")


def _columns(factor: Factor, z: Tensor, r: Tensor, tol: float) -> None:
    covectors = factor.covectors(z)
    combined = torch.einsum("rn...,nr->n...", covectors, r.flatten(1))
    assert_close(combined, factor.apply(r), tol, "Σ r_k covector_k = S r")


def _separate(factor: Factor, v: Tensor, r: Tensor) -> None:
    """A change in sample 0 is felt in sample 0 alone."""
    other_r, other_v = r.clone(), v.clone()
    other_r[0], other_v[0] = 0, 0
    pairs = ((factor.apply, r, other_r), (factor.transpose, v, other_v))
    for product, one, two in pairs:
        if not torch.equal(product(one)[1:], product(two)[1:]):
            raise AssertionError("S couples samples, and does not declare couples_samples")


def _inverse(factor: Factor, r: Tensor, tol: float) -> None:
    g = factor.apply(r)
    found = factor.whiten(g)
    if found.value is None:
        if found.status is not Status.NOT_REPRESENTABLE:
            raise AssertionError(f"whiten failed with status {found.status.name}")
        return
    assert_close(factor.apply(found.value), g, tol, "S whiten(g) = g for g in the range of S")


def check_solver(
    solver: Solver, gram: Gram, *, dampings: Sequence[float] = (1e-2, 1.0), tol: float = 1e-8
) -> None:
    """(G + λ)⁻¹g for each damping from one `init`, from g and from r, against a dense solve.

    Args:
        solver: what to check; it must be exact (a truncated or sketched solver is not).
        gram: the system, well conditioned once damped, preferably in float64.
        dampings: absolute values λ > 0.
        tol: relative error allowed.

    >>> from pullback.grams import Rows
    >>> from pullback.solvers import Cholesky
    >>> check_solver(Cholesky(), Rows(torch.randn(3, 5, dtype=torch.float64)))
    """
    generator = torch.Generator().manual_seed(0)
    factored = isinstance(gram, FactoredGram)
    noise = torch.randn(gram.count if factored else gram.size, generator=generator)
    c = noise.to(gram.device, gram.dtype)
    g, r = (gram.lift(c), c) if isinstance(gram, FactoredGram) else (gram.matvec(c), None)
    state = solver.init(gram)
    first = _solved(solver, state, g, None, dampings[0])
    for damping in dampings:
        want = _dense(gram, g, damping)
        for white in (None, r) if factored else (None,):
            found = _solved(solver, state, g, white, damping)
            origin = "g" if white is None else "r"
            assert_close(found.x, want, tol, f"(G + {damping:g})⁻¹g from {origin}")
            if found.damping != damping:
                raise AssertionError(f"the damping used was {found.damping}, not {damping}")
    again = _solved(solver, state, g, None, dampings[0])
    assert_close(again.x, first.x, 0.0, "solving does not change the state")
    _check_relative(solver, state, gram, g, tol)


def _solved(
    solver: Solver, state: object, g: Tensor, white: Tensor | None, damping: float
) -> Solution:
    found = solver.solve(state, g, damping, whitened=white)
    if not found.status.ok:
        raise AssertionError(f"the solve failed: {found.status.value}")
    return found


def _dense(gram: Gram, g: Tensor, damping: float) -> Tensor:
    eye = torch.eye(gram.size, dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram.dense() + damping * eye, g)


def _check_relative(solver: Solver, state: object, gram: Gram, g: Tensor, tol: float) -> None:
    """Relative(c) is c·tr(G)/p."""
    absolute = 0.1 * float(gram.trace()) / gram.size
    if absolute > 0:
        found = solver.solve(state, g, Relative(0.1))
        assert_close(found.x, _dense(gram, g, absolute), tol, "Relative(c) means c·tr(G)/p")
