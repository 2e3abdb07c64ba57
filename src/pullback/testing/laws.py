"""Laws that every Gram, metric and solver keeps, as assertions that a third party can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._core.errors import Status
from ..grams import FactoredGram, Gram
from ..metrics import Factor, Metric
from ..solvers import Relative, Solution, Solver


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return ‖value − expected‖/‖expected‖, or ‖value‖ where `expected` vanishes.

    >>> import torch
    >>> relative_error(torch.tensor([1.5]), torch.tensor([1.0]))
    0.5
    """
    if value.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(value.shape)} and {tuple(expected.shape)}")
    size = float(expected.detach().double().norm())
    error = float((value.detach().double() - expected.detach().double()).norm())
    if size > 0:
        return error / size
    return error


def assert_close(value: Tensor, expected: Tensor, tol: float, law: str) -> None:
    """Raise unless the relative error is at most `tol`; NaN never passes."""
    error = relative_error(value, expected)
    if not error <= tol:
        raise AssertionError(f"{law}: relative error {error:.3e}, allowed {tol:.1e}")


def _make_draw(template: Tensor) -> Callable[..., Tensor]:
    """Return a function (*shape) ↦ random numbers like the template, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(template)

    return draw


#: relative tolerance of laws in units of ε: sums of a thousand terms lose three digits
_TOLERANCE_IN_EPS = 1000


def check_gram(gram: Gram, *, tol: float | None = None) -> None:
    """`matvec` is linear, symmetric and ≥ 0; `dense`, `diagonal`, `trace` and, where there is a
    factor, `project`, `lift`, `rows` and `kernel` agree with it.

    >>> from pullback.grams import Rows
    >>> check_gram(Rows(torch.randn(3, 5)))
    """
    if tol is None:
        tol = _TOLERANCE_IN_EPS * torch.finfo(gram.dtype).eps
    draw = _make_draw(torch.empty(0, dtype=gram.dtype, device=gram.device))
    u = draw(gram.size)
    v = draw(gram.size)
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
    """Check every law of a metric at function values z, (N, *event).

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
    if tol is None:
        tol = _TOLERANCE_IN_EPS * torch.finfo(z.dtype).eps
    draw = _make_draw(z)
    n = z.shape[0]
    white = factor.white
    u = draw(*z.shape)
    v = draw(*z.shape)
    r = draw(n, *white)
    _check_finite(factor, v, r)
    _check_equal_products("⟨S r, v⟩ = ⟨r, Sᵀv⟩", factor.apply(r), v, r, factor.transpose(v), tol)
    _check_symmetric(factor, u, v, tol)
    _check_batches(factor, draw(3, n, *white), draw(3, *z.shape), tol)
    if not factor.couples_samples:
        _check_samples_independent(factor, v, r)
        _check_covectors(factor, z, r, tol)
    _check_whitening(factor, r, max(tol, torch.finfo(z.dtype).eps ** 0.5))


def _check_finite(factor: Factor, v: Tensor, r: Tensor) -> None:
    named = {"S r": factor.apply(r), "Sᵀv": factor.transpose(v), "M v": factor.matvec(v)}
    for name, value in named.items():
        if not bool(torch.isfinite(value).all()):
            raise AssertionError(f"{name} is not finite: {value}")


def _check_equal_products(law: str, x: Tensor, v: Tensor, r: Tensor, y: Tensor, tol: float) -> None:
    """Check ⟨x, v⟩ = ⟨r, y⟩, to `tol` of their lengths."""
    scale = float(x.norm() * v.norm() + r.norm() * y.norm())
    gap = abs(float((x * v).sum() - (r * y).sum()))
    if not gap <= tol * scale:
        raise AssertionError(f"{law}: the two sides differ by {gap:.3e} of {scale:.3e}")


