"""Line searches along the natural gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._core.checks import require_number
from .base import Local, Move, Need, Step, reject, reject_failure

_TRIAL_BYTES = 2**29  # memory that trial moves may take together: a small share of any GPU's


def evaluate_in_chunks(
    losses: Callable[[Tensor], Tensor], values: Tensor, vector: Tensor
) -> Tensor:
    """losses(values), a few at a time where a trial `vector` for each would take much memory."""
    count = max(1, _TRIAL_BYTES // (vector.numel() * vector.element_size()))
    return torch.cat([losses(chunk) for chunk in values.split(count)])


class GridLineSearch(Step):
    """The best of a logarithmic grid of step sizes.

    An objective is evaluated at all of them in one batch; a closure runs once for each.
    Unlike the search commonly used for energy natural gradients it accepts a step only if the
    loss falls: otherwise it rejects and says so.

    Args:
        points: number of step sizes 2⁰, 2⁻¹, ..., 2^(1−points).
    """

    def __init__(self, points: int = 31) -> None:
        require_number("GridLineSearch(points=...)", points, positive=True)
        self.points = points

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.LOSSES})

    def take(self, local: Local) -> Move:
        solution = local.direction()
        rejection = reject_failure(solution)
        if rejection is not None:
            return rejection
        x = solution.x
        sizes = 0.5 ** torch.arange(self.points, dtype=x.dtype, device=x.device)
        losses = evaluate_in_chunks(lambda chunk: local.losses(chunk[:, None] * x), sizes, x)
        losses = torch.where(torch.isfinite(losses), losses, torch.inf)
        best = int(losses.argmin())
        loss = float(losses[best])
        if not loss < local.loss:
            return reject(solution, "no step size of the grid lowers the loss", self.points)
        return Move(x, float(sizes[best]), solution, loss=loss, trials=self.points)


class Backtracking(Step):
    """Shrink from `initial` until L falls by at least c·η·gᵀx (Armijo)."""

    def __init__(
        self, initial: float = 1.0, shrink: float = 0.5, c: float = 1e-4, max_trials: int = 30
    ) -> None:
        require_number("Backtracking(max_trials=...)", max_trials, positive=True)
        self.initial = initial
        self.shrink = shrink
        self.c = c
        self.max_trials = max_trials

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.LOSSES})

    def take(self, local: Local) -> Move:
        solution = local.direction()
        rejection = reject_failure(solution)
        if rejection is not None:
            return rejection
        size = self.initial
        slope = float(local.gradient @ local.scaled(solution.x))
        for trial in range(1, self.max_trials + 1):
            loss = local.loss_at(size * solution.x)
            if loss <= local.loss - self.c * size * slope and loss < local.loss:
                return Move(solution.x, size, solution, loss=loss, trials=trial)
            size *= self.shrink
        return reject(
            solution,
            "no step size satisfied the Armijo condition; the direction may not descend",
            self.max_trials,
        )
