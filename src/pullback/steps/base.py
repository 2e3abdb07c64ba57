"""The contract of a step: it sees the local model of the loss, and answers with a move.

`Local` is what a step sees at the current parameters. An optimizer builds it: `NaturalGradient`
from the exact Gram, `KFAC` from its Kronecker factors. A step declares in `needs` what it uses of
it, so that an optimizer can refuse a step that asks for more than it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .._core.errors import Status
from ..solvers import Damping, Path, Solution


class Need(Enum):
    """What a step uses of `Local` beyond the direction; the value completes "it needs"."""

    LOSSES = "the loss at trial points, so step(closure)"
    PRODUCTS = "products with the Gram"
    DAMPINGS = "solutions at dampings of its own choice"
    CENTER = "solutions that are nearest to another vector than zero"
    PATH = "every damped solution from one factorization"


@dataclass(frozen=True)
class Move:
    """w ← retract(w − lr·size·direction) if accepted.

    Attributes:
        direction: flat, (p,).
        size: what multiplies it, 0 for a rejection.
        solution: the solution of the damped system that it came from.
        accepted: whether to move.
        loss: the loss after the move, where the step evaluated it.
        reason: why the move was rejected, or empty.
        trials: how often the loss was evaluated at trial points.
    """

    direction: Tensor
    size: float
    solution: Solution
    accepted: bool = True
    loss: float | None = None
    reason: str = ""
    trials: int = 0


def reject(solution: Solution, reason: str, trials: int = 0) -> Move:
    """A move that leaves the parameters where they are."""
    return Move(solution.x, 0.0, solution, accepted=False, reason=reason, trials=trials)


def reject_failure(solution: Solution) -> Move | None:
    """A rejection if the solver found no finite direction, else None."""
    if not solution.status.ok:
        return reject(solution, solution.status.value)
    if not bool(torch.isfinite(solution.x).all()):
        return reject(solution, Status.SINGULAR.value)
    return None


@dataclass
class Local:
    """What a step sees at the current parameters.

    Attributes:
        loss: L(w).
        gradient: g, flat.
        solve: (damping, center) ↦ solution of the damped system nearest to `center`; None stands
            for the solver's own damping, and for zero.
        path: all solutions over damping, or None where the solver does not have them.
        inner_products: vectors (k, p) ↦ x_iᵀG x_j, (k, k).
        losses: moves (k, p) ↦ L(retract(w − lr·move)), one value each.
        lr: the learning rate, if it is the same for all parameters, else None.
        scaled: v ↦ lr·v, group by group.
        state: what the step keeps between steps: its `numbers` and `vectors`, by name.
    """

    loss: float
    gradient: Tensor
    solve: Callable[[Damping | None, Tensor | None], Solution]
    path: Callable[[], Path | None]
    inner_products: Callable[[Tensor], Tensor]
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

    def squared_length(self, move: Tensor) -> Tensor:
        """mᵀG m for the displacement m = lr·move, a scalar tensor."""
        return self.inner_products(self.scaled(move)[None])[0, 0]

    def predict_reduction(self, move: Tensor) -> float:
        """The model's reduction gᵀm − ½mᵀG m for the displacement m = lr·move."""
        slope = self.gradient @ self.scaled(move)
        return float(slope - 0.5 * self.squared_length(move))

    def reduction_ratio(self, move: Tensor, loss: float) -> float:
        """ρ = actual/predicted reduction of a move to this loss; NaN where none is predicted."""
        predicted = self.predict_reduction(move)
        if not predicted > 0:
            return float("nan")
        return (self.loss - loss) / predicted


class Step(ABC):
    """How far to go along the natural gradient."""

    #: the learning rate a param group starts with
    initial_lr: float = 1.0

    #: the step that this one wraps, whose numbers and vectors stand under "inner"
    inner: Step | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """What this step and those inside it use of `Local`, beyond the direction."""
        return frozenset()

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


class Constant(Step):
    """w ← w − lr·x; `lr` lives in the optimizer's param groups, where schedulers find it."""

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = lr
        self.initial_lr = lr

    def take(self, local: Local) -> Move:
        solution = local.direction()
        return reject_failure(solution) or Move(solution.x, 1.0, solution)
