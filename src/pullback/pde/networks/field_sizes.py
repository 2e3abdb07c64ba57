"""How large the fields of a solution are, read off a problem's data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..discretization.residual import LocalResidual
from ..discretization.sites import draw_sites
from ..problem.conditions import Condition
from ..problem.problem import Problem
from .wavenumbers import is_linear


@dataclass(frozen=True)
class SizeThresholds:
    """How sizes are estimated."""

    #: points of a condition at which its data are evaluated
    points: int = 256
    #: fields of up to this size, or down to its inverse, need no units: networks begin with values
    #: of about 1. Without units u_t + u_x = 4u up to 3000 creeps at an error of 0.99
    usual: float = 30.0
    #: a source whose mean is a smaller share of its largest value oscillates: the solution is then
    #: far below what the source would give at the lowest wave number (Multiscale: 250 for 1)
    least_mean: float = 0.1


THRESHOLDS = SizeThresholds()


@dataclass(frozen=True)
class LinearPart:
    """A condition linearized at zero fields.

    Attributes:
        values: its residual there, (N, R): minus what is prescribed.
        slopes: by derivative, (N, R) each.
    """

    values: Tensor
    slopes: Mapping[tuple[int, str, tuple[int, ...] | None], Tensor]


def choose_units(problem: Problem) -> Tensor:
    """Return units for all fields, (m,): the sizes of their data, and 1 for usual ones.

    A solution is at least as large as its data, but small data may grow: a unit below 1 is chosen
    for a single field of a linear problem without time alone.
    """
    sizes = _measure_all_prescribed(problem)
    if len(sizes) == 1 and _is_steady(problem) and is_linear(problem):
        return torch.tensor([_choose_linear_unit(problem, float(sizes[0]))], dtype=sizes.dtype)
    return torch.where(sizes > THRESHOLDS.usual, sizes, 1.0)


def _choose_linear_unit(problem: Problem, prescribed: float) -> float:
    """Return the unit of a field whose boundary values are at most `prescribed`."""
    response = _measure_response(problem)
    largest = max(prescribed, response.at_most)
    if 0 < largest < 1 / THRESHOLDS.usual:
        return largest
    least = max(prescribed, response.at_least)
    if least > THRESHOLDS.usual:
        return least
    return 1.0


def _is_steady(problem: Problem) -> bool:
    """Return True if all coordinates are those of space."""
    return len(problem.coordinates.space) == problem.domain.dim


def _measure_all_prescribed(problem: Problem) -> Tensor:
    """Return the largest value that boundary, initial or measured values have, by field, (m,)."""
    sizes = torch.zeros(len(problem.fields), dtype=torch.float64)
    for condition in problem.conditions:
        if condition.is_measured or (condition.prescribes_values and not condition.is_equation):
            sizes = torch.maximum(sizes, _measure_prescribed(problem, condition))
    return sizes


def _linearize_at_zero(problem: Problem, condition: Condition) -> LinearPart:
    count = condition.region(problem.domain).point_count
    if count is None:
        count = THRESHOLDS.points
    sites = draw_sites(problem, condition, count, "sobol", 0)
    local = LocalResidual(problem, condition, sites)
    zero = torch.zeros_like(sites[0].x[:, 0])
    values, slopes = local.linearize(dict.fromkeys(local.keys, zero))
    finite_slopes = {key: slope.nan_to_num(0, 0, 0) for key, slope in slopes.items()}
    return LinearPart(values.nan_to_num(0, 0, 0), finite_slopes)


def _measure_prescribed(problem: Problem, condition: Condition) -> Tensor:
    """Return the largest value that a condition prescribes for each field, (m,)."""
    linear = _linearize_at_zero(problem, condition)
    sizes = torch.zeros(len(problem.fields), dtype=torch.float64)
    total_slope = sum(slope.abs() for slope in linear.slopes.values())
    for (_, field, index), slope in linear.slopes.items():
        # components in which a field's value stands alone
        is_alone = (slope.abs() > 0) & (slope.abs() == total_slope)
        if index == () and bool(is_alone.any()):
            column = problem.fields.index(field)
            largest = float((linear.values / slope)[is_alone].abs().max())
            sizes[column] = max(float(sizes[column]), largest)
    return sizes


@dataclass(frozen=True)
class Response:
    """Bounds of the size of a solution without boundary values; a rough lower one."""

    at_least: float
    at_most: float


def _measure_response(problem: Problem) -> Response:
    """Return |f| / Σ max|a_α| κ^α, the size of a solution of Σ a_α ∂^α u = f.

    κ = π/L is the wave number of an arch across the domain. |f| is the largest value; for the lower
    bound it is zero if f oscillates. Of several equations the largest.
    """
    lengths = problem.domain.high - problem.domain.low
    wavenumbers = (math.pi / lengths).tolist()
    at_least = 0.0
    at_most = 0.0
    for equation in problem.conditions:
        if not equation.is_equation or equation.on is not None:
            continue
        linear = _linearize_at_zero(problem, equation)
        slope = 0.0
        for (_, _, index), coefficient in linear.slopes.items():
            factor = sum(wavenumbers[axis] ** 2 for axis in problem.coordinates.space)
            if index is not None:
                factor = math.prod(wavenumbers[axis] for axis in index)
            slope += factor * float(coefficient.abs().max())
        if not slope:
            continue
        largest = float(linear.values.abs().max())
        at_most = max(at_most, largest / slope)
        if float(linear.values.mean().abs()) >= THRESHOLDS.least_mean * largest:
            at_least = max(at_least, largest / slope)
    return Response(at_least, at_most)
