"""A rule of `steps/` that chooses the move along K-FAC's direction.

Trial losses and products with the Gram are exact: they are those of the closure's own batch. Only
the direction is K-FAC's, R⁻¹GC⁻¹ at the damping of the last refresh. The first direction of a step
has the inverses at hand. Where the rule asks for a second one, at another damping, they are
refreshed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...metrics import Metric
from ...solvers import Solution
from ...steps import Local, Move, Need, Step
from ...steps.memory import first_numbers, first_vectors, merge_saved, recall, shared_numbers, store
from ..problem import StepProblem
from .block_stack import Tensors
from .closure import ControlledClosure, compute_gram_inner_products
from .update import GroupUpdate

#: keys of a parameter's state
NUMBERS = "step_numbers"
VECTORS = "step_vectors"
_DAMPING = "damping"
_IN_USE = "inverted_damping"


def find_damping(step: Step) -> float | None:
    """Return the first λ of a step, or of one inside it; None if no step chooses λ."""
    current: Step | None = step
    while current is not None:
        if _DAMPING in current.numbers:
            return float(current.numbers[_DAMPING])
        current = current.inner
    return None


def _find_next_damping(state: dict[str, Any]) -> float | None:
    """Return λ from the state of a step, or of one inside it; None if no step chooses λ."""
    tree: Any = state
    while isinstance(tree, dict):
        if _DAMPING in tree:
            return float(tree[_DAMPING])
        tree = tree.get("inner")
    return None


def _find_last_move(state: dict[str, Any]) -> Tensor | None:
    """Return the last move that a step keeps, or one inside it."""
    tree: Any = state
    while isinstance(tree, dict):
        if isinstance(tree.get("move"), Tensor):
            return tree["move"]
        tree = tree.get("inner")
    return None


@dataclass
class StepMemory:
    """What a step keeps between steps: numbers for all parameters, and vectors by parameter."""

    step: Step
    numbers: dict[str, Any]
    vectors: dict[str, dict[str, Any]]

    @classmethod
    def empty(cls, step: Step, damping: float) -> StepMemory:
        """Return the memory before the first step; `damping` is that of the first inverses."""
        return cls(step, {"step": first_numbers(step), _IN_USE: damping}, {})

    @property
    def inverted_damping(self) -> float:
        """λ of the inverses in use."""
        return self.numbers[_IN_USE]

    @inverted_damping.setter
    def inverted_damping(self, value: float) -> None:
        self.numbers[_IN_USE] = value

    def vectors_of(self, name: str, p: Tensor) -> dict[str, Any]:
        """Return a parameter's part of the vectors, zeros at first."""
        if name not in self.vectors:
            self.vectors[name] = first_vectors(self.step, p.detach())
        return self.vectors[name]

    def load(self, saved: dict[str, Any], params: Tensors) -> None:
        """Read numbers and vectors from what `KFAC` saved by parameter."""
        first = {"step": first_numbers(self.step), _IN_USE: self.inverted_damping}
        self.numbers = shared_numbers(first, [state.get(NUMBERS) for state in saved.values()])
        for name, state in saved.items():
            zeros = first_vectors(self.step, params[name].detach())
            self.vectors[name] = merge_saved(zeros, state.get(VECTORS, {}))


