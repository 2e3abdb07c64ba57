"""Adaptive-ratio trust control: the largest radius whose model is still good enough."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from .._core.errors import PullbackError
from ..solvers import Path
from .base import Local, Move, Step, failed, in_chunks


class TargetRatio(Step):
    r"""Try many trust radii at once and take the largest with ρ above a small target.

    The factorization gives every damped solution, so for a geometric window of radii around the
    last one the secular equation ‖x(λ)‖ = radius is solved for all λ together; each trial's true
    loss gives ρ = actual/predicted reduction. ρ is taken to fall with the radius: on a CPU, where
    trials are made one by one, the last good radius is found by bisection; on CUDA all are tried,
    and beyond the first bad one none counts. If none qualifies the step is rejected and the radius
    shrinks by the window.

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
        if (rejection := failed(solution)) is not None:
            return rejection
        exponents = torch.linspace(
            -1, 1, self.radii, dtype=path.gamma.dtype, device=path.gamma.device
        )
        radii = radius * self.window**exponents
        dampings = path.damping_for(radii)
        predicted = path.predicted(dampings, local.lr).tolist()
        best, loss, trials = self._search(local, path, dampings, predicted)
        if best < 0:
            local.state["radius"] = radius / self.window
            reason = "the loss fell too little, or rose, at every trust radius tried"
            return Move(solution.x, 0.0, solution, False, None, reason, trials)
        x, damping = path.at(dampings[best]), float(dampings[best])
        local.state["radius"] = float(radii[best]) if damping > 0 else float(x.norm())
        chosen = type(solution)(x, damping, solution.rank, None, solution.status)
        return Move(x, 1.0, chosen, True, loss, "", trials)

    def _search(
        self, local: Local, path: Path, dampings: Tensor, predicted: list[float]
    ) -> tuple[int, float, int]:
        """The index of the radius to take (or −1), its loss, and how many were tried.

        The ratio falls with the radius, so where trials are made one by one the last good radius is
        found by bisection.
        """

        def good(loss: float, i: int) -> bool:
            return _ratio(local.loss - loss, predicted[i]) > self.target

        if dampings.is_cuda:  # waiting for a device costs more than trials
            found = in_chunks(lambda d: local.losses(path.at(d)), dampings, local.gradient)
            losses = found.tolist()
            flags = [good(x, i) for i, x in enumerate(losses)]
            best = (flags.index(False) if False in flags else len(flags)) - 1
            return best, losses[best], len(losses)
        low, high, best, tried = -1, self.radii, local.loss, 0  # good below, bad above
        while high - low > 1:
            i = (low + high) // 2
            loss = float(local.losses(path.at(dampings[i : i + 1]))[0])
            tried += 1
            if good(loss, i):
                low, best = i, loss
            else:
                high = i
        return low, best, tried


def _ratio(actual: float, predicted: float) -> float:
    """actual/predicted, infinite or NaN where nothing is predicted."""
    return actual / predicted if predicted else actual * inf
