"""Solvers for G x = g: factorize once (`init`), apply often (`solve`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._core.checks import require_number
from .._core.errors import Status
from ..grams import Gram


@dataclass(frozen=True)
class NewtonLimits:
    """How `Path.damping_for` iterates."""

    #: steps at most; brackets are halved where Newton fails, so that 60 would exhaust float64
    most_steps: int = 100
    #: relative error of λ or of the norm, in units of ε, that counts as exact: a norm is a root of
    #: a sum of quotients, of which each is rounded a few times
    exact: float = 8.0
    #: a Newton step is taken if it is at most this fraction of the one before: bisection does as
    #: well
    contraction: float = 0.5
    #: a step of at most this many √ε is the last: the next would be its square
    last_step: float = 0.1
    #: steps between two looks at a flag on a GPU, since each look waits for the device as
    #: long as several steps take
    steps_per_look_on_gpu: int = 8


_NEWTON = NewtonLimits()


@dataclass(frozen=True)
class Solution:
    """x with (G + damping) x = g, and how it was computed.

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
        self.value = _check_damping(value)

    def __repr__(self) -> str:
        return f"Relative({self.value!r})"


Damping = float | Relative


def _check_damping(damping: float) -> float:
    require_number("The damping", float(damping))
    return float(damping)


def resolve(damping: Damping, gram: Gram) -> float:
    """Return the absolute damping for this Gram."""
    if isinstance(damping, Relative):
        return damping.value * float(gram.trace()) / gram.size
    return _check_damping(damping)


def measure_residual(solution: Solution, gram: Gram, rhs: Tensor) -> Solution:
    """Return the solution with its residual; the status is INACCURATE if that is above √ε."""
    error = gram.matvec(solution.x) + solution.damping * solution.x - rhs
    residual = float(error.norm() / rhs.norm().clamp(min=torch.finfo(rhs.dtype).tiny))
    status = solution.status
    is_accurate = residual <= torch.finfo(rhs.dtype).eps ** 0.5
    if status is Status.OK and not is_accurate:
        status = Status.INACCURATE
    return replace(solution, residual=residual, status=status)


def loses_digits(damping: float, eigenvalue: Tensor, dtype: torch.dtype) -> bool:
    """Return True if a division by the damping may lose the digits of a Gram of this eigenvalue."""
    return damping <= torch.finfo(dtype).eps ** 0.5 * float(eigenvalue)


