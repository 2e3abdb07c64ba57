"""A condition at points as a term of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ...maps import ChunkedMap, IntegralMap, OperatorMap, build_in_chunks
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
    memory: int | None = None,
) -> Term:
    """Return the condition at these points, as a function of the trial's parameters.

    Args:
        problem, condition: what must hold.
        trial: the network with the unknown coefficients.
        sites: the points.
        weight: in the loss; that of the condition by default.
        total: the sum of the points' weights of all processes, if other processes have points.
        memory: bytes that the network's derivatives may take; points are linearized in chunks if
            all together would take more. None for any.
    """
    points = sites[0]
    if weight is None:
        weight = condition.weight
    if total is None:
        total = points.weights.sum()
    point_weights = weight * points.weights / total
    ones = torch.ones_like(point_weights)
    if condition.is_energy:
        return _build_energy(problem, condition, trial, sites, point_weights, memory)
    if condition.target is not None:
        values = _build_residuals(problem, condition, trial, sites, ones)
        return Squares(IntegralMap(values, points.weights, condition.target, weight))
    if memory is None:
        return Squares(_build_residuals(problem, condition, trial, sites, point_weights))

    def build(start: int, stop: int) -> OperatorMap:
        chunk = tuple(site.narrow(start, stop) for site in sites)
        return _build_residuals(problem, condition, trial, chunk, point_weights[start:stop])

    params = dict(trial.named_parameters())
    return Squares(build_in_chunks(build, len(points), params, memory))


def _build_residuals(
    problem: Problem, condition: Condition, trial: Trial, sites: Sites, point_weights: Tensor
) -> OperatorMap:
    """Return the weighted residuals at points."""
    local = LocalResidual(problem, condition, sites)

    def operator(channels: Any, params: dict[str, Tensor]) -> Tensor:
        return local.evaluate(local.make_lookup(channels), select_unknowns(params))

    x = torch.stack([site.x for site in sites])
    return OperatorMap(trial.apply_to, x, local.scheme, operator, point_weights)


def _build_energy(
    problem: Problem,
    condition: Condition,
    trial: Trial,
    sites: Sites,
    point_weights: Tensor,
    memory: int | None,
) -> EnergyTerm:
    """Return an energy; its map gives just the derivatives that the density depends on."""
    if trial.unknowns:
        raise PullbackError(
            "An energy cannot have unknown coefficients",
            "minimizing over them makes no sense: the energy itself would change",
            "Put the unknowns into equations or data conditions",
        )
    local = LocalResidual(problem, condition, sites)
    x = torch.stack([site.x for site in sites])
    ones = torch.ones_like(point_weights)

    def operator(channels: Any, params: dict[str, Tensor]) -> Tensor:
        look_up = local.make_lookup(channels)
        return torch.stack([look_up(*key) for key in local.keys], -1)

    def density(z: Tensor) -> Tensor:
        return local.evaluate(lambda *key: z[:, local.keys.index(key)])[:, 0]

    def build(start: int, stop: int) -> OperatorMap:
        chunk = slice(start, stop)
        return OperatorMap(trial.apply_to, x[:, chunk], local.scheme, operator, ones[chunk])

    derivatives = build(0, len(ones))
    if memory is not None:
        params = dict(trial.named_parameters())
        derivatives = build_in_chunks(build, len(ones), params, memory)
    return EnergyTerm(derivatives, density, point_weights)


def find_nesting_reason(terms: Sequence[Term]) -> str:
    """Return why derivatives are nested and not carried forward; nothing if they are."""
    for term in terms:
        if isinstance(term.map, (OperatorMap, ChunkedMap, IntegralMap)) and term.map.nested_because:
            return term.map.nested_because
    return ""
