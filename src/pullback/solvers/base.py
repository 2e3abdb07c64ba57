"""Solvers for G x = g: factorize once (`init`), apply often (`solve`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._core.checks import refuse_number
from .._core.errors import Status
from ..grams import Gram

_NEWTON_STEPS = 100


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
    refuse_number("The damping", float(damping))
    return float(damping)


def resolve(damping: Damping, gram: Gram) -> float:
    """The absolute damping for this Gram."""
    if isinstance(damping, Relative):
        return damping.value * float(gram.trace()) / gram.size
    return _checked(damping)


def measure_residual(solution: Solution, gram: Gram, rhs: Tensor) -> Solution:
    """The solution with its residual, and a status that says so where it is large."""
    left = gram.matvec(solution.x) + solution.damping * solution.x - rhs
    residual = float(left.norm() / rhs.norm().clamp(min=torch.finfo(rhs.dtype).tiny))
    good = residual <= torch.finfo(rhs.dtype).eps ** 0.5
    loses = not good and solution.status is Status.OK
    status = Status.INACCURATE if loses else solution.status
    return replace(solution, residual=residual, status=status)


def delicate(damping: float, top: Tensor, dtype: torch.dtype) -> bool:
    """Whether a division by the damping may lose the digits of a Gram with this eigenvalue."""
    return damping <= torch.finfo(dtype).eps ** 0.5 * float(top)


class Solver(ABC):
    """How G⁺g is found."""

    #: what the solver works from best: "rows", "panels", "small" or "products"
    prefers: str = "small"
    #: whether x is linear in the right-hand side, so that parts of it may be solved for apart
    linear: bool = True

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

    def seek(self, draw: int) -> None:
        """Set the number of the next random draw: a run resumes from the count of its steps."""
        del draw

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
        eigenvalues, gamma = self._shares()
        return _length(gamma / (eigenvalues + damping[..., None]))

    def predicted(self, damping: Tensor, scale: float = 1.0) -> Tensor:
        """The model's reduction scale·gᵀx − ½scale²·xᵀGx for the move scale·x(λ)."""
        eigenvalues, gamma = self._shares()
        c = gamma / (eigenvalues + damping[..., None])
        return scale * (c * (gamma - 0.5 * scale * eigenvalues * c)).sum(-1)

    def at(self, damping: Tensor) -> Tensor:
        """x(λ), one row per damping."""
        x = self.combine(self.gamma / (self.eigenvalues + damping[..., None]))
        if self.beyond is not None:
            x = x + self.beyond / damping[..., None]
        return x

    def solution(self, damping: float) -> Tensor:
        """x at one damping; without any, the shortest on the range."""
        if damping == 0:
            return self.combine(self.gamma / self.eigenvalues)
        return self.at(torch.full_like(self.gamma.sum(), damping))

    def damping_for(self, radius: Tensor) -> Tensor:
        r"""The λ ≥ 0 with ‖x(λ)‖ = radius, for many radii at once; 0 where x(0) is shorter.

        Newton's iteration on log‖x‖ as a function of log λ, which is exact where the norm follows a
        power of λ, within a bracket that is halved (in log λ) where the steps do not shrink. The
        norm decreases in λ, and 1/‖x(λ)‖ is concave, so its tangents cross 1/radius below the root:
        they raise the lower end of the bracket.
        """
        eigenvalues, gamma = self._shares()
        eps, every = torch.finfo(radius.dtype).eps, 8 if radius.is_cuda else 1

        def measure(damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """‖x‖/radius, −d log‖x‖/dλ and the crossing of the tangent."""
            shifted = eigenvalues + damping[..., None]
            c = gamma / shifted
            norm = _length(c)
            rate = ((c / norm[..., None]).square() / shifted).sum(-1)
            excess = norm / radius
            return excess, rate, damping + (excess - 1) / rate

        # |γ_i|/(λ_i + λ) ≤ ‖x(λ)‖ ≤ ‖g‖/λ
        low = (gamma.abs() / radius[..., None] - eigenvalues).amax(-1).clamp(min=0)
        high = _length(gamma) / radius
        short = ~(self.norm(torch.zeros_like(low)) > radius)
        damping = torch.maximum(low, measure(low)[2]).clamp(max=high)
        last, settled = torch.full_like(low, torch.inf), short
        for i in range(1, _NEWTON_STEPS + 1):
            excess, rate, crossing = measure(damping)
            low = torch.maximum(torch.where(excess > 1, damping, low), crossing)
            high = torch.where(excess > 1, high, damping)
            newton = torch.maximum(damping * (excess.log() / (rate * damping)).exp(), low)
            step = (newton / damping).log().abs()
            settled = settled | (torch.minimum((excess - 1).abs(), step) <= 8 * eps)
            good = (newton <= high) & (step <= 0.5 * last)
            trial = torch.where(good, newton, low.clamp(max=high).sqrt() * high.sqrt())
            damping = torch.where(settled, damping, trial)
            settled = settled | (good & (step <= 0.1 * eps**0.5))  # the next would be its square
            last = torch.where(good, step, torch.inf)
            if i % every == 0 and bool(settled.all()):  # asking waits for the device
                break
        return torch.where(short, torch.zeros_like(damping), damping)

    def _shares(self) -> tuple[Tensor, Tensor]:
        """Λ and γ, with ‖g⊥‖ as one more coordinate of eigenvalue zero."""
        if self.beyond is None and len(self.gamma):
            return self.eigenvalues, self.gamma
        outside = self.gamma.new_zeros(1) if self.beyond is None else _length(self.beyond)[None]
        unused = (outside == 0).to(outside)  # 0/(1 + λ) where there is no such part
        return torch.cat([self.eigenvalues, unused]), torch.cat([self.gamma, outside])


def _length(c: Tensor) -> Tensor:
    """‖c‖ along the last axis, where squares could overflow or vanish."""
    limits = torch.finfo(c.dtype)
    top = torch.linalg.vector_norm(c, torch.inf, -1, keepdim=True)
    unit = top.clamp(limits.tiny, limits.max)
    return torch.linalg.vector_norm(c / unit, dim=-1) * unit[..., 0]
