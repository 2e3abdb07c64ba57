"""A condition at points as a term of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ...maps import IntegralMap, OperatorMap
from ...optim import EnergyTerm, Squares, Term
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
    """Return the condition at these points, as a function of the trial's parameters.

    Args:
        problem, condition: what must hold.
        trial: the network with the unknown coefficients.
        sites: the points.
        weight: in the loss; that of the condition by default.
        total: the sum of the points' weights of all processes, if other processes have points.
    """
    points = sites[0]
    local = LocalResidual(problem, condition, sites)
    if weight is None:
        weight = condition.weight
    if total is None:
        total = points.weights.sum()
    point_weights = weight * points.weights / total
    x = torch.stack([site.x for site in sites])
    if condition.is_energy:
        return _build_energy(local, trial, x, point_weights)

    def operator(channels: Any, params: dict[str, Tensor]) -> Tensor:
        return local.evaluate(local.look_up_in(channels), select_unknowns(params))

    if condition.target is not None:
        ones = torch.ones_like(point_weights)
        values = OperatorMap(trial.apply_to, x, local.scheme, operator, ones)
        return Squares(IntegralMap(values, points.weights, condition.target, weight))
    return Squares(OperatorMap(trial.apply_to, x, local.scheme, operator, point_weights))


def _build_energy(
    local: LocalResidual, trial: Trial, x: Tensor, point_weights: Tensor
) -> EnergyTerm:
    """Return an energy; its map gives just the derivatives that the density depends on."""
    if trial.unknowns:
        raise PullbackError(
            "An energy cannot have unknown coefficients",
            "minimizing over them makes no sense: the energy itself would change",
            "Put the unknowns into equations or data conditions",
        )

    def operator(channels: Any, params: dict[str, Tensor]) -> Tensor:
        look_up = local.look_up_in(channels)
        return torch.stack([look_up(*key) for key in local.keys], -1)

    def density(z: Tensor) -> Tensor:
        return local.evaluate(lambda *key: z[:, local.keys.index(key)])[:, 0]

    ones = torch.ones_like(point_weights)
    derivatives = OperatorMap(trial.apply_to, x, local.scheme, operator, ones)
    return EnergyTerm(derivatives, density, point_weights)


def find_nesting_reason(terms: Sequence[Term]) -> str:
    """Return why derivatives are nested and not carried forward; nothing if they are."""
    for term in terms:
        if isinstance(term.map, (OperatorMap, IntegralMap)) and term.map.nested_because:
            return term.map.nested_because
    return ""
