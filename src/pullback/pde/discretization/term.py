"""A condition at points as a term of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ...maps import IntegralMap, OperatorMap
from ...optim import EnergyTerm, Squares, Term
from ..problem import conditions
from ..problem.conditions import Condition
from ..problem.problem import Problem
from .residual import LocalResidual
from .sites import Sites
from .trial import Trial, select_unknowns


def build_term(
    problem: Problem,
    condition: Condition,
    trial: Trial,
    sites: Sites,
    weight: float | None = None,
    total: Tensor | None = None,
) -> Term:
    """The condition at these points; its derivatives are found by a dry run.

    Without a weight it has the condition's own. `total` is the sum of the points' weights,
    where these are not all points.
    """
    points = sites[0]
    local = LocalResidual(problem, condition, sites)
    weight = condition.weight if weight is None else weight
    q = weight * points.weights / (points.weights.sum() if total is None else total)
    x = torch.stack([p.x for p in sites])
    if isinstance(condition, conditions.Energy):
        return _energy(local, trial, x, q)

    def operator(channels: Any, params: dict[str, Tensor]) -> Tensor:
        return local.evaluate(local.picker(channels), select_unknowns(params))

    if isinstance(condition, conditions.Integral):
        values = OperatorMap(trial.apply_to, x, local.scheme, operator, torch.ones_like(q))
        return Squares(IntegralMap(values, points.weights, condition.value, weight))
    return Squares(OperatorMap(trial.apply_to, x, local.scheme, operator, q))


def _energy(local: LocalResidual, trial: Trial, x: Tensor, q: Tensor) -> EnergyTerm:
    """z holds just the derivatives that the density depends on."""
    if trial.unknowns:
        raise PullbackError(
            "An energy cannot have unknown coefficients",
            "minimizing over them makes no sense: the energy itself would change",
            "Put the unknowns into equations or data conditions",
        )

    def operator(channels: Any, params: dict[str, Tensor]) -> Tensor:
        pick = local.picker(channels)
        return torch.stack([pick(*key) for key in local.keys], -1)

    def density(z: Tensor) -> Tensor:
        return local.evaluate(lambda *key: z[:, local.keys.index(key)])[:, 0]

    map = OperatorMap(trial.apply_to, x, local.scheme, operator, torch.ones_like(q))
    return EnergyTerm(map, density, q)


def find_nesting_reason(terms: Sequence[Term]) -> str:
    """Why derivatives are not carried forward, where they are not."""
    for item in terms:
        if isinstance(item.map, (OperatorMap, IntegralMap)) and item.map.nested_because:
            return item.map.nested_because
    return ""
