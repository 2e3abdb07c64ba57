"""Solvers for G x = g: factorize once (`init`), apply often (`solve`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError, Status
from ..grams import Gram


@dataclass(frozen=True)
class Solution:
    """x with (G + damping) x = g, and how it was found.

    `rank` is the number of directions used where the solver knows it; `residual` is
    ‖(G + damping) x − g‖/‖g‖ where the solver measured it.
    """

    x: Tensor
    damping: float
    rank: int | None = None
    residual: float | None = None
    status: Status = Status.OK


class Relative:
    """Damping as a multiple of the mean eigenvalue tr(G)/p."""

    def __init__(self, value: float) -> None:
        self.value = _checked(value)

    def __repr__(self) -> str:
        return f"Relative({self.value!r})"


Damping = float | Relative


def _checked(damping: float) -> float:
    if not damping >= 0 or damping == float("inf"):
        raise PullbackError("The damping is not usable", f"got {damping}", "Use a number ≥ 0")
    return float(damping)


def resolve(damping: Damping, gram: Gram) -> float:
    """The absolute damping for this Gram."""
    if isinstance(damping, Relative):
        return damping.value * float(gram.trace()) / gram.size
    return _checked(damping)


class Solver(ABC):
    """How G⁺g is found."""

    #: what the solver works from best: "rows", "small" or "products"
    prefers: str = "small"

    @abstractmethod
    def init(self, gram: Gram) -> Any:
        """Factorize; the state serves many right-hand sides and dampings."""

    @abstractmethod
    def solve(
        self,
        state: Any,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        """(G + damping)⁺ rhs.

        Args:
            state: what `init` returned.
            rhs: g, of shape (p,).
            damping: replaces the solver's own where given.
            whitened: r with Aᵀr = g, where it is known: it is used in place of g, since forming
                g loses half of the digits.
        """

    def path(self, state: Any, rhs: Tensor, whitened: Tensor | None = None) -> Path | None:
        """All solutions over damping from one factorization, where the solver has a spectrum."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must be saved for a run to resume to the same bits."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        del state

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"


@dataclass(frozen=True)
class Path:
    r"""x(λ) = V (Λ + λ)⁻¹γ + g⊥/λ over all dampings λ, with γ = Vᵀg and Λ the spectrum of G.

    `beyond` is g⊥ = g − V γ where it does not vanish.
    """

    eigenvalues: Tensor
    gamma: Tensor
    combine: Callable[[Tensor], Tensor]
    beyond: Tensor | None = None

    def norm(self, damping: Tensor) -> Tensor:
        """‖x(λ)‖ for dampings of any shape."""
        square = (self.gamma / (self.eigenvalues + damping[..., None])).square().sum(-1)
        if self.beyond is not None:
            square = square + (self.beyond.norm() / damping).square()
        return square.sqrt()

    def predicted(self, damping: Tensor, scale: float = 1.0) -> Tensor:
        """The model's reduction scale·gᵀx − ½scale²·xᵀGx for the move scale·x(λ)."""
        shifted = self.eigenvalues + damping[..., None]
        shares = scale * shifted - 0.5 * scale**2 * self.eigenvalues
        out = (self.gamma.square() * shares / shifted.square()).sum(-1)
        if self.beyond is not None:
            out = out + scale * self.beyond.square().sum() / damping
        return out

    def at(self, damping: Tensor) -> Tensor:
        """x(λ), one row per damping."""
        x = self.combine(self.gamma / (self.eigenvalues + damping[..., None]))
        if self.beyond is not None:
            x = x + self.beyond / damping[..., None]
        return x

    def damping_for(self, radius: Tensor) -> Tensor:
        """The λ ≥ 0 with ‖x(λ)‖ = radius, for many radii at once; 0 where x(0) is shorter.

        ‖x(λ)‖ decreases in λ, and 1/‖x(λ)‖ is nearly linear in it, so a bracketed Newton
        iteration on 1/‖x‖ − 1/radius settles in a few steps.
        """
        # ‖x(λ)‖ ≤ ‖g‖/(λ_min + λ), so the root lies below ‖g‖/radius
        total = self.gamma.square().sum()
        if self.beyond is not None:
            total = total + self.beyond.square().sum()
        high = total.sqrt() / radius
        low = torch.zeros_like(high)
        damping = 0.5 * high
        for _ in range(60):
            norm = self.norm(damping)
            long = norm > radius
            low, high = torch.where(long, damping, low), torch.where(long, high, damping)
            shifted = self.eigenvalues + damping[..., None]
            slope = (self.gamma.square() / shifted.pow(3)).sum(-1)
            if self.beyond is not None:
                slope = slope + self.beyond.square().sum() / damping.pow(3)
            newton = damping + (norm - radius) / radius * norm.square() / slope
            inside = (newton > low) & (newton < high)
            before, damping = damping, torch.where(inside, newton, 0.5 * (low + high))
            if bool(((damping - before).abs() <= torch.finfo(damping.dtype).eps * damping).all()):
                break
        short = self.norm(torch.zeros_like(high)) <= radius if self.beyond is None else high < 0
        return torch.where(short, torch.zeros_like(damping), damping)
