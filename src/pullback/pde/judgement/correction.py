"""The error of a solution by a second discretization, which shares nothing with the network.

Residuals can be small everywhere while the solution is wrong, because the equation amplifies a tiny
violation. The tangents of a network need not see that: the error may be no combination of them.
Here the error e of a solution u is a polynomial, and solves F(u + e) = 0 with all conditions of the
problem in least squares (defect correction; Stetter, Numerische Mathematik 29, 1978). If time is a
coordinate it is cut into windows that are solved one after the other, so that errors grow as the
equation lets them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...maps import Scheme
from ...maps.jets import Index
from ..discretization.residual import Key, LocalResidual, compute_derivatives
from ..discretization.seeds import SEEDS
from ..discretization.sites import Sites, draw_sites
from ..discretization.trial import Trial
from ..discretization.weights import measure_wave
from ..domains import SpaceTime
from ..domains.sampling import Points
from ..networks.modules import Hard, PeriodicEmbedding, Slabs
from ..networks.windows import can_be_cut_in_time, restrict_to_window
from ..problem.conditions import Condition, FieldAtTime, Periodic
from ..problem.problem import Problem
from .chebyshev import ChebyshevBasis, ClusteredSobol
from .error_profile import ErrorProfile, WindowError


@dataclass(frozen=True)
class CorrectionLevel:
    """One size of the second discretization.

    Attributes:
        coefficients: of all fields in a window, at most.
        windows: into which time is cut.
    """

    coefficients: int
    windows: int


@dataclass(frozen=True)
class CorrectionLimits:
    """How large the second discretization is, and when it is believed.

    Attributes:
        levels: that are tried one after the other; the last one takes a few seconds on a core.
        most_dimensions: beyond which too few polynomials fit along an axis.
        time_degree: polynomials in time in every window.
        largest_degrees: polynomials along an axis of space at most, where the highest derivative
            is the first, second, third or fourth; errors are right to five digits there. With 160
            polynomials and a fourth derivative round-off hides them.
        oversampling: points for every coefficient.
        boundary_points: for every point of an equation, on conditions elsewhere.
        newton_steps: for equations that are not linear.
        halvings: of a step of Newton's method.
        newton_tolerance: of a step relative to the error: one digit of an error is enough.
        floor_share: of the residuals, that a step promises to leave, and lowers none: from this on
            they are at their floor, which round-off sets for tiny errors. Of noise at twice as many
            points as coefficients 0.7 is left. One that promises more has no solution near it.
        resolved_share: of the residuals that the polynomials may leave; they see the rest.
        smallest_singular_value: relative, below which combinations of polynomials are left out.
        loose_share: of a field, that such a combination may have: no condition determines it.
        error_points: of a window, at which errors are measured.
        reach_growth: of the reach from one level to the next, from which on it has no limit. It is
            at most 6 for 43 well-posed problems, and 36 or more where conditions are missing and
            for Cauchy problems of Laplace's equation.
        large_reach: below which growth does no harm; well-posed problems are below 500, but for
            those near a resonance, whose reach is large and does not grow.
        unsettled_growth, unsettled_reach: of the reach, from which on it bounds nothing that the
            polynomials leave: finer ones would amplify it more. Logistic growth by 1e4 and more on
            a box has 3.8 or more; ten problems with layers, waves and corners have 1.3 at most.
    """

    levels: tuple[CorrectionLevel, ...] = (
        CorrectionLevel(100, 4),
        CorrectionLevel(250, 8),
        CorrectionLevel(600, 8),
    )
    most_dimensions: int = 3
    time_degree: int = 6
    largest_degrees: tuple[int, ...] = (160, 160, 160, 80)
    oversampling: float = 2.0
    boundary_points: float = 0.5
    newton_steps: int = 8
    halvings: int = 6
    newton_tolerance: float = 0.05
    floor_share: float = 0.5
    resolved_share: float = 0.3
    smallest_singular_value: float = 1e-12
    loose_share: float = 1e-4
    error_points: int = 400
    reach_growth: float = 15.0
    large_reach: float = 1e3
    unsettled_growth: float = 3.0
    unsettled_reach: float = 10.0


LIMITS = CorrectionLimits()
#: points at which the values of a condition are looked at
_INSPECTED_POINTS = 64


class CorrectionFailed(Exception):
    """No solution was found near the network's."""


