"""A trust region whose radius is the largest at which the model still predicts a little."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from .._core.errors import PullbackError
from ..solvers import Path
from .base import Local, Move, Need, Step, reject, reject_failure
from .line_search import evaluate_in_chunks


@dataclass(frozen=True)
class _RadiusSearch:
    """The trial radius to take, counted from the smallest; −1 where none is acceptable."""

    index: int
    loss: float
    trials: int


class TargetRatio(Step):
    r"""Try many trust radii at once and take the largest with ρ above a small target.

    The factorization gives every damped solution, so for a geometric window of radii around the
    last one the secular equation ‖x(λ)‖ = radius is solved for all λ together; each trial's true
    loss gives ρ = actual/predicted reduction. ρ is taken to fall with the radius: on a CPU, where
    trials are made one by one, the last acceptable radius is found by bisection; on CUDA all are
    tried, and beyond the first bad one none counts. If none qualifies the step is rejected and the
    radius shrinks by the window.

    Args:
        target: the ratio to exceed; small values keep the steps long. Demanding more, or taking
            the lowest loss instead of the largest radius, stalls (`pullback bench trust`).
        radii: number of trial radii. Their spacing matters more than their range.
        window: radii run from radius/window to radius·window.
        radius: the first one, in parameter space.
    """

    def __init__(
        self, target: float = 0.01, radii: int = 24, window: float = 3.0, radius: float = 1.0
    ) -> None:
        self.target = target
        self.radii = radii
        self.window = window
        self.radius = radius

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.LOSSES, Need.PATH})

    @property
    def numbers(self) -> dict[str, float]:
        return {"radius": self.radius}

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
        rejection = reject_failure(solution)
        if rejection is not None:
            return rejection
        exponents = torch.linspace(
            -1, 1, self.radii, dtype=path.gamma.dtype, device=path.gamma.device
        )
        radii = radius * self.window**exponents
        dampings = path.damping_for(radii)
        predicted = path.predict_reduction(dampings, local.lr).tolist()
        if dampings.is_cuda:  # waiting for a device costs more than trials
            search = self._try_all(local, path, dampings, predicted)
        else:
            search = self._bisect(local, path, dampings, predicted)
        if search.index < 0:
            local.state["radius"] = radius / self.window
            reason = "the loss fell too little, or rose, at every trust radius tried"
            return reject(solution, reason, search.trials)
        x = path.at(dampings[search.index])
        damping = float(dampings[search.index])
        local.state["radius"] = float(radii[search.index]) if damping > 0 else float(x.norm())
        chosen = replace(solution, x=x, damping=damping, residual=None)
        return Move(x, 1.0, chosen, loss=search.loss, trials=search.trials)

    def _is_acceptable(self, reduction: float, predicted: float) -> bool:
        """Whether ρ exceeds the target; it is infinite or NaN where nothing is predicted."""
        if predicted:
            return reduction / predicted > self.target
        return reduction * inf > self.target

    def _try_all(
        self, local: Local, path: Path, dampings: Tensor, predicted: list[float]
    ) -> _RadiusSearch:
        """Evaluate every radius, and take the one before the first that is not acceptable."""
        losses = evaluate_in_chunks(
            lambda chunk: local.losses(path.at(chunk)), dampings, local.gradient
        ).tolist()
        index = -1
        for loss, reduction in zip(losses, predicted, strict=True):
            if not self._is_acceptable(local.loss - loss, reduction):
                break
            index += 1
        return _RadiusSearch(index, losses[index], len(losses))

    def _bisect(
        self, local: Local, path: Path, dampings: Tensor, predicted: list[float]
    ) -> _RadiusSearch:
        """Find the last acceptable radius by bisection."""
        acceptable = -1
        unacceptable = self.radii
        loss_at_acceptable = local.loss
        trials = 0
        while unacceptable - acceptable > 1:
            middle = (acceptable + unacceptable) // 2
            loss = float(local.losses(path.at(dampings[middle : middle + 1]))[0])
            trials += 1
            if self._is_acceptable(local.loss - loss, predicted[middle]):
                acceptable = middle
                loss_at_acceptable = loss
            else:
                unacceptable = middle
        return _RadiusSearch(acceptable, loss_at_acceptable, trials)
