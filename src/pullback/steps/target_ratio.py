"""Adaptive-ratio trust control: the largest radius whose model is still good enough."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from .._core.errors import PullbackError
from ..solvers import Path
from .base import TOGETHER, Local, Move, Step, failed, width


class TargetRatio(Step):
    r"""Try many trust radii at once and take the largest with ρ above a small target.

    The factorization gives every damped solution, so for a geometric window of radii around the
    last one the secular equation ‖x(λ)‖ = radius is solved for all λ together; each trial's true
    loss gives ρ = actual/predicted reduction, made non-increasing in the radius. If no radius
    qualifies the step is rejected and the radius shrinks by the window.

    Args:
        target: the ratio to exceed; small values keep the steps long. Demanding more, or taking
            the lowest loss instead of the largest radius, stalls (`benchmarks/trust.py`).
        radii: number of trial radii. Their spacing matters more than their range.
        window: radii run from radius/window to radius·window.
        radius: the first one, in parameter space.
    """

    def __init__(
        self, target: float = 0.01, radii: int = 24, window: float = 3.0, radius: float = 1.0
    ) -> None:
        self.target, self.radii, self.window, self.radius = target, radii, window, radius

    def take(self, local: Local) -> Move:
        path = local.path()
        if path is None or local.lr is None:
            raise PullbackError(
                "TargetRatio cannot work here",
                "it needs every damped solution from one factorization, and one learning rate",
                "Use PseudoInverse() or Sketched(...), no wrapper around the step (Clip, Spring, "
                "TrustNorm), and the same lr in all groups",
            )
        radius = local.state.get("radius", self.radius)
        solution = local.direction(0.0)
        if (rejection := failed(solution)) is not None:
            return rejection
        exponents = torch.linspace(
            -1, 1, self.radii, dtype=path.gamma.dtype, device=path.gamma.device
        )
        radii = radius * self.window**exponents
        dampings = path.damping_for(radii)
        predicted = path.predicted(dampings, local.lr).tolist()
        losses: list[float] = []
        best = -1
        # radii grow, and beyond the first bad one none counts
        for found in self._trials(local, path, dampings):
            wanted = predicted[len(losses) : len(losses) + len(found)]
            pairs = zip(found, wanted, strict=True)
            good = [_ratio(local.loss - x, y) > self.target for x, y in pairs]
            losses += found
            best += good.index(False) if False in good else len(good)
            if not all(good):
                break
        if best < 0:
            local.state["radius"] = radius / self.window
            reason = "the loss fell too little, or rose, at every trust radius tried"
            return Move(solution.x, 0.0, solution, False, None, reason, len(losses))
        x, damping = path.at(dampings[best]), float(dampings[best])
        local.state["radius"] = float(radii[best]) if damping > 0 else float(x.norm())
        chosen = type(solution)(x, damping, solution.rank, None, solution.status)
        return Move(x, 1.0, chosen, True, losses[best], "", len(losses))

    def _trials(self, local: Local, path: Path, dampings: Tensor) -> Iterator[list[float]]:
        """Losses at growing radii."""
        few = len(dampings) if dampings.is_cuda else TOGETHER  # waiting for a device costs more
        for some in dampings.split(min(few, width(local.gradient))):
            for losses in local.in_turn(path.at(some)):
                yield losses.tolist()


def _ratio(actual: float, predicted: float) -> float:
    """actual/predicted, infinite or NaN where nothing is predicted."""
    return actual / predicted if predicted else actual * inf
