r"""Autonomous systems y' = f(y), many at once, each with a step size of its own.

An `EmbeddedFormula` is a formula and an estimate of its error; `march` repeats it until a clock
says stop. A `Size` measures the error in units of the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Solve = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Jacobian:
    r"""J = diag(a) + U Vᵀ of B systems, and 1 − cJ.

    With E = 1 − c a and k columns in U and V, Woodbury's identity needs a system of k unknowns:

        (1 − cJ)⁻¹ = E⁻¹ + E⁻¹U (1/c − VᵀE⁻¹U)⁻¹ VᵀE⁻¹

    Where k is not below the number of unknowns n, or an entry of E is close to zero, 1 − cJ is
    factored as it stands.

    Attributes:
        diagonal: a, (B, n).
        left: U, (B, n, k).
        right: V, (B, n, k).
    """

    diagonal: Tensor
    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """J, (B, n, n)."""
        return torch.diag_embed(self.diagonal) + self.left @ self.right.mT

    def solver(self, c: Tensor) -> Solve:
        """r ↦ (1 − cJ)⁻¹r for c > 0 (B, 1) and r (B, n)."""
        remainder = 1 - c * self.diagonal
        n, k = self.left.shape[1:]
        # an entry of E below 0.1 costs Woodbury's identity a digit
        if k >= n or bool((remainder.abs() < 0.1).any()):
            return self._directly(c)
        return self._woodbury(c, remainder)

    def _directly(self, c: Tensor) -> Solve:
        whole = self.dense().mul_(-c[..., None])
        whole.diagonal(dim1=-2, dim2=-1).add_(1)
        return _factorize(whole)

    def _woodbury(self, c: Tensor, remainder: Tensor) -> Solve:
        left = self.left / remainder[..., None]
        inner = (self.right.mT @ left).mul_(-c[..., None])
        inner.diagonal(dim1=-2, dim2=-1).add_(1)
        solve = _factorize(inner)

        def whole(r: Tensor) -> Tensor:
            first = r / remainder
            inside = solve((self.right.mT @ first[..., None])[..., 0])
            return first + c * (left @ inside[..., None])[..., 0]

        return whole


def _factorize(matrix: Tensor) -> Solve:
    lu, pivots, _ = torch.linalg.lu_factor_ex(matrix)  # singular: not a number, not an exception
    return lambda r: torch.linalg.lu_solve(lu, pivots, r[..., None])[..., 0]


#: y (B, n) ↦ (B, …), one value per system
Of = Callable[[Tensor], Tensor]

#: y before and after a step, and its error, (B, n) each ↦ the error in units of the tolerance, (B,)
Size = Callable[[Tensor, Tensor, Tensor], Tensor]


class EmbeddedFormula(Protocol):
    """A formula with an estimate of its error."""

    @property
    def order(self) -> int:
        """The error estimate falls as h^order."""
        ...

    def step(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """y (B, n) after a step of h (B,), and its error in units of the tolerance, (B,)."""
        ...


def relative(rtol: float = 1e-5, atol: Tensor | float = 1e-9) -> Size:
    """max_i |e_i| / (atol + rtol |y_i|); atol is one number or one per system, (B, 1)."""

    def size(y: Tensor, moved: Tensor, error: Tensor) -> Tensor:
        return (error.abs() / (atol + rtol * torch.maximum(y.abs(), moved.abs()))).amax(1)

    return size


def march(
    pair: EmbeddedFormula,
    y: Tensor,
    clock: Of,
    end: float,
    *,
    first: float = 1e-2,
    longest: float = 1.0,
    max_steps: int = 20_000,
    watch: Callable[[Tensor], None] = lambda clock: None,
) -> tuple[Tensor, Tensor]:
    """y where clock(y) (B,) reaches `end`, each system by itself, and which did not, (B,).

    The last step is shortened until it ends within a thousandth of 1 + |end|. It gives up after so
    many steps, or where a step has to be shorter than 1e-12 of the longest.
    """
    h = torch.full_like(y[:, 0], first)
    time = clock(y)
    slack = 1e-3 * (1 + abs(end))
    most = torch.full_like(h, 3.0)  # of growth; none right after a step was refused
    for count in range(max_steps):
        going = ~(time >= end)
        if not bool(going.any()) or bool((h < 1e-12 * longest).any()):
            break
        moved, error = pair.step(y, h)
        error = torch.where(torch.isfinite(error), error, 1e6)
        new_time = clock(moved)
        fine = error <= 1
        past = new_time > end + slack
        change = (0.8 * error.clamp(min=1e-6) ** (-1 / pair.order)).clamp(min=0.2).minimum(most)
        back = ((end + 0.5 * slack - time) / (new_time - time)).clamp(0.1, 0.95)
        y = torch.where((fine & ~past & going)[:, None], moved, y)
        time = torch.where(fine & ~past & going, new_time, time)
        change = torch.where(fine & past, back, change)
        h = torch.where(going, (h * change).clamp(max=longest), h)
        most = torch.where(fine, 3.0, 1.0)
        if count % 20 == 0:
            watch(time)
    return y, ~(time >= end)


_STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
#: the last stage, which is the step, less the formula of order four
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


@dataclass(frozen=True)
class Explicit:
    """y' = f(y) for B systems of n unknowns, not stiff: Dormand and Prince's order 5(4) pair.

    Seven values of f and no linear system a step. It is stable up to h|λ| ≈ 3.3, λ the rates of f.

    Attributes:
        velocity: f.
        size: of errors, in units of the tolerance.
    """

    velocity: Of
    size: Size = field(default_factory=relative)
    order: int = 5

    def step(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """y after a step of h (B,), and its error in units of the tolerance, (B,)."""
        moved = y
        slopes = [self.velocity(y)]
        for row in _STAGES:
            moved = y + h[:, None] * _combine_slopes(row, slopes)
            slopes.append(self.velocity(moved))
        return moved, self.size(y, moved, h[:, None] * _combine_slopes(_ERROR, slopes))


def _combine_slopes(weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    out = weights[0] * slopes[0]
    for weight, slope in zip(weights[1:], slopes[1:], strict=True):
        out = out + weight * slope
    return out


_D = 1 / (2 + 2**0.5)
_E = 6 + 2**0.5


@dataclass(frozen=True)
class Stiff:
    r"""y' = f(y) for B systems of n unknowns, stiff: Shampine and Reichelt's order 2(3) pair.

    With W = 1 − h d J, d = 1/(2 + √2), one step from y is

        k₁ = W⁻¹f(y)    k₂ = W⁻¹(f(y + h k₁/2) − k₁) + k₁    y⁺ = y + h k₂
        k₃ = W⁻¹(f(y⁺) − (6 + √2)(k₂ − f₁) − 2(k₁ − f(y)))   error ≈ h (k₁ − 2k₂ + k₃)/6

    It is L-stable, so that what has settled does not limit the step, and of order two whatever
    stands for J.

    Attributes:
        velocity: f.
        velocity_and_jacobian: y ↦ f (B, n) and ∂f/∂y.
        size: of errors, in units of the tolerance.
    """

    velocity: Of
    velocity_and_jacobian: Callable[[Tensor], tuple[Tensor, Jacobian]]
    size: Size = field(default_factory=relative)
    order: int = 3

    def step(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """y after a step of h (B,), and its error in units of the tolerance, (B,)."""
        step = h[:, None]
        f0, jacobian = self.velocity_and_jacobian(y)
        solve = jacobian.solver(_D * step)
        k1 = solve(f0)
        f1 = self.velocity(y + 0.5 * step * k1)
        k2 = solve(f1 - k1) + k1
        moved = y + step * k2
        k3 = solve(self.velocity(moved) - _E * (k2 - f1) - 2 * (k1 - f0))
        return moved, self.size(y, moved, step / 6 * (k1 - 2 * k2 + k3))
