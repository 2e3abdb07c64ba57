"""Line searches along one direction."""

from __future__ import annotations

import torch

from .base import Local, Move, Step, failed, in_chunks, positive


class GridLineSearch(Step):
    """The best of a logarithmic grid of step sizes.

    An objective is evaluated at all of them in one batch; a closure runs once for each.
    Unlike the search commonly used for energy natural gradients it accepts a step only if the
    loss falls: otherwise it rejects and says so.

    Args:
        points: number of step sizes 2⁰, 2⁻¹, ..., 2^(1−points).
    """

    def __init__(self, points: int = 31) -> None:
        self.points = positive("GridLineSearch(points=...)", points)

    def take(self, local: Local) -> Move:
        solution = local.direction()
        if (rejection := failed(solution)) is not None:
            return rejection
        x = solution.x
        sizes = 0.5 ** torch.arange(self.points, dtype=x.dtype, device=x.device)
        losses = in_chunks(lambda some: local.losses(some[:, None] * x), sizes, x)
        losses = torch.where(torch.isfinite(losses), losses, torch.inf)
        best = int(losses.argmin())
        loss = float(losses[best])
        if not loss < local.loss:
            reason = "no step size of the grid lowers the loss"
            return Move(x, 0.0, solution, False, None, reason, self.points)
        return Move(x, float(sizes[best]), solution, True, loss, "", self.points)


class Backtracking(Step):
    """Shrink from `initial` until L falls by at least c·η·gᵀx (Armijo)."""

    def __init__(
        self, initial: float = 1.0, shrink: float = 0.5, c: float = 1e-4, max_trials: int = 30
    ) -> None:
        self.initial, self.shrink, self.c = initial, shrink, c
        self.max_trials = positive("Backtracking(max_trials=...)", max_trials)

    def take(self, local: Local) -> Move:
        solution = local.direction()
        if (rejection := failed(solution)) is not None:
            return rejection
        x, size = solution.x, self.initial
        slope = float(local.gradient @ local.scaled(x))
        for trial in range(1, self.max_trials + 1):
            loss = local.loss_at(size * x)
            if loss <= local.loss - self.c * size * slope and loss < local.loss:
                return Move(x, size, solution, True, loss, "", trial)
            size *= self.shrink
        reason = "no step size satisfied the Armijo condition; the direction may not descend"
        return Move(x, 0.0, solution, False, None, reason, self.max_trials)
