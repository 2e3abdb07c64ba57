r"""A stiff integrator for many autonomous systems at once: Shampine and Reichelt's order 2(3) pair.

With W = 1 − h d J, d = 1/(2 + √2), one step from y of y' = f(y) is

    k₁ = W⁻¹f(y)    k₂ = W⁻¹(f(y + h k₁/2) − k₁) + k₁    y⁺ = y + h k₂
    k₃ = W⁻¹(f(y⁺) − (6 + √2)(k₂ − f₁) − 2(k₁ − f(y)))   error ≈ h (k₁ − 2k₂ + k₃)/6

It is L-stable, so that what has settled does not limit the step, and of order two whatever
stands for J. Every system has its own step size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .jacobian import Jacobian

_D = 1 / (2 + 2**0.5)
_E = 6 + 2**0.5

#: y (B, n) ↦ (B, …), one value per system
Of = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stiff:
    """y' = f(y) for B systems of n unknowns.

    Attributes:
        velocity: f.
        both: y ↦ f (B, n) and ∂f/∂y.
        rtol: of one step, relative to every entry of y.
        atol: of one step, one number or one per system, (B, 1).
    """

    velocity: Of
    both: Callable[[Tensor], tuple[Tensor, Jacobian]]
    rtol: float = 1e-5
    atol: Tensor | float = 1e-9

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
        error = (step / 6 * (k1 - 2 * k2 + k3)).abs()
        size = torch.maximum(y.abs(), moved.abs())
        return moved, (error / (self.atol + self.rtol * size)).amax(1)

    def march(
        self,
        y: Tensor,
        clock: Of,
        end: float,
        *,
        first: float = 1e-4,
        longest: float = 1.0,
        max_steps: int = 50_000,
        watch: Callable[[Tensor], None] = lambda clock: None,
    ) -> Tensor:
        """y where clock(y) (B,) first reaches `end`, each system stopping by itself."""
        h = torch.full_like(y[:, 0], first)
        for count in range(max_steps):
            now = clock(y)
            going = now < end
            if not bool(going.any()):
                return y
            moved, error = self.step(y, h)
            error = torch.where(torch.isfinite(error), error, 1e6)
            y = torch.where(((error <= 1) & going)[:, None], moved, y)
            change = (0.8 * error.clamp(min=1e-6) ** (-1 / 3)).clamp(0.2, 3.0)
            h = torch.where(going, (h * change).clamp(max=longest), h)
            if count % 20 == 0:
                watch(now)
            if bool((h < 1e-14).any()):
                break
        raise PullbackError(
            "The flow did not arrive",
            f"of {len(y)} systems {int((clock(y) < end).sum())} are still on their way",
            "Raise the tolerances or max_steps, or ask for less",
        )
