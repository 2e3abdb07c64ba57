"""Moves of the function: by a step, by descent in an RKHS, and on ever finer grids.

Descent in an RKHS itself, without parameters, is

    f ← f − η ∇ℓ = f − η Σ_i K(·, x_i) ∇L(f(x_i), y_i).

From f_0 = 0 the iterate is f_T = −Σ_t η_t K(·, x_t) ∇L(f_{t−1}(x_t), y_t): it stays in the span of
the kernel's sections at the data, and so is a vector of coefficients.

Whether an empirical loss has a gradient among functions is shown by refining the grid. The loss
ℓ(f) = Σ_i L(f(x_i)) has the differential h ↦ Σ_i e_i h(x_i). On a circle with n grid points the
inner product ⟨f, g⟩ = ∫ f (1 − ∂²)^s g of H^s is a matrix M, and the gradient M⁻¹Σ_i e_i δ_i has

    ‖∇ℓ‖² = Σ_ij e_i e_j (M⁻¹)(x_i, x_j).

In L² (s = 0) this grows as n without end: the gradient is a sum of delta functions, which are not
in the space. It converges, to the reproducing kernel's value, exactly for s > 1/2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite, pi
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .layouts import as_matrix
from .tangent import Tangent, arguments, part

_SAMPLES = 1024  # of x* at a time


@dataclass(frozen=True)
class FunctionChange:
    """The tangent vector dφ·v: x* ↦ J(x*) v, (N, *event).

    `direction` is v, flat over the parameters. A descent step w ← w − ηv moves the function by −η
    times this to first order; `actual` says by how much it moves it.
    """

    tangent: Tangent
    direction: Tensor

    def __call__(self, x: Any) -> Tensor:
        """J(x) v."""
        return self._by_chunks(x, lambda args: self.tangent.at(args).jvp(self.direction))

    def actual(self, x: Any) -> Tensor:
        """φ(w + v)(x) − φ(w)(x), to compare the prediction with."""
        here = self.tangent
        there = Tangent(here.model, here.moved(self.direction), output=here.output)
        return self._by_chunks(x, lambda args: there.at(args).value - here.at(args).value)

    def _by_chunks(self, x: Any, function: Callable[[Any], Tensor]) -> Tensor:
        args = arguments(x)
        starts = range(0, len(args[0]), _SAMPLES)
        with torch.no_grad():
            return torch.cat([function(part(args, a, a + _SAMPLES)) for a in starts])

    def parameters(self) -> dict[str, Tensor]:
        """v by the parameters' names."""
        return self.tangent.space.split(self.direction)

    def __mul__(self, scale: float) -> FunctionChange:
        return replace(self, direction=scale * self.direction)

    __rmul__ = __mul__

    def __neg__(self) -> FunctionChange:
        return -1.0 * self

    def __add__(self, other: FunctionChange) -> FunctionChange:
        if other.tangent is not self.tangent:
            raise PullbackError(
                "These moves belong to different tangent spaces",
                "their directions have no sum",
                "Build both from one Tangent",
            )
        return replace(self, direction=self.direction + other.direction)


@dataclass(frozen=True)
class Expansion:
    r"""f = Σ_i K(·, x_i) c_i in the RKHS of a kernel; coefficients c are (N, *event).

    ⟨f, f'⟩ = Σ_ij c_i·K(x_i, x'_j) c'_j. The kernel is a function of two batches that gives (N, N')
    for all outputs alike, or (N, N', m, m).
    """

    kernel: Callable[[Any, Any], Tensor]
    points: Any
    coefficients: Tensor

    def __call__(self, x: Any) -> Tensor:
        """f(x), (N', *event)."""
        event = self.coefficients.shape[1:]
        return _applied(self.kernel(x, self.points), self.coefficients).unflatten(1, event)

    def inner(self, other: Expansion) -> Tensor:
        """⟨f, f'⟩, a number."""
        c = self.coefficients.flatten(1)
        return (c * _applied(self.kernel(self.points, other.points), other.coefficients)).sum()

    def norm(self) -> Tensor:
        """‖f‖."""
        return self.inner(self).clamp(min=0).sqrt()


