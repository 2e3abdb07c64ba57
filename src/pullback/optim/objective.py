"""An objective, a function of the parameter dict that returns residuals, as a problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from .._core.errors import PullbackError, reraise_fatal
from .._core.state import RandomState
from ..grams import Part
from ..maps import ObjectiveMap
from ..metrics import Metric
from .problem import Place, Problem
from .terms import Objective, Squares

_RECORDED = 2**22  # entries of one evaluation up to which Python takes most of its time
_TRIAL_BYTES = {"cpu": 2**26, "cuda": 2**33}  # about the cache; about the memory


class ObjectiveProblem(Problem):
    """L = Σ_k ℓ_k(z_k): half the square of the weighted residuals, or an `Objective`'s terms.

    The metric is that of the terms (Gauss–Newton for residuals), unless other values are given to
    measure with (`metric_batch`): then it is the optimizer's metric on those.
    """

    proven = True  # by torch.func, or once by the operator's map itself

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        objective: Objective | Callable[..., Any],
        reduction: str,
    ) -> None:
        super().__init__(params)
        self._random = RandomState(self.space.device)
        self._reduction = reduction
        if not isinstance(objective, Objective):
            objective = Objective([Squares(ObjectiveMap(self._repeatable(objective), reduction))])
        self._objective, self._terms = objective, objective.terms
        self._loss = objective.loss

    def _repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same random numbers at every evaluation: loss, Jacobian and trials must agree."""
        random = RandomState(self.space.device)

        def repeated(point: dict[str, Tensor]) -> Any:
            random.restore()
            return function(point)

        return repeated

    def evaluate(self) -> str:
        with torch.autocast(self.space.device.type, enabled=False):
            return self._evaluate()

    def _evaluate(self) -> str:
        linears = [term.map.linearize(self.params) for term in self._terms]
        pairs = list(zip(self._terms, linears, strict=True))
        # carried forward, one trial is work enough for a core
        self._apart = self.space.device.type == "cpu" and all(x.structured for x in linears)
        self._footprint = sum(getattr(x, "footprint", 64 * x.value.numel()) for x in linears)
        total = torch.stack([term.loss(x.value) for term, x in pairs]).sum()
        self.loss = float(total)
        if not math.isfinite(self.loss):
            return self.broken()
        if self._apart and self._footprint <= _RECORDED:
            self._loss = self._objective.recorded(self.params, total)
        self._parts = [Part(x, term.factor(x.value)) for term, x in pairs]
        shares = []
        for (term, x), part in zip(pairs, self._parts, strict=True):
            slope = term.slope(x.value)
            # where rows cost no more than a reverse pass, the gradient comes from them
            rows = x.structured and term.whitened
            shares.append(part.lift(slope.flatten()) if rows else x.vjp(slope))
        self.gradient = torch.stack(shares).sum(0)
        white = [share for term, share in zip(self._terms, shares, strict=True) if term.whitened]
        self._pulled = torch.stack(white).sum(0) if white else None
        if not bool(self.gradient.any()) and self.loss != 0:
            self._refuse_constant()
        return self.broken()

    def _refuse_constant(self) -> None:
        ones = torch.ones_like(self.gradient)
        if not any(bool(part.linear.jvp(ones).any()) for part in self._parts):
            raise PullbackError(
                "The objective does not depend on the parameters",
                "its residuals have no gradient",
                "Use the given parameter dict, for example with torch.func.functional_call",
            )

    def parts(self, metric: Metric, batch: Any) -> tuple[list[Part], Tensor | None]:
        if batch is not None:
            values = ObjectiveMap(self._repeatable(batch), self._reduction)
            linear = values.linearize(self.params)
            return [Part(linear, metric.factor(linear.value))], None
        if self._pulled is None:
            return self._parts, None
        white = [
            part.linear.value.flatten()
            if term.whitened
            else torch.zeros(part.count, dtype=self.space.dtype, device=self.space.device)
            for term, part in zip(self._terms, self._parts, strict=True)
        ]
        return self._parts, torch.cat(white)

    def pulled(self) -> Tensor:
        return self.gradient if self._pulled is None else self._pulled

    def losses(self, moves: Tensor, place: Place) -> Tensor:
        def loss(move: Tensor) -> Tensor:
            return self._loss(place(self.params, move))

        if self._apart:
            with torch.no_grad():
                return torch.stack([loss(move) for move in moves])
        room = _TRIAL_BYTES.get(moves.device.type, 2**28)
        chunk = max(1, room // (self._footprint * moves.element_size()))
        with torch.no_grad():
            try:
                return vmap(loss, chunk_size=chunk, randomness="same")(moves)
            except RuntimeError as error:
                reraise_fatal(error)  # else the objective or retraction branches on its data
                return torch.stack([loss(move) for move in moves])

    def rollback(self) -> None:
        self._random.restore()