def correct_solution(
    problem: Problem, network: nn.Module, unknowns: Mapping[str, float]
) -> ErrorProfile | None:
    """Return the error of a solution by polynomials.

    The smallest discretization that explains the residuals is taken, else the best one. The next
    one tells whether the conditions determine the solution.

    Returns:
        None where polynomials cannot be used: for energies, data, priors and unknown coefficients,
        beyond three dimensions, and where hard conditions hide.

    Raises:
        CorrectionFailed: there is no solution near the network's, as far as Newton's method tells.
    """
    if not is_suitable(problem, unknowns):
        return None
    space = find_error_space(problem, copy.deepcopy(network).double().cpu())
    if space is None:
        return None
    best: ErrorProfile | None = None
    best_number = 0
    for number, level in enumerate(LIMITS.levels):
        try:
            profile = _march(space, level)
        except (CorrectionFailed, torch.linalg.LinAlgError):
            continue
        if best is None or profile.unresolved < best.unresolved:
            best = profile
            best_number = number
        if is_resolved(best):
            break
    if best is None:
        raise CorrectionFailed
    reach = _measure_reaches(space, best_number)
    is_bounded = is_resolved(best) or reach.is_settled
    return replace(best, is_determined=reach.is_limited, is_bounded=is_bounded)


@dataclass(frozen=True)
class Reaches:
    """The largest error for residuals of norm 1 over the polynomials of two levels.

    In a well-posed problem ‖e‖ ≤ C‖A e‖. The largest ratio over polynomials, their reach, is C for
    all but the coarsest. Where a condition is missing, other solutions differ by an e with A e = 0.
    Finer polynomials come closer and closer to it, and their reach grows from level to level.
    """

    coarse: float
    fine: float

    @property
    def is_limited(self) -> bool:
        """Return True if no error is much larger than the residuals that it causes."""
        if math.isinf(self.coarse) or math.isinf(self.fine):
            return False
        return self.fine <= max(LIMITS.large_reach, LIMITS.reach_growth * self.coarse)

    @property
    def is_settled(self) -> bool:
        """Return True if finer polynomials would hardly reach further."""
        return self.fine <= max(LIMITS.unsettled_reach, LIMITS.unsettled_growth * self.coarse)


def _measure_reaches(space: ErrorSpace, number: int) -> Reaches:
    """Return the reach of two levels.

    Args:
        space: where the error lives.
        number: which of `LIMITS.levels` explains the residuals. It is compared with the next one.
    """
    coarse = min(number, len(LIMITS.levels) - 2)
    try:
        return Reaches(
            _measure_reach(space, LIMITS.levels[coarse]),
            _measure_reach(space, LIMITS.levels[coarse + 1]),
        )
    except torch.linalg.LinAlgError:
        raise CorrectionFailed from None


def _measure_reach(space: ErrorSpace, level: CorrectionLevel) -> float:
    """Return the reach of a level's polynomials in the first window."""
    first = _place_windows(space, level)[0]
    return _open_window(space, level, first, None).measure_reach()


def is_resolved(profile: ErrorProfile) -> bool:
    """Return True if the second discretization explains most of the residuals."""
    return profile.unresolved <= LIMITS.resolved_share


def is_suitable(problem: Problem, unknowns: Mapping[str, float]) -> bool:
    """Return True if polynomials can be the error of a problem."""
    if unknowns or problem.domain.dim > LIMITS.most_dimensions:
        return False
    return not any(c.is_energy or c.is_measured or c.is_prior for c in problem.conditions)


@dataclass(frozen=True)
class ErrorSpace:
    """Where the error lives.

    Attributes:
        problem: with the conditions that the network has built in as far as they must be added.
        network: the solution, in float64.
        distance: a factor of the error that vanishes where the network is exact, None without.
        largest_degree: of polynomials along an axis of space.
    """

    problem: Problem
    network: nn.Module
    distance: nn.Module | None
    largest_degree: int


class _Distance(nn.Module):
    """The factor of a network with hard conditions, as a function of points."""

    def __init__(self, hard: Hard, fields: int) -> None:
        super().__init__()
        self._hard = hard
        self._fields = fields

    def forward(self, x: Any) -> Any:
        factor = self._hard.distance_at(x)
        if factor.shape[-1] == self._fields:
            return factor
        return torch.cat([factor] * self._fields, -1)


