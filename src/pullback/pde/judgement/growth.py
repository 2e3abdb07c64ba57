"""How much an evolution equation amplifies errors, by its waves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..discretization.residual import Key, LocalResidual
from ..discretization.seeds import SEEDS
from ..discretization.trial import Trial
from ..problem.conditions import Condition, Dirichlet
from ..problem.problem import Problem


@dataclass(frozen=True)
class GrowthThresholds:
    """How growth is measured."""

    #: points at which the equations are linearized: eight along each side of a square
    points: int = 64
    #: half waves across the domain, along all axes at once; 0 is a constant. Rates are polynomials
    #: in the wave number, so that powers of two find the largest within a small factor.
    half_waves: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    #: the largest exponent that is told apart from infinity: e^709 is the largest float64
    largest_exponent: float = 700.0


THRESHOLDS = GrowthThresholds()


def measure_growth(problem: Problem, trial: Trial, unknowns: Mapping[str, Tensor]) -> float:
    """Return exp(T · max Re λ), at least 1: by how much waves grow in the time T.

    The equations A ∂u/∂t + B(∇) u = … are linearized at the solution. A wave e^(λt + iκ·x) has an
    eigenvalue λ of −A⁻¹B(iκ); the median over points counts. It is 1 where the equations are not
    of first order in time, or A is singular: nothing is known then.
    """
    slopes = _collect_slopes(problem, trial, unknowns)
    time_axis = problem.domain.dim - 1
    if any(_is_unsuitable(index, time_axis) for _, _, index in slopes):
        return 1.0
    rates = []
    for count in _list_half_waves(problem):
        mass, operator = _assemble(problem, slopes, count)
        if mass.shape[-1] != mass.shape[-2] or bool((torch.linalg.svdvals(mass)[:, -1] == 0).any()):
            return 1.0
        eigenvalues = torch.linalg.eigvals(-torch.linalg.solve(mass, operator))
        rates.append(float(eigenvalues.real.amax(1).median()))
    duration = float(problem.domain.high[-1] - problem.domain.low[-1])
    return math.exp(min(THRESHOLDS.largest_exponent, duration * max(0.0, *rates)))


def _list_half_waves(problem: Problem) -> tuple[int, ...]:
    """Return half waves that the boundary admits: a constant is none where values are given."""
    if any(isinstance(condition, Dirichlet) for condition in problem.conditions):
        return THRESHOLDS.half_waves
    return (0, *THRESHOLDS.half_waves)


def _is_unsuitable(index: tuple[int, ...] | None, time_axis: int) -> bool:
    """Return True for derivatives with time beyond ∂/∂t."""
    return index is not None and time_axis in index and index != (time_axis,)


def _collect_slopes(
    problem: Problem, trial: Trial, unknowns: Mapping[str, Tensor]
) -> dict[Key, Tensor]:
    """Return the slopes of all equations side by side, (N, R) by derivative."""
    points = problem.domain.sample(THRESHOLDS.points, "sobol", seed=SEEDS.inspection)
    parameter = next(trial.parameters())
    points = points.to(parameter.dtype, parameter.device)
    by_equation: list[dict[Key, Tensor]] = []
    for condition in problem.conditions:
        if is_field_equation(condition):
            local = LocalResidual(problem, condition, (points,), unknowns)
            by_equation.append(local.linearize(local.differentiate(trial)).slopes)
    keys: set[Key] = set()
    for slopes in by_equation:
        keys |= slopes.keys()
    columns: dict[Key, list[Tensor]] = {key: [] for key in keys}
    for slopes in by_equation:
        zero = torch.zeros_like(next(iter(slopes.values())))
        for key in keys:
            columns[key].append(slopes.get(key, zero))
    return {key: torch.cat(tensors, 1).double().cpu() for key, tensors in columns.items()}


def is_field_equation(condition: Condition) -> bool:
    """Return True for an equation that holds in the whole domain."""
    return condition.is_equation and condition.on is None


def _assemble(
    problem: Problem, slopes: Mapping[Key, Tensor], half_waves: int
) -> tuple[Tensor, Tensor]:
    """Return A and B(iκ) at all points, (N, R, m) each."""
    time_axis = problem.domain.dim - 1
    lengths = problem.domain.high - problem.domain.low
    wavenumbers = (half_waves * math.pi / lengths).tolist()
    count, components = next(iter(slopes.values())).shape
    shape = (count, components, len(problem.fields))
    mass = torch.zeros(shape, dtype=torch.complex128)
    operator = torch.zeros(shape, dtype=torch.complex128)
    for (_, field, index), slope in slopes.items():
        column = problem.fields.index(field)
        if index == (time_axis,):
            mass[..., column] += slope
        elif index is None:
            laplacian = sum(wavenumbers[axis] ** 2 for axis in problem.coordinates.space)
            operator[..., column] -= laplacian * slope
        else:
            operator[..., column] += math.prod(1j * wavenumbers[axis] for axis in index) * slope
    return mass, operator