def _applied(kernel: Tensor, c: Tensor) -> Tensor:
    """Σ_j K_ij c_j, (N, m)."""
    flat = c.flatten(1)
    if kernel.ndim not in (2, 4) or kernel.shape[1] != len(c):
        raise PullbackError(
            "The kernel does not fit its coefficients",
            f"kernel {tuple(kernel.shape)}, coefficients {tuple(c.shape)}",
            "Let it return (N, N') or (N, N', m, m), and give one coefficient per point",
        )
    flat = flat.to(kernel.dtype)
    return kernel @ flat if kernel.ndim == 2 else torch.einsum("ijab,jb->ia", kernel, flat)


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


@dataclass(frozen=True)
class Descent:
    """f_T with the losses on the way, ℓ(f_0) first; `function` is callable anywhere."""

    function: Expansion
    losses: Tensor

    def __call__(self, x: Any) -> Tensor:
        """f_T(x)."""
        return self.function(x)


def rkhs_descent(
    kernel: Callable[[Any, Any], Tensor],
    x: Any,
    loss: Callable[[Tensor], Tensor],
    event: tuple[int, ...] = (1,),
    *,
    lr: float,
    steps: int,
    order: str = "batch",
) -> Descent:
    """Descend ℓ(f(x)) from f = 0.

    Args:
        kernel: a function of two batches, giving (N, N') or (N, N', m, m).
        x: the data's inputs.
        loss: ℓ as a function of the values f(x), (N, *event), a sum over samples.
        event: the shape of one value.
        lr: η.
        steps: how many steps; in order "sequential" passes over the data.
        order: "batch" moves by all points at once, "sequential" by one at a time, in order.

    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [-1.0]])
    >>> found = rkhs_descent(
    ...     lambda a, b: torch.exp(-torch.cdist(a, b)),
    ...     x,
    ...     lambda f: 0.5 * (f - y).square().sum(),
    ...     lr=0.5,
    ...     steps=60,
    ... )
    >>> found(x)
    tensor([[ 1.0000],
            [-1.0000]])
    """
    counted = isinstance(steps, int) and steps >= 0
    if order not in ("batch", "sequential") or not lr > 0 or not counted:
        raise PullbackError(
            "The descent is not determined",
            f"order={order!r}, lr={lr}, steps={steps}",
            'Use order "batch" or "sequential", lr > 0 and a whole number of steps ≥ 0',
        )
    points = arguments(x)[0]
    size = torch.Size(event).numel()
    k = as_matrix(kernel(x, x), size).detach()
    c = torch.zeros(len(points), *event, dtype=k.dtype, device=k.device)
    losses = []
    for t in range(steps + 1):
        value, gradient = _gradient(loss, (k @ c.flatten()).view(c.shape))
        losses.append(value)
        if t == steps:
            break
        if order == "batch":
            c = c - lr * gradient
            continue
        for i in range(len(points)):
            _, gradient = _gradient(loss, (k @ c.flatten()).view(c.shape))
            c[i] -= lr * gradient[i]
    found = torch.stack(losses)
    if not bool(torch.isfinite(found).all()):
        raise PullbackError(
            "The descent diverged",
            f"the loss is not finite after {int(torch.isfinite(found).sum())} steps",
            "Lower lr: it must stay below 2 over the largest eigenvalue of K times L's curvature",
        )
    return Descent(Expansion(kernel, x, c), found)


def _gradient(loss: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        values = values.detach().requires_grad_()
        out = loss(values)
        if not isinstance(out, Tensor) or out.numel() != 1 or not out.requires_grad:
            raise PullbackError(
                "The loss is not a number with a gradient",
                f"got {getattr(out, 'shape', type(out))}",
                "Return a sum over samples that depends on the values",
            )
        (gradient,) = torch.autograd.grad(out, values)
    return out.detach(), gradient