def find_error_space(problem: Problem, network: nn.Module) -> ErrorSpace | None:
    """Return where the error of a solution lives; None if the network hides conditions."""
    hard_modules = [module for module in network.modules() if isinstance(module, Hard)]
    if len(hard_modules) > 1:
        return None
    distance = None
    if hard_modules:
        distance = _Distance(hard_modules[0], len(problem.fields))
    stated = {condition.periodic_axis for condition in problem.conditions}
    conditions = list(problem.conditions)
    for module in network.modules():
        if isinstance(module, PeriodicEmbedding) and hard_modules:
            axis = problem.domain.names[module.axis]
            if axis not in stated:
                conditions.append(Periodic(axis, order=2))
    restricted = problem.restrict(problem.domain, conditions)
    orders = LIMITS.largest_degrees
    largest_degree = orders[min(_find_highest_order(restricted), len(orders)) - 1]
    return ErrorSpace(restricted, network, distance, largest_degree)


def _find_highest_order(problem: Problem) -> int:
    """Return the order of the highest derivative in the conditions, at least 1."""
    highest = 1
    for condition in problem.conditions:
        count = condition.region(problem.domain).point_count or 1
        sites = draw_sites(problem, condition, count, "sobol", SEEDS.inspection)
        highest = max(highest, LocalResidual(problem, condition, sites).order)
    return highest


def _march(space: ErrorSpace, level: CorrectionLevel) -> ErrorProfile:
    """Return the error window by window."""
    problem = space.problem
    windows: list[WindowError] = []
    unresolved = 0.0
    unexplained = 0.0
    initial_values: FieldAtTime | None = None
    for piece in _place_windows(space, level):
        window = _open_window(space, level, piece, initial_values)
        window.solve()
        unresolved = max(unresolved, window.unresolved)
        if unresolved > LIMITS.resolved_share:
            unexplained = window.bound_unexplained(unexplained)
        windows.append(window.measure(piece.start, piece.end, unexplained))
        initial_values = window.read_values
    return ErrorProfile(tuple(windows), problem.fields, find_nonzero_fields(problem), unresolved)


def _open_window(
    space: ErrorSpace,
    level: CorrectionLevel,
    piece: NetworkWindow,
    initial_values: FieldAtTime | None,
) -> Window:
    """Return the equations for the error on a window, which begins with values of the last one."""
    is_cut = _is_cut_in_time(space)
    restricted = space.problem
    if is_cut:
        restricted = restrict_to_window(restricted, piece.start, piece.end, initial_values)
    degrees = choose_degrees(restricted, level, space.largest_degree, is_window=is_cut)
    return Window(restricted, piece.network, space.distance, degrees)


def _is_cut_in_time(space: ErrorSpace) -> bool:
    """Return True if the error is found on one window of time after the other.

    A hard initial condition holds at the first window's beginning alone.
    """
    return space.distance is None and can_be_cut_in_time(space.problem)


@dataclass(frozen=True)
class NetworkWindow:
    """A window of time, and the network of the slab that it belongs to."""

    start: float
    end: float
    network: nn.Module