class Solver(ABC):
    """A way to compute G⁺g."""

    #: what the solver works from best: "rows", "panels", "small" or "products"
    prefers: str = "small"
    #: whether x is linear in the right-hand side, so that parts of it may be solved for apart
    linear: bool = True

    @abstractmethod
    def init(self, gram: Gram) -> Any:
        """Return a factorization that serves many right-hand sides and dampings."""

    @abstractmethod
    def solve(
        self,
        state: Any,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        """Return (G + damping)⁺ rhs.

        Args:
            state: what `init` returned.
            rhs: g, of shape (p,).
            damping: replaces the solver's own, unless it is None.
            whitened: r with Aᵀr = g, where it is known: it is used in place of g, since forming
                g loses half of the digits.
        """

    def path(self, state: Any, rhs: Tensor, whitened: Tensor | None = None) -> Path | None:
        """Return all solutions over damping, or None for a solver that has no spectrum."""
        return None

    def seek(self, draw: int) -> None:
        """Set the number of the next random draw: a run resumes from the count of its steps."""
        del draw

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"


@dataclass(frozen=True)
class _NormAtDamping:
    """‖x(λ)‖ and what Newton's iteration takes from it, one number for each damping."""

    #: ‖x‖/radius
    excess: Tensor
    #: −d log‖x‖/dλ
    rate: Tensor
    #: where the tangent of 1/‖x‖ crosses 1/radius
    crossing: Tensor


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
        """Return ‖x(λ)‖ for dampings of any shape."""
        eigenvalues, gamma = self._shares()
        return _length(gamma / (eigenvalues + damping[..., None]))

    def predict_reduction(self, damping: Tensor, scale: float = 1.0) -> Tensor:
        """Return the model's reduction scale·gᵀx − ½scale²·xᵀGx for the move scale·x(λ)."""
        eigenvalues, gamma = self._shares()
        c = gamma / (eigenvalues + damping[..., None])
        return scale * (c * (gamma - 0.5 * scale * eigenvalues * c)).sum(-1)

    def at(self, damping: Tensor) -> Tensor:
        """Return x(λ), one row per damping."""
        x = self.combine(self.gamma / (self.eigenvalues + damping[..., None]))
        if self.beyond is not None:
            x = x + self.beyond / damping[..., None]
        return x

    def solution(self, damping: float) -> Tensor:
        """Return x at one damping; at 0, the shortest solution on the range."""
        if damping == 0:
            return self.combine(self.gamma / self.eigenvalues)
        return self.at(torch.full_like(self.gamma.sum(), damping))

    def damping_for(self, radius: Tensor) -> Tensor:
        r"""Return the λ ≥ 0 with ‖x(λ)‖ = radius, for many radii at once; 0 where x(0) is shorter.

        Newton's iteration on log‖x‖ as a function of log λ, which is exact where the norm follows a
        power of λ, within a bracket that is halved (in log λ) where the steps do not shrink. The
        norm decreases in λ, and 1/‖x(λ)‖ is concave, so its tangents cross 1/radius below the root:
        they raise the lower end of the bracket.
        """
        eigenvalues, gamma = self._shares()
        eps = torch.finfo(radius.dtype).eps
        steps_per_look = _NEWTON.steps_per_look_on_gpu if radius.is_cuda else 1

        def measure(damping: Tensor) -> _NormAtDamping:
            shifted = eigenvalues + damping[..., None]
            c = gamma / shifted
            norm = _length(c)
            rate = ((c / norm[..., None]).square() / shifted).sum(-1)
            excess = norm / radius
            return _NormAtDamping(excess, rate, damping + (excess - 1) / rate)

        # |γ_i|/(λ_i + λ) ≤ ‖x(λ)‖ ≤ ‖g‖/λ
        low = (gamma.abs() / radius[..., None] - eigenvalues).amax(-1).clamp(min=0)
        high = _length(gamma) / radius
        is_short = ~(self.norm(torch.zeros_like(low)) > radius)
        damping = torch.maximum(low, measure(low).crossing).clamp(max=high)
        previous_step = torch.full_like(low, torch.inf)
        is_settled = is_short
        for i in range(1, _NEWTON.most_steps + 1):
            current = measure(damping)
            is_long = current.excess > 1
            low = torch.maximum(torch.where(is_long, damping, low), current.crossing)
            high = torch.where(is_long, high, damping)
            log_step = current.excess.log() / (current.rate * damping)
            newton = torch.maximum(damping * log_step.exp(), low)
            step = (newton / damping).log().abs()
            error = torch.minimum((current.excess - 1).abs(), step)
            is_settled = is_settled | (error <= _NEWTON.exact * eps)
            contracts = (newton <= high) & (step <= _NEWTON.contraction * previous_step)
            middle = low.clamp(max=high).sqrt() * high.sqrt()
            trial = torch.where(contracts, newton, middle)
            damping = torch.where(is_settled, damping, trial)
            is_settled = is_settled | (contracts & (step <= _NEWTON.last_step * eps**0.5))
            previous_step = torch.where(contracts, step, torch.inf)
            if i % steps_per_look == 0 and bool(is_settled.all()):
                break
        return torch.where(is_short, torch.zeros_like(damping), damping)

    def _shares(self) -> tuple[Tensor, Tensor]:
        """Return Λ and γ, with ‖g⊥‖ as one more coordinate of eigenvalue zero."""
        if self.beyond is None and len(self.gamma):
            return self.eigenvalues, self.gamma
        if self.beyond is None:
            outside = self.gamma.new_zeros(1)
        else:
            outside = _length(self.beyond)[None]
        unused = (outside == 0).to(outside)  # 0/(1 + λ) where there is no such part
        return torch.cat([self.eigenvalues, unused]), torch.cat([self.gamma, outside])


def _length(c: Tensor) -> Tensor:
    """Return ‖c‖ along the last axis, also where squares overflow or vanish."""
    limits = torch.finfo(c.dtype)
    largest = torch.linalg.vector_norm(c, torch.inf, -1, keepdim=True)
    unit = largest.clamp(limits.tiny, limits.max)
    return torch.linalg.vector_norm(c / unit, dim=-1) * unit[..., 0]
