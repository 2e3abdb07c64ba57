r"""An integrator for what is stiff: Shampine and Reichelt's order 2(3) pair.

With W = 1 − h d J, d = 1/(2 + √2), one step from y of y' = f(y) is

    k₁ = W⁻¹f(y)    k₂ = W⁻¹(f(y + h k₁/2) − k₁) + k₁    y⁺ = y + h k₂
    k₃ = W⁻¹(f(y⁺) − (6 + √2)(k₂ − f₁) − 2(k₁ − f(y)))   error ≈ h (k₁ − 2k₂ + k₃)/6

It is L-stable, so that what has settled does not limit the step, and of order two whatever
stands for J.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from .adaptive import Of, Size, relative
from .jacobian import Jacobian

_D = 1 / (2 + 2**0.5)
_E = 6 + 2**0.5


@dataclass(frozen=True)
class Stiff:
    """y' = f(y) for B systems of n unknowns.

    Attributes:
        velocity: f.
        both: y ↦ f (B, n) and ∂f/∂y.
        size: of errors, in units of the tolerance.
    """

    velocity: Of
    both: Callable[[Tensor], tuple[Tensor, Jacobian]]
    size: Size = field(default_factory=relative)
    order: int = 3

    def step(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """y after a step of h (B,), and its error in units of the tolerance, (B,)."""
        step = h[:, None]
        f0, jacobian = self.both(y)
        solve = jacobian.solver(_D * step)
        k1 = solve(f0)
        f1 = self.velocity(y + 0.5 * step * k1)
        k2 = solve(f1 - k1) + k1
        moved = y + step * k2
        k3 = solve(self.velocity(moved) - _E * (k2 - f1) - 2 * (k1 - f0))
        return moved, self.size(y, moved, step / 6 * (k1 - 2 * k2 + k3))