def _place_windows(space: ErrorSpace, level: CorrectionLevel) -> list[NetworkWindow]:
    """Return the windows of time; one from 0 to 1 where time is not cut."""
    domain = space.problem.domain
    network = space.network
    if not isinstance(domain, SpaceTime):
        return [NetworkWindow(0.0, 1.0, network)]
    if not _is_cut_in_time(space):
        return [NetworkWindow(*domain.time, network)]
    slab_edges: list[float] = list(domain.time)
    networks: list[nn.Module] = [network]
    if isinstance(network, Slabs):
        slab_edges = network.edges.tolist()
        networks = list(network.networks)
    count = -(-level.windows // len(networks))  # of every slab, rounded up
    pieces = []
    for slab, (start, end) in zip(networks, pairwise(slab_edges), strict=True):
        edges = torch.linspace(start, end, count + 1, dtype=torch.float64).tolist()
        pieces += [NetworkWindow(a, b, slab) for a, b in pairwise(edges)]
    return pieces


def choose_degrees(
    problem: Problem, level: CorrectionLevel, largest_degree: int, *, is_window: bool
) -> list[int]:
    """Return how many polynomials a level has along each axis."""
    dim = problem.domain.dim
    coefficients = level.coefficients / len(problem.fields)
    if not is_window:
        degree = min(int(coefficients ** (1 / dim)), largest_degree)
        return [max(degree, 2)] * dim
    degree = int((coefficients / LIMITS.time_degree) ** (1 / (dim - 1)))
    degree = max(min(degree, largest_degree), 2)
    return [*[degree] * (dim - 1), LIMITS.time_degree]


@dataclass(frozen=True)
class LinearSystem:
    """The residuals, (n,), and their slopes by the coefficients of e, the rows, (n, mK)."""

    rows: Tensor
    residuals: Tensor

    @property
    def norm(self) -> float:
        """The Euclidean norm of the residuals."""
        return float(self.residuals.norm())

    def solve(self) -> Tensor:
        """Return the shortest change of the coefficients that makes the residuals smallest.

        Raise CorrectionFailed if there is none, because the network overflows.
        """
        if not bool(self.rows.isfinite().all() and self.residuals.isfinite().all()):
            raise CorrectionFailed
        tolerance = LIMITS.smallest_singular_value
        right_side = -self.residuals[:, None]
        result = torch.linalg.lstsq(self.rows, right_side, rcond=tolerance, driver="gelsd")
        return result.solution[:, 0]

    def is_at_floor(self, step: Tensor) -> bool:
        """Return True if the linearized residuals are hardly smaller after a step."""
        promised = float((self.residuals + self.rows @ step.flatten()).norm())
        return promised >= LIMITS.floor_share * self.norm


@dataclass(frozen=True)
class ConditionRows:
    """A condition at its points, with the derivatives of the network and of the polynomials.

    Attributes:
        condition: what must hold.
        local: its residual as a function of derivatives.
        derivatives: those of the network, by key.
        polynomials: those of every polynomial of the key's field, (N, K) by key.
        points: where it holds; one side of two.
        scale: factor of the residuals in the least squares.
    """

    condition: Condition
    local: LocalResidual
    derivatives: Mapping[Key, Tensor]
    polynomials: Mapping[Key, Tensor]
    points: Points
    scale: float

    def linearize(self, coefficients: Tensor, fields: Sequence[str]) -> LinearSystem:
        """Return the scaled residuals of u + e and their slopes.

        Args:
            coefficients: of e, (m, K).
            fields: names.
        """
        corrected = {}
        for key, derivative in self.derivatives.items():
            coefficient = coefficients[fields.index(key[1])]
            corrected[key] = derivative + self.polynomials[key] @ coefficient
        values, slopes = self.local.linearize(corrected)
        count = values.shape[1]
        blocks = []
        for name in fields:
            block = torch.zeros(len(values), count, coefficients.shape[1], dtype=torch.float64)
            for key, slope in slopes.items():
                if key[1] == name:
                    block += slope[:, :, None] * self.polynomials[key][:, None, :]
            blocks.append(block)
        rows = torch.cat(blocks, 2)
        if self.condition.target is not None:
            rows = torch.einsum("n,nrk->rk", self.points.weights, rows)
            values = self.points.weights @ values - self.condition.target
            return LinearSystem(self.scale * rows, self.scale * values)
        return LinearSystem(self.scale * rows.flatten(0, 1), self.scale * values.flatten())


class ErrorPolynomials:
    """Polynomials, times the distance of hard conditions, with their derivatives."""

    def __init__(self, basis: ChebyshevBasis, distance: nn.Module | None) -> None:
        self.basis = basis
        self._distance = distance

    def derivative(
        self, x: Tensor, index: Index | None, field: int, laplacian_axes: Index = ()
    ) -> Tensor:
        """Return a derivative of every polynomial of a field at points: (N, K).

        Args:
            x: points (N, d).
            index: of the derivative; None stands for the Laplacian.
            field: the number of the field.
            laplacian_axes: over which its second derivatives are added up.
        """
        if index is None:
            seconds = [self.derivative(x, (axis, axis), field) for axis in laplacian_axes]
            return torch.stack(seconds).sum(0)
        if self._distance is None:
            return self.basis.derivative(x, index)
        total = torch.zeros(len(x), self.basis.size, dtype=torch.float64)
        scheme = Scheme.of([index])
        channels = compute_derivatives(self._distance, x[None], scheme)
        for chosen in range(2 ** len(index)):  # Leibniz: each derivative goes to either factor
            first = tuple(a for i, a in enumerate(index) if chosen >> i & 1)
            second = tuple(a for i, a in enumerate(index) if not chosen >> i & 1)
            factor = channels[scheme.position[first], 0, :, field : field + 1]
            total += factor * self.basis.derivative(x, second)
        return total


class Window:
    """F(u + e) = 0 in least squares on a window of time, or on the whole domain.

    Attributes:
        rows: the conditions at their points.
        unresolved: share of the residuals that e leaves.
    """

    def __init__(
        self,
        problem: Problem,
        network: nn.Module,
        distance: nn.Module | None,
        degrees: Sequence[int],
        oversampling: float = LIMITS.oversampling,
    ) -> None:
        self._problem = problem
        self._oversampling = oversampling
        self._network = network
        domain = problem.domain
        basis = ChebyshevBasis(domain.low, domain.high, degrees)
        self._polynomials = ErrorPolynomials(basis, distance)
        self._coefficients = torch.zeros(len(problem.fields), basis.size, dtype=torch.float64)
        self.rows = [self._prepare(condition) for condition in problem.conditions]
        self.unresolved = math.inf

    def read_values(self, points: Tensor, order: int) -> Tensor:
        """Return u + e (order 0) or its time derivative (order 1) at points (N, d): (N, m)."""
        index = (self._problem.domain.dim - 1,) * order
        scheme = Scheme.of([index])
        x = points.double().cpu()
        channels = compute_derivatives(self._network, x[None], scheme)
        return channels[scheme.position[index], 0] + self._evaluate_error(x, index)

    def _evaluate_error(self, x: Tensor, index: Index) -> Tensor:
        """Return a derivative of e at points (N, d): (N, m)."""
        columns = []
        for field, coefficients in enumerate(self._coefficients):
            columns.append(self._polynomials.derivative(x, index, field) @ coefficients)
        return torch.stack(columns, 1)

    def _prepare(self, condition: Condition) -> ConditionRows:
        """Return a condition at points, with all derivatives that it needs there."""
        sites = self._draw_sites(condition)
        local = LocalResidual(self._problem, condition, sites)
        parameter = next(self._network.parameters())
        trial = Trial(self._network, {}, parameter)
        derivatives = {key: d.detach() for key, d in local.differentiate(trial).items()}
        axes = self._problem.coordinates.space
        polynomials = {}
        for site, field, index in local.keys:
            number = self._problem.fields.index(field)
            x = sites[site].x
            rows = self._polynomials.derivative(x, index, number, axes)
            polynomials[site, field, index] = rows
        wave = measure_wave(self._problem, condition, sites)
        scale = 1.0
        if math.isfinite(wave):
            scale = wave**-0.5
        if condition.target is None:
            scale /= math.sqrt(len(sites[0]))
        return ConditionRows(condition, local, derivatives, polynomials, sites[0], scale)

    def _draw_sites(self, condition: Condition) -> Sites:
        """Return points of a condition: some for each coefficient, less away from equations."""
        count = self._oversampling * self._coefficients.numel()
        if not condition.is_equation or condition.on is not None:
            count *= LIMITS.boundary_points
        count = condition.region(self._problem.domain).point_count or int(count) + 1
        return draw_sites(self._problem, condition, count, ClusteredSobol(), SEEDS.inspection)

    def solve(self) -> None:
        """Find e by Newton's method; raise CorrectionFailed if it does not converge."""
        system = self._linearize(self._coefficients)
        first_norm = system.norm
        self.unresolved = 0.0
        if first_norm == 0.0:
            return
        is_affine = all(rows.local.is_affine(rows.derivatives) for rows in self.rows)
        for _ in range(LIMITS.newton_steps):
            step = system.solve().view_as(self._coefficients)
            if not is_affine:
                step = self._shorten(step, system)
            self._coefficients = self._coefficients + step
            system = self._linearize(self._coefficients)
            if not math.isfinite(system.norm):
                raise CorrectionFailed
            self.unresolved = system.norm / first_norm
            is_small = step.norm() <= LIMITS.newton_tolerance * self._coefficients.norm()
            if is_affine or bool(is_small):
                return
        raise CorrectionFailed

    def _shorten(self, step: Tensor, system: LinearSystem) -> Tensor:
        """Return the step, halved until the residuals are not larger than before.

        It is zero where the residuals are at their floor.
        """
        shortened = step
        for _ in range(LIMITS.halvings):
            if self._linearize(self._coefficients + shortened).norm <= system.norm:
                return shortened
            shortened = shortened / 2
        if system.is_at_floor(step):
            return torch.zeros_like(step)
        raise CorrectionFailed

    def _linearize(self, coefficients: Tensor) -> LinearSystem:
        """Return the residuals of u + e and their slopes by the coefficients of e."""
        parts = self._linearize_each(coefficients)
        return LinearSystem(
            torch.cat([part.rows for part in parts]), torch.cat([part.residuals for part in parts])
        )

    def _linearize_each(self, coefficients: Tensor) -> list[LinearSystem]:
        fields = self._problem.fields
        return [rows.linearize(coefficients, fields) for rows in self.rows]

    def linearize_conditions(self) -> list[LinearSystem]:
        """Return the residuals of u + e and their slopes, condition by condition."""
        return self._linearize_each(self._coefficients)

    def bound_unexplained(self, initial_error: float) -> float:
        """Return the root mean square of what residuals that e leaves may add to the error.

        It is the reach of the polynomials times the norm of these residuals.

        Args:
            initial_error: that of the window before, which the initial values have.
        """
        violation = self._linearize(self._coefficients).norm
        for rows in self.rows:
            if rows.condition.is_initial:
                violation += rows.scale * initial_error
        return self.measure_reach() * violation

    def measure_reach(self) -> float:
        """Return max ‖e‖/‖A e‖ over all polynomials e: the equation's stability as they see it.

        It is infinite if some of them move the fields and change no residual.
        """
        rows = self._linearize(self._coefficients).rows
        _, singular_values, directions = torch.linalg.svd(rows, full_matrices=False)
        is_seen = singular_values > LIMITS.smallest_singular_value * singular_values[0]
        fields = self._evaluate_fields()
        unseen = fields @ directions[~is_seen].T
        if unseen.numel() and float(unseen.norm(dim=0).max()) > LIMITS.loose_share:
            return math.inf
        reach = fields @ directions[is_seen].T / singular_values[is_seen]
        return float(torch.linalg.matrix_norm(reach, 2))

    def _evaluate_fields(self) -> Tensor:
        """Return all polynomials at points, (Nm, mK), over √N: ‖·‖² is then a mean over points."""
        x = self._draw_error_points()
        blocks = []
        for field, name in enumerate(self._problem.fields):
            values = self._polynomials.derivative(x, (), field)
            if name in self._problem.free:
                values = values - values.mean(0)
            blocks.append(values / math.sqrt(len(x)))
        return torch.block_diag(*blocks)

    def _draw_error_points(self) -> Tensor:
        return self._problem.domain.sample(LIMITS.error_points, "sobol", seed=SEEDS.inspection).x

    def measure(self, start: float, end: float, unexplained: float = 0.0) -> WindowError:
        """Return mean squares of the error and of the corrected solution over the window."""
        x = self._draw_error_points()
        error = self._evaluate_error(x, ())
        with torch.no_grad():
            corrected = self._network(x) + error
        is_free = torch.tensor([name in self._problem.free for name in self._problem.fields])
        error = error - torch.where(is_free, error.mean(0), 0.0)
        corrected = corrected - torch.where(is_free, corrected.mean(0), 0.0)
        return WindowError(
            start, end, error.square().mean(0), corrected.square().mean(0), unexplained
        )


def find_nonzero_fields(problem: Problem) -> frozenset[str]:
    """Return the fields to which a condition gives values that are not all zero."""
    names = set()
    for condition in problem.conditions:
        field = getattr(condition, "field", None)
        if field is None and len(problem.fields) == 1:
            field = problem.fields[0]
        if field is None or condition.is_equation or not condition.prescribes_values:
            continue
        count = condition.region(problem.domain).point_count or _INSPECTED_POINTS
        sites = draw_sites(problem, condition, count, "sobol", SEEDS.inspection)
        local = LocalResidual(problem, condition, sites)
        zeros = torch.zeros_like(sites[0].x[:, 0])
        if bool(local(dict.fromkeys(local.keys, zeros)).any()):
            names.add(field)
    return frozenset(names)
