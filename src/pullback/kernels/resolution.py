r"""Does an empirical loss have a gradient among functions? Shown by refining the grid.

The loss ℓ(f) = Σ_i L(f(x_i)) has the differential h ↦ Σ_i e_i h(x_i). On a circle with n grid
points the inner product ⟨f, g⟩ = ∫ f (1 − ∂²)^s g of H^s is a matrix M, and the gradient
M⁻¹Σ_i e_i δ_i has

    ‖∇ℓ‖² = Σ_ij e_i e_j (M⁻¹)(x_i, x_j).

In L² (s = 0) this grows as n without end: the gradient is a sum of delta functions, which are not
in the space. It converges, to the reproducing kernel's value, exactly for s > 1/2, half the
dimension.
"""

from __future__ import annotations

from math import inf, isfinite, pi

import torch
from torch import Tensor

from .._core.errors import PullbackError


def gradient_norm(
    points: Tensor, residuals: Tensor, resolution: int, *, order: float = 0.0, length: float = 20.0
) -> Tensor:
    """‖∇ℓ‖ in H^s on a grid of `resolution` points.

    Args:
        points: x_i, (k,), rounded to the grid; those of two grids agree if they lie on the coarser.
        residuals: e_i = L'(f(x_i)), (k,).
        resolution: n.
        order: s; 0 is L².
        length: of the circle. On a long one the kernels are those of the line, ½e^(−d) for s = 1
            and ¼e^(−d)(1 + d) for s = 2.

    >>> x, e = torch.tensor([0.0, 5.0]), torch.tensor([1.0, -1.0])
    >>> [round(float(gradient_norm(x, e, n, order=0.0)), 2) for n in (100, 400, 1600)]
    [3.16, 6.32, 12.65]
    >>> [round(float(gradient_norm(x, e, n, order=2.0)), 2) for n in (100, 400, 1600)]
    [0.69, 0.69, 0.69]
    """
    if points.shape != residuals.shape or points.ndim != 1 or not len(points):
        raise PullbackError(
            "The loss has no points",
            f"points {tuple(points.shape)}, residuals {tuple(residuals.shape)}",
            "Pass as many residuals as points, at least one",
        )
    if (
        not isinstance(resolution, int)
        or resolution < 2
        or not 0 < length < inf
        or not isfinite(order)
    ):
        raise PullbackError(
            "There is no grid, or no space on it",
            f"resolution={resolution}, length={length}, order={order}",
            "Use n ≥ 2, a finite length > 0 and a finite order",
        )
    if not bool((torch.isfinite(points) & torch.isfinite(residuals)).all()):
        raise PullbackError("The loss is not finite", "points or residuals are not", "Check them")
    # in double precision: the symbol spans (1 + ξ²)^s
    e = residuals.double()
    spacing = length / resolution
    index = torch.round(points.double() / spacing).long() % resolution
    source = torch.zeros(resolution, dtype=torch.float64, device=points.device)
    source.index_add_(0, index, e)
    frequency = 2 * pi * torch.fft.fftfreq(resolution, spacing, dtype=torch.float64)
    symbol = (1 + frequency.to(points.device).square()) ** order
    # M = spacing · F⁻¹ diag(symbol) F, for sums over the grid in place of integrals
    gradient = torch.fft.ifft(torch.fft.fft(source) / (spacing * symbol)).real
    return (source * gradient).sum().clamp(min=0).sqrt()


def fisher_rao_gradient(
    p: Tensor, index: Tensor, residuals: Tensor, spacing: float = 1.0
) -> Tensor:
    r"""The Fisher–Rao gradient p Σ_i e_i δ_i − p Σ_i p(x_i) e_i of ℓ(p) = Σ_i L(p(x_i)) on a grid.

    The metric is ∫ h₁h₂/p; with 1/p², as it is sometimes printed, neither the pairing with a
    variation nor the integral would come out right. The variations h of a density have ∫h = 0, and
    so has this gradient. δ_i is 1/spacing at one grid point: its norm grows without end as in L².

    Args:
        p: a positive density on the grid, (n,), with Σ p·spacing = 1.
        index: the grid points of the data, (k,).
        residuals: e_i = L'(p(x_i)), (k,).
        spacing: of the grid.

    >>> p = torch.tensor([0.5, 0.25, 0.25])
    >>> fisher_rao_gradient(p, torch.tensor([0]), torch.tensor([1.0]))
    tensor([ 0.2500, -0.1250, -0.1250])
    """
    total = float(p.sum() * spacing)
    positive = p.ndim == 1 and bool((p > 0).all()) and abs(total - 1) < 1e-3
    whole = not index.is_floating_point() and index.shape == residuals.shape
    placed = whole and bool(((index >= 0) & (index < len(p))).all())
    if not positive or not placed:
        raise PullbackError(
            "This is no density with data on its grid",
            f"p must be positive with Σ p·spacing = 1 (it is {total:.3g}), and each residual have "
            f"a whole index in [0, {p.shape[0]})",
            "Normalize p, and give grid points as index",
        )
    delta = torch.zeros_like(p).index_add_(0, index, residuals.to(p) / spacing)
    return p * delta - p * (p[index] * residuals.to(p)).sum()
