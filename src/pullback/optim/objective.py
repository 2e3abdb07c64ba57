"""A function of the parameter dict that returns residuals, as a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from .._core.errors import PullbackError, reraise_fatal
from .._core.factor import Diagonal
from .._core.state import RandomState
from ..grams import Part
from ..maps import ObjectiveMap
from ..metrics import Metric
from .problem import Place, Problem

_TRIAL_BYTES = 2**28


class ObjectiveProblem(Problem):
    """L = ½‖z‖² for the weighted residuals z of an objective.

    The metric is the Euclidean one of z (Gauss–Newton), unless other values are given to
    measure with (`metric_batch`): then it is the optimizer's metric on those.
    """

    def __init__(
        self, params: dict[str, nn.Parameter], objective: Callable[..., Any], reduction: str
    ) -> None:
        super().__init__(params)
        self._random = RandomState(self.space.device)
        self._map = ObjectiveMap(self._repeatable(objective), reduction)

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
        linear = self._map.linearize(self.params)
        self._linear, z = linear, linear.value
        self.loss = float(0.5 * z.square().sum())
        if not torch.isfinite(torch.tensor(self.loss)):
            return self.broken()
        self.gradient = linear.vjp(z)
        if (
            not bool(self.gradient.any())
            and self.loss > 0
            and not bool(linear.jvp(torch.ones_like(self.gradient)).any())
        ):
            raise PullbackError(
                "The objective does not depend on the parameters",
                "its residuals have no gradient",
                "Use the given parameter dict, for example with torch.func.functional_call",
            )
        return self.broken()

    def parts(self, metric: Metric, batch: Any) -> tuple[list[Part], Tensor | None]:
        if batch is not None:
            values = ObjectiveMap(self._repeatable(batch), self._map.reduction)
            linear = values.linearize(self.params)
            return [Part(linear, metric.factor(linear.value))], None
        z = self._linear.value
        return [Part(self._linear, Diagonal(torch.ones_like(z)))], z.flatten()

    def pulled(self) -> Tensor:
        return self.gradient

    def losses(self, moves: Tensor, place: Place) -> Tensor:
        def loss(move: Tensor) -> Tensor:
            return 0.5 * self._map(place(self.params, move)).square().sum()

        chunk = max(1, _TRIAL_BYTES // (self._linear.value.numel() * 64 * moves.element_size()))
        with torch.no_grad():
            try:
                return vmap(loss, chunk_size=chunk, randomness="same")(moves)
            except RuntimeError as error:
                reraise_fatal(error)  # else the objective or retraction branches on its data
                return torch.stack([loss(move) for move in moves])

    def rollback(self) -> None:
        self._random.restore()
