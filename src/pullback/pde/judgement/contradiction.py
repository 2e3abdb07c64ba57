"""Conditions that cannot hold together, which no step and no network changes.

Let A be the derivative of all residuals r by a change of the solution. Where conditions contradict
each other there is a y with Aᵀy = 0 and yᵀr ≠ 0, and every change leaves at least the part of r
along y (Fredholm's alternative). That part is what least squares leave, and it lies in the
conditions that contradict: without these y would vanish.

Polynomials leave something too where they are too coarse. It oscillates, is concentrated, gets
smaller with more of them, or belongs to thin layers. A contradiction does none of this.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor, nn

from ..discretization.residual import LocalResidual
from ..discretization.seeds import SEEDS
from ..domains import Domain, Region
from ..domains.sampling import Points, Sampler, Sobol
from ..networks.modules import Slabs
from ..problem.conditions import Condition, Dirichlet, Initial
from ..problem.problem import Problem
from .chebyshev import ChebyshevBasis
from .correction import (
    ConditionRows,
    CorrectionLevel,
    ErrorSpace,
    Window,
    choose_degrees,
    find_error_space,
    is_suitable,
)


@dataclass(frozen=True)
class ContradictionThresholds:
    """When what least squares leave is called a contradiction.

    Measured on fourteen problems with contradictions and on thirty with jumps, fronts, corners and
    boundary layers that nothing resolves.

    Attributes:
        coefficients: of the polynomials, of all fields together.
        oversampling: points for every one of them; at two, they fit a tenth of what they cannot.
        smallest_share: of a condition's terms, that it must miss.
        stable_ratio: of what polynomials leave to what those of half the degrees do: 0.98 or more
            for contradictions.
        smooth_share: of a condition's part, that a few polynomials must explain at other points:
            0.85 or more for contradictions, below 0.6 for jumps, corners and interior layers.
        smooth_degrees: of these, along each axis in one, two and three dimensions.
        fitted_share: of the points, to which they are fitted.
        layer_points: N²-fold width of a layer that N polynomials resolve.
        smallest_singular_value: relative, of functions that have the same norm.
        convexity_pairs: of points, whose middle lies in a convex domain.
        shared_points: where values of two conditions are compared.
        smallest_difference: of two values at a point, as a share of the largest value.
    """

    coefficients: int = 250
    oversampling: float = 4.0
    smallest_share: float = 1e-2
    stable_ratio: float = 0.95
    smooth_share: float = 0.7
    smooth_degrees: tuple[int, ...] = (12, 6, 4)
    fitted_share: float = 0.6
    layer_points: float = 4.0
    smallest_singular_value: float = 1e-10
    convexity_pairs: int = 500
    shared_points: int = 200
    smallest_difference: float = 1e-3


THRESHOLDS = ContradictionThresholds()


@dataclass(frozen=True)
class RemainingResidual:
    """What no polynomial change of a solution removes from the residual of a condition.

    Attributes:
        rows: the condition at its points.
        values: the remaining residual, (N, R); (1, R) for an integral.
    """

    rows: ConditionRows
    values: Tensor

    @property
    def name(self) -> str:
        """The name of the condition."""
        return self.rows.condition.name

    @property
    def size(self) -> float:
        """The root mean square."""
        return float(self.values.square().sum(1).mean().sqrt())

    def is_smooth(self, domain: Domain) -> bool:
        """Return True if a few polynomials, fitted at some points, explain it at the others.

        A few numbers, at the ends of an interval say, are as they are.
        """
        degrees = [THRESHOLDS.smooth_degrees[domain.dim - 1]] * domain.dim
        if len(self.values) <= THRESHOLDS.oversampling * math.prod(degrees):
            return True
        x = self.rows.points.x
        functions = ChebyshevBasis(domain.low, domain.high, degrees).derivative(x, ())
        generator = torch.Generator().manual_seed(SEEDS.inspection)
        is_fitted = torch.rand(len(x), generator=generator) < THRESHOLDS.fitted_share
        coefficients = _fit(functions[is_fitted], self.values[is_fitted])
        others = self.values[~is_fitted]
        unexplained = others - functions[~is_fitted] @ coefficients
        share = float(unexplained.square().sum()) / float(others.square().sum())
        return 1 - share >= THRESHOLDS.smooth_share


class ContradictionSearch:
    """Least squares by polynomials at a solution.

    Attributes:
        remaining: what polynomials leave of every condition.
    """

    def __init__(self, space: ErrorSpace) -> None:
        problem = space.problem
        level = CorrectionLevel(THRESHOLDS.coefficients, windows=1)
        self._degrees = choose_degrees(problem, level, space.largest_degree, is_window=False)
        self._domain = problem.domain
        self._window = Window(
            problem, space.network, space.distance, self._degrees, THRESHOLDS.oversampling
        )
        systems = self._window.linearize_conditions()
        rows = torch.cat([system.rows for system in systems])
        self._rows = rows.unflatten(1, (len(problem.fields), -1))
        self._residuals = torch.cat([system.residuals for system in systems])
        self._left_over = self._reduce(self._rows)
        counts = [len(system.residuals) for system in systems]
        self.remaining: list[RemainingResidual] = []
        for condition, values in zip(self._window.rows, self._left_over.split(counts), strict=True):
            count = len(condition.points.x)
            if condition.condition.target is not None:
                count = 1
            values = values.reshape(count, -1) / condition.scale
            self.remaining.append(RemainingResidual(condition, values))

    def _reduce(self, rows: Tensor) -> Tensor:
        """Return the residuals that are left after least squares by polynomials, (n,)."""
        columns = rows.flatten(1)
        columns = columns / columns.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
        right_side = self._residuals[:, None]
        return (right_side - columns @ _fit(columns, right_side))[:, 0]

    def is_stable(self) -> bool:
        """Return True if half of the degrees leave nearly the same."""
        is_low = torch.ones(1, dtype=torch.bool)
        for degree in self._degrees:
            is_low = (is_low[:, None] & (torch.arange(degree) < max(2, degree // 2))).flatten()
        left_by_few = float(self._reduce(self._rows[:, :, is_low]).norm())
        return float(self._left_over.norm()) >= THRESHOLDS.stable_ratio * left_by_few

    def resolves_layers(self) -> bool:
        """Return True if polynomials resolve the thinnest layer that the equations can have.

        Where a derivative of order k has the coefficient a, and one of order j < k has b, a layer
        is (a/b)^(1/(k − j)) thin. N polynomials resolve 1/N² at the boundary. Thinner layers fulfil
        boundary values that contradict all smooth solutions.
        """
        smallest_width = THRESHOLDS.layer_points / min(self._degrees) ** 2
        equations = [rows for rows in self._window.rows if rows.condition.is_equation]
        return all(self._find_layer_width(rows) >= smallest_width for rows in equations)

    def _find_layer_width(self, rows: ConditionRows) -> float:
        """Return the width of the thinnest layer of an equation, as a share of the domain."""
        lengths = self._domain.high - self._domain.low
        slopes = rows.local.linearize(rows.derivatives).slopes
        by_field: dict[tuple[str, int], dict[int, float]] = {}
        for (_, field, index), slope in slopes.items():
            axes = (0, 0) if index is None else index
            scale = math.prod(float(lengths[axis]) for axis in axes)
            for component, size in enumerate(slope.square().mean(0).sqrt().tolist()):
                orders = by_field.setdefault((field, component), {})
                orders[len(axes)] = max(orders.get(len(axes), 0.0), size / scale)
        return min(map(_compare_orders, by_field.values()), default=math.inf)


def _compare_orders(sizes: Mapping[int, float]) -> float:
    """Return the thinnest layer, by the size of the coefficients of every order."""
    orders = [order for order, size in sizes.items() if size > 0]
    highest = max(orders, default=0)
    widths = []
    for order in orders:
        if order < highest:
            widths.append((sizes[highest] / sizes[order]) ** (1 / (highest - order)))
    return min(widths, default=math.inf)


def find_contradiction(
    problem: Problem, network: nn.Module, sizes: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the names of conditions that cannot hold together near a solution, if any.

    Args:
        problem, network: the conditions and the solution.
        sizes: of the terms of every condition, by name.
    """
    if not _can_be_searched(problem, network):
        return ()
    space = find_error_space(problem, copy.deepcopy(network).double().cpu())
    if space is None:
        return ()
    search = ContradictionSearch(space)
    missed = []
    for remaining in search.remaining:
        size = max(sizes.get(remaining.name, 0.0), torch.finfo(torch.float64).tiny)
        if remaining.size >= THRESHOLDS.smallest_share * size:
            missed.append(remaining)
    if not all(remaining.is_smooth(problem.domain) for remaining in missed):
        return ()
    if not search.is_stable() or not search.resolves_layers():
        return ()
    return tuple(remaining.name for remaining in missed)


