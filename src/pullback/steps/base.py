"""Steps: given the local picture, how far to move, and whether to accept.

A step sees the loss, solutions of the damped system, the model's predicted reduction and the
true loss at trial points; it answers with a `Move`. Wrappers (`Clip`, `Spring`, `TrustNorm`)
change the direction that an inner step sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._core.errors import Status, require
from ..solvers import Damping, Path, Solution

_TRIAL_BYTES = 2**29  # that trial moves may take together


@dataclass(frozen=True)
class Move:
    """w ← retract(w − lr·size·direction) if accepted."""

    direction: Tensor
    size: float
    solution: Solution
    accepted: bool = True
    loss: float | None = None
    reason: str = ""
    trials: int = 0


@dataclass
class Local:
    """What a step sees at the current parameters.

    Attributes:
        loss: L(w).
        gradient: g, flat.
        solve: (damping, about) ↦ solution of the damped system nearest to `about`.
        path: all solutions over damping, where the solver has them.
        image: v ↦ G v.
        losses: moves (k, p) ↦ L(retract(w − lr·move)), one value each.
        lr: the learning rate, if it is the same for all parameters, else None.
        scaled: v ↦ lr·v, group by group.
        state: what the step keeps between steps: its `numbers` and `vectors`, by name.
    """

    loss: float
    gradient: Tensor
    solve: Callable[[Damping | None, Tensor | None], Solution]
    path: Callable[[], Path | None]
    image: Callable[[Tensor], Tensor]
    losses: Callable[[Tensor], Tensor]
    lr: float | None
    scaled: Callable[[Tensor], Tensor]
    state: dict[str, Any] = field(default_factory=dict)

    def loss_at(self, move: Tensor) -> float:
        """L(retract(w − lr·move))."""
        return float(self.losses(move[None])[0])

    def direction(self, damping: Damping | None = None) -> Solution:
        """The natural gradient at the solver's own damping, or another."""
        return self.solve(damping, None)

    def predicted(self, move: Tensor) -> float:
        """The model's reduction gᵀm − ½mᵀGm for the displacement m = lr·move."""
        m = self.scaled(move)
        return float(self.gradient @ m - 0.5 * m @ self.image(m))


class Step(ABC):
    """How far to go along the natural gradient."""

    #: the learning rate a param group starts with
    initial_lr: float = 1.0

    #: the step that this one wraps, whose numbers and vectors stand under "inner"
    inner: Step | None = None

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers in `Local.state`, with their first values."""
        return {}

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of flat vectors in `Local.state`, zero at first."""
        return ()

    @abstractmethod
    def take(self, local: Local) -> Move:
        """The move to make, or a rejection."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k != "initial_lr")
        return f"{type(self).__name__}({fields})"


def failed(solution: Solution) -> Move | None:
    """A rejection where the solver found no direction."""
    if solution.status.ok and bool(torch.isfinite(solution.x).all()):
        return None
    status = solution.status if not solution.status.ok else Status.SINGULAR
    return Move(solution.x, 0.0, solution, accepted=False, reason=status.value)


def in_chunks(losses: Callable[[Tensor], Tensor], values: Tensor, like: Tensor) -> Tensor:
    """losses(values), a few values at a time where their moves would take much memory."""
    width = max(1, _TRIAL_BYTES // (like.numel() * like.element_size()))
    return torch.cat([losses(some) for some in values.split(width)])


def positive(name: str, value: Any) -> Any:
    """The value, if it is a positive number."""
    require(isinstance(value, (int, float)) and value > 0, name, value, "Use a positive number")
    return value


class Constant(Step):
    """w ← w − lr·x; `lr` lives in the optimizer's param groups, where schedulers find it."""

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = self.initial_lr = lr

    def take(self, local: Local) -> Move:
        solution = local.direction()
        return failed(solution) or Move(solution.x, 1.0, solution)


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
