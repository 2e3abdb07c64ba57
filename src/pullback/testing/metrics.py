"""Laws of metrics: M = S Sᵀ is symmetric, positive semidefinite, and `whiten` inverts S."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.errors import Status
from ..metrics import Factor, Metric
from .assertions import assert_close


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
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return noise.to(z)

    n, white = z.shape[0], factor.white
    u, v, r = draw(*z.shape), draw(*z.shape), draw(n, *white)
    _finite(factor, v, r)
    _adjoint(factor, v, r, tol)
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


def _adjoint(factor: Factor, v: Tensor, r: Tensor, tol: float) -> None:
    image, back = factor.apply(r), factor.transpose(v)
    scale = float(image.norm() * v.norm() + r.norm() * back.norm())
    gap = abs(float((image * v).sum() - (r * back).sum()))
    if not gap <= tol * scale:
        raise AssertionError(f"⟨S r, v⟩ = ⟨r, Sᵀv⟩: they differ by {gap:.3e} of {scale:.3e}")


def _symmetric(factor: Factor, u: Tensor, v: Tensor, tol: float) -> None:
    mu, mv = factor.matvec(u), factor.matvec(v)
    scale = float(mu.norm() * v.norm() + u.norm() * mv.norm())
    gap = abs(float((mu * v).sum() - (u * mv).sum()))
    if not gap <= tol * scale:
        raise AssertionError(f"M is symmetric: the two sides differ by {gap:.3e} of {scale:.3e}")
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
