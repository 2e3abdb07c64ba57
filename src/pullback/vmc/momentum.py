"""SPRING with a momentum that is chosen from what the samples say about the last direction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..solvers import Damping, Solution
from ..steps import LevenbergMarquardt, Local, Move, Spring, Step


@dataclass(frozen=True)
class MomentumLimits:
    """Bounds of the momentum that `PrimeSpring` chooses."""

    #: keeps directions that no sample ever measures from growing: after k steps they are below
    #: 0.99^k, and lengths above a hundred steps' worth cannot add up
    largest: float = 0.99


class PrimeSpring(Spring):
    r"""x minimizes ‖A x − r‖² + λ‖x − μ x_prev‖² with a momentum μ that needs no tuning.

    PRIME-SR ("Principal Range Informed MomEntum SR", arXiv:2604.18357) adapts the momentum of
    SPRING to the effective spectral dimension and to the overlap of subspaces. This is our reading
    of that description, not a transcription of the paper's algorithm. With P = G(G + λ)⁻¹, which
    is near 1 on directions that the present samples measure and near 0 on others,

        d = tr P                      effective dimension: directions that a batch measures
        o = |P x_prev|² / |x_prev|²   overlap: the part of the last direction measured again
        μ = 1 − max(o, d/p)           of p parameters.

    A direction is measured anew every 1/o steps, so the memory 1/(1 − μ) lasts as long as that and
    no longer. Directions that are never measured have o = 0; there d/p, the overlap by chance, lets
    them decay, which μ = 1 would not. Where a batch measures everything, μ = 0 and this is the
    natural gradient. tr P is estimated from one vector of random signs, with the relative error
    √(2/d). Each step solves with two more right-hand sides, from the same factorization. A step
    that the inner step tries again, with more damping, has no momentum.
    """

    def __init__(self, step: Step | None = None, limits: MomentumLimits | None = None) -> None:
        super().__init__(0.0, step)
        self.limits = limits or MomentumLimits()
        #: solutions of the present step that the inner step has asked for
        self._attempts = 0

    def take(self, local: Local) -> Move:
        self._attempts = 0
        return super().take(local)

    def solution(self, local: Local, damping: Damping | None, center: Tensor | None) -> Solution:
        fresh = local.solve(damping, center)
        count = local.state.get("count", 0)
        self._attempts += 1
        if not count or self._attempts > 1:
            self.momentum = 0.0
            return fresh
        previous = local.state["previous"].to(local.gradient)
        unmeasured = local.solve(damping, _add_to_center(center, previous)).x - fresh.x
        signs = _random_signs(count, local.gradient)
        unmeasured_signs = local.solve(damping, _add_to_center(center, signs)).x - fresh.x
        chance = 1 - float(signs @ unmeasured_signs) / len(signs)
        overlap = float((previous - unmeasured).square().sum() / previous.square().sum())
        self.momentum = min(self.limits.largest, max(0.0, 1 - max(overlap, chance)))
        return replace(fresh, x=fresh.x + self.momentum * unmeasured)


def adaptive_step(damping: float = 1e-4) -> PrimeSpring:
    """SPRING with its own momentum, and with the least damping that keeps steps predictable.

    The damping λ starts at 0.1 and is halved after every step, down to `damping`. A step whose
    effect on log ψ at the samples is not what its linearization predicts is solved for again with
    four times the damping. `minimize` asks for half of the predicted effect, a ratio of 0.25. The
    least damping is reached where steps are predictable there. Elsewhere λ settles higher: on an
    Ising chain of 10 sites with 400 samples and `damping` = 1e-6 it stays at 1e-4 to 4e-4.
    """
    trust = LevenbergMarquardt(
        max(0.1, damping), target=0.25, increase=4.0, decrease=0.5, bounds=(damping, 1e6)
    )
    return PrimeSpring(trust)


def _add_to_center(center: Tensor | None, vector: Tensor) -> Tensor:
    if center is None:
        return vector
    return center + vector


def _random_signs(seed: int, gradient: Tensor) -> Tensor:
    """A vector of ±1 that depends on the seed alone, so that a resumed run draws the same."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randint(2, gradient.shape, generator=generator) - 1).to(gradient)