def _check_symmetric(factor: Factor, u: Tensor, v: Tensor, tol: float) -> None:
    mu = factor.matvec(u)
    mv = factor.matvec(v)
    _check_equal_products("M is symmetric", mu, v, u, mv, tol)
    energy = float((v * mv).sum())
    if not energy >= -tol * float(v.norm() * mv.norm()):
        raise AssertionError(f"M is positive semidefinite: ⟨v, M v⟩ = {energy:.3e}")
    assert_close(mv, factor.apply(factor.transpose(v)), tol, "M v = S (Sᵀ v)")


def _check_batches(factor: Factor, r: Tensor, v: Tensor, tol: float) -> None:
    assert_close(
        factor.apply(r), torch.stack([factor.apply(x) for x in r]), tol, "S takes leading axes"
    )
    one_by_one = torch.stack([factor.transpose(x) for x in v])
    assert_close(factor.transpose(v), one_by_one, tol, "Sᵀ takes leading axes")


def _check_covectors(factor: Factor, z: Tensor, r: Tensor, tol: float) -> None:
    covectors = factor.covectors(z)
    combined = torch.einsum("rn...,nr->n...", covectors, r.reshape(len(r), -1))
    assert_close(combined, factor.apply(r), tol, "Σ r_k covector_k = S r")


def _check_samples_independent(factor: Factor, v: Tensor, r: Tensor) -> None:
    """Check that a change in sample 0 changes the result for sample 0 alone."""
    other_r = r.clone()
    other_v = v.clone()
    other_r[0] = 0
    other_v[0] = 0
    pairs = ((factor.apply, r, other_r), (factor.transpose, v, other_v))
    for product, one, two in pairs:
        if not torch.equal(product(one)[1:], product(two)[1:]):
            raise AssertionError("S couples samples, and does not declare couples_samples")


def _check_whitening(factor: Factor, r: Tensor, tol: float) -> None:
    g = factor.apply(r)
    whitened = factor.whiten(g)
    if whitened.value is None:
        if whitened.status is not Status.NOT_REPRESENTABLE:
            raise AssertionError(f"whiten failed with status {whitened.status.name}")
        return
    assert_close(factor.apply(whitened.value), g, tol, "S whiten(g) = g for g in the range of S")


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
    size = gram.count if isinstance(gram, FactoredGram) else gram.size
    c = torch.randn(size, generator=generator).to(gram.device, gram.dtype)
    right_sides: dict[str, Tensor | None] = {"g": None}
    if isinstance(gram, FactoredGram):
        g = gram.lift(c)
        right_sides["r"] = c
    else:
        g = gram.matvec(c)
    state = solver.init(gram)
    first = _solve(solver, state, g, None, dampings[0])
    for damping in dampings:
        expected = _solve_densely(gram, g, damping)
        for origin, whitened in right_sides.items():
            solution = _solve(solver, state, g, whitened, damping)
            assert_close(solution.x, expected, tol, f"(G + {damping:g})⁻¹g from {origin}")
            if solution.damping != damping:
                raise AssertionError(f"the damping used was {solution.damping}, not {damping}")
    repeated = _solve(solver, state, g, None, dampings[0])
    assert_close(repeated.x, first.x, 0.0, "solving does not change the state")
    _check_relative(solver, state, gram, g, tol)


def _solve(
    solver: Solver, state: object, g: Tensor, whitened: Tensor | None, damping: float
) -> Solution:
    solution = solver.solve(state, g, damping, whitened=whitened)
    if not solution.status.ok:
        raise AssertionError(f"the solve failed: {solution.status.value}")
    return solution


def _solve_densely(gram: Gram, g: Tensor, damping: float) -> Tensor:
    eye = torch.eye(gram.size, dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram.dense() + damping * eye, g)


def _check_relative(solver: Solver, state: object, gram: Gram, g: Tensor, tol: float) -> None:
    """Check that Relative(c) is c·tr(G)/p."""
    absolute = 0.1 * float(gram.trace()) / gram.size
    if absolute > 0:
        solution = solver.solve(state, g, Relative(0.1))
        assert_close(
            solution.x, _solve_densely(gram, g, absolute), tol, "Relative(c) means c·tr(G)/p"
        )