def _can_be_searched(problem: Problem, network: nn.Module) -> bool:
    """Return True if polynomials can follow smooth changes of the solution.

    Around a hole a few of them are not enough.
    """
    if not is_suitable(problem, problem.unknowns) or isinstance(network, Slabs):
        return False
    count = THRESHOLDS.convexity_pairs
    x = problem.domain.sample(2 * count, "uniform", seed=SEEDS.inspection).x
    middles = (x[:count] + x[count:]) / 2
    return bool(problem.domain.contains(middles).all())


def _fit(rows: Tensor, values: Tensor) -> Tensor:
    """Return the coefficients of least squares."""
    tolerance = THRESHOLDS.smallest_singular_value
    return torch.linalg.lstsq(rows, values, rcond=tolerance, driver="gelsd").solution


class _EdgeSobol(Sampler):
    """Sobol points on the faces of the unit cube: the edges of a patch."""

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        points, weights = Sobol().unit(n, dim, generator)
        if dim:
            numbers = torch.arange(len(points))
            points[numbers, numbers % dim] = (numbers // dim % 2).to(points)
        return points, weights


def find_differing_values(problem: Problem) -> str:
    """Return which conditions give a field two values at a point, in words; empty if none do."""
    conditions = [c for c in problem.conditions if isinstance(c, (Dirichlet, Initial))]
    for first, second in permutations(conditions, 2):
        if first.fields_among(problem.fields) == second.fields_among(problem.fields):
            words = _compare_values(problem, first, second)
            if words:
                return words
    return ""


def _compare_values(problem: Problem, first: Condition, second: Condition) -> str:
    """Return where two conditions differ on the edges of the first one's region, in words."""
    regions = []
    for condition in (first, second):
        region = condition.region(problem.domain)
        if not isinstance(region, Region) or region.point_count is not None:
            return ""
        regions.append(region)
    count = THRESHOLDS.shared_points
    edges = regions[0].sample(count, _EdgeSobol(), seed=SEEDS.inspection).x
    x = edges[regions[1].contains(edges)]
    if not len(x):
        return ""
    first_values = _read_values(problem, first, x)
    second_values = _read_values(problem, second, x)
    differences = (first_values - second_values).abs()
    values = [first_values, second_values]
    for condition, region in zip((first, second), regions, strict=True):
        inside = region.sample(count, "sobol", seed=SEEDS.inspection).x
        values.append(_read_values(problem, condition, inside))
    scale = torch.cat(values).abs().max()
    if differences.max() <= THRESHOLDS.smallest_difference * scale:
        return ""
    worst = int(differences.argmax())
    pairs = zip(problem.domain.names, x[worst].tolist(), strict=True)
    place = ", ".join(f"{name} = {value:.3g}" for name, value in pairs)
    return (
        f"at {place} {first.name!r} asks for {float(first_values[worst]):.3g} and "
        f"{second.name!r} for {float(second_values[worst]):.3g}"
    )


def _read_values(problem: Problem, condition: Condition, x: Tensor) -> Tensor:
    """Return the values that a condition prescribes at points (N, d): (N,)."""
    sites = (Points(x, torch.full_like(x[:, 0], 1 / len(x)), None),)
    local = LocalResidual(problem, condition, sites)
    zeros = torch.zeros_like(x[:, 0])
    return 0.0 - local(dict.fromkeys(local.keys, zeros))[:, 0]