@dataclass
class StepView:
    """What a step sees of K-FAC at the present parameters.

    Attributes:
        problem: the loss, and trial losses.
        metric: of the exact Gram.
        gradients: by name.
        updates: K-FAC's directions with their learning rates.
        refresh: λ ↦ the updates that inverses at this λ give.
    """

    problem: StepProblem
    metric: Metric
    gradients: Tensors
    updates: Sequence[GroupUpdate]
    refresh: Callable[[float], Sequence[GroupUpdate]]

    def __post_init__(self) -> None:
        self._has_solved = False
        self._last_move: Tensor | None = None
        self._rate = self._flatten_rates()

    def choose_move(self, memory: StepMemory) -> Move:
        """Return the move that the step chooses, and write what it keeps to `memory`.

        Raise for a step that models the loss if the closure gives another loss when it runs again:
        the model of one batch says nothing about the next.
        """
        if Need.PRODUCTS in memory.step.needs and isinstance(self.problem, ControlledClosure):
            self.problem.refuse_stochastic()
        space = self.problem.space
        params = self.problem.params
        step = memory.step
        vectors = [memory.vectors_of(name, p) for name, p in params.items()]
        local = Local(
            loss=self.problem.loss,
            gradient=self._flatten(self.gradients),
            solve=lambda damping, center: self._solve(damping, memory),
            path=lambda: None,
            inner_products=lambda flat: compute_gram_inner_products(
                self.problem, self.metric, flat
            ),
            losses=lambda moves: self.problem.losses(moves, self._subtract_move),
            lr=self._common_rate(),
            scaled=lambda v: self._rate * v,
            state=recall(step, memory.numbers["step"], vectors, space.flatten),
        )
        self._last_move = _find_last_move(local.state)
        move = step.take(local)
        store(
            step, local.state, memory.numbers["step"], vectors,
            lambda flat: space.split(flat).values(),
        )  # fmt: skip
        return move

    def split_move(self, move: Move) -> tuple[float, float | None]:
        """Return α and β of a move αd + βm along the direction d and the last move m.

        Where there was no last move, β is None; α is then that of the nearest multiple of d.
        """
        span = [move.solution.x.double()]
        if self._last_move is not None and bool(self._last_move.any()):
            span.append(self._last_move.double())
        displacement = move.size * move.direction.double()
        rows = torch.stack(span)
        # sums of products, whose last bits do not depend on where the memory begins
        products = (rows[:, None] * rows).sum(-1)
        slopes = (rows * displacement).sum(-1)
        alpha, *beta = (torch.linalg.pinv(products, hermitian=True) @ slopes).tolist()
        return alpha, beta[0] if beta else None

    def next_damping(self, memory: StepMemory) -> float | None:
        """Return the λ that the step wants at the next refresh, if it chooses one."""
        return _find_next_damping(memory.numbers["step"])

    def _solve(self, damping: Any, memory: StepMemory) -> Solution:
        """Return the direction at this damping; the first call takes the inverses as they are.

        A later call refreshes them if they are those of another damping.
        """
        if damping is not None and self._has_solved and float(damping) != memory.inverted_damping:
            self.updates = self.refresh(float(damping))
            memory.inverted_damping = float(damping)
        self._has_solved = True
        return Solution(self._flatten_directions(), damping=memory.inverted_damping)

    def _flatten(self, by_name: Tensors) -> Tensor:
        """Return tensors in the parameters' shapes as one vector, with zeros for missing ones."""
        return self.problem.space.flatten({n: by_name.get(n) for n in self.problem.params})

    def _flatten_directions(self) -> Tensor:
        """Return the directions of all updates as one vector, (p,)."""
        by_name: dict[str, Tensor] = {}
        for update in self.updates:
            by_name |= zip(update.names, update.directions, strict=True)
        return self._flatten(by_name)

    def _flatten_rates(self) -> Tensor:
        """Return the learning rate of every entry, (p,)."""
        by_name: dict[str, Tensor] = {}
        for update in self.updates:
            for name, p in zip(update.names, update.params, strict=True):
                by_name[name] = torch.full_like(p, float(update.lr))
        return self._flatten(by_name)

    def _common_rate(self) -> float | None:
        """Return the learning rate if it is the same for all parameters, else None."""
        rates = {float(update.lr) for update in self.updates}
        return rates.pop() if len(rates) == 1 else None

    def _subtract_move(self, origin: Tensors, move: Tensor) -> dict[str, Tensor]:
        """Return the parameters after w ← w − lr·move, by name."""
        pieces = self.problem.space.split(self._rate * move)
        return {name: w - pieces[name].to(w.dtype) for name, w in origin.items()}


def replace_directions(updates: Sequence[GroupUpdate], problem: StepProblem, move: Move) -> None:
    """Make the move that a step has chosen the direction of the updates, without momentum."""
    pieces = problem.space.split(move.size * move.direction)
    for update in updates:
        update.directions = [
            pieces[n].to(p) for n, p in zip(update.names, update.params, strict=True)
        ]
        update.momenta = []
        update.momentum = 0.0
