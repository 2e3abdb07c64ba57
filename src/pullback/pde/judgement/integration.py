"""An ordinary initial value problem, integrated in time by another method than the network's.

Residuals can be small everywhere while the solution is wrong, because an unstable equation
amplifies a tiny violation. For ordinary differential equations with initial values the answer can
be compared with a second discretization, which shares no points, no network and no tangents with
the first. Coordinates along which nothing is differentiated are parameters: there the problem is
integrated for some of their values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...maps.jets import Index
from ..discretization.seeds import SEEDS
from ..discretization.sites import draw_sites
from ..domains import Box, Region, SpaceTime
from ..domains.sampling import Points
from ..problem.conditions import Condition
from ..problem.fields import Field, View, call_by_name
from ..problem.problem import Problem
from .error_profile import ErrorProfile, WindowError


@dataclass(frozen=True)
class IntegrationLimits:
    """How accurately, and how long, an initial value problem is integrated.

    Attributes:
        relative_tolerance: of a step; two digits above round-off, and far below errors of networks.
        newton_steps: for the highest derivatives; equations are nearly always linear in these.
        newton_tolerance: of a root, relative to its size, at which Newton's method has converged.
        evaluations: after which the integration is given up; about ten seconds.
        standing_evaluations: after which it is given up if time no longer advances: solutions that
            blow up end so, after a few thousand.
        windows: of time, in which two solutions are compared.
        compared_times: in every window.
        smallest_field: share of the whole solution below which a field is not judged by itself.
        base_points: values of the parameters for which a problem is integrated; they share the
            evaluations.
        absolute_share: absolute tolerance of a step, in units of the relative one times the size of
            a field: errors are relative until a field falls to a thousandth of its size.
        scale_times: at which the guess shows the size of a field.
        probe_value, probe_derivative: made-up values of fields and of their highest derivatives, by
            which equations are counted; neither is 0 or 1, where terms vanish, and they differ.
    """

    relative_tolerance: float = 1e-10
    newton_steps: int = 12
    newton_tolerance: float = 1e-9
    evaluations: int = 30_000
    standing_evaluations: int = 1_000
    windows: int = 50
    compared_times: int = 20
    smallest_field: float = 1e-10
    base_points: int = 12
    absolute_share: float = 1e-3
    scale_times: int = 50
    probe_value: float = 0.7
    probe_derivative: float = 0.3


LIMITS = IntegrationLimits()
#: points of a condition, which show whether it holds at the start alone
_START_POINTS = 4

#: u(t) of all fields at times (N,): (N, fields)
Trajectory = Callable[[Tensor], Tensor]
#: u(x) of all fields at points (N, d): (N, fields)
FieldFunction = Callable[[Tensor], Tensor]


class IntegrationFailed(Exception):
    """An initial value problem cannot be integrated to its end."""


class _TooLong(Exception):
    """The integration takes more evaluations than allowed."""


class _NotOrdinary(Exception):
    """An equation has derivatives along other axes than that of time."""


@dataclass(frozen=True)
class LeadingTerms:
    """The highest derivatives of an equation at a state, and the equation's slopes by these.

    Attributes:
        highest: u⁽ᵏ⁾ of each field, (m,).
        slopes: ∂F/∂u⁽ᵏ⁾, (m, m).
    """

    highest: Tensor
    slopes: Tensor


class InitialValueProblem:
    """F(t, u, u', …, u⁽ᵏ⁾) = 0 with as many initial conditions as u, u', …, u⁽ᵏ⁻¹⁾ has entries.

    Args:
        problem, unknowns: with values of its unknown coefficients.
        equations, initial_conditions: of the problem.
        axis: of the domain, along which time runs.
        base_point: a point (d,) of the domain; its coordinates along other axes are parameters.
    """

    def __init__(
        self,
        problem: Problem,
        unknowns: Mapping[str, float],
        equations: list[Condition],
        initial_conditions: list[Condition],
        axis: int,
        base_point: Tensor,
    ) -> None:
        self._problem = problem
        self._unknowns = {n: torch.tensor(v, dtype=torch.float64) for n, v in unknowns.items()}
        self._equations = equations
        self._initial_conditions = initial_conditions
        self._axis = axis
        self._base_point = base_point
        self._start = float(problem.domain.low[axis])
        self._end = float(problem.domain.high[axis])
        self._orders = self._find_orders()
        self._highest = torch.zeros(len(problem.fields), dtype=torch.float64)

    @classmethod
    def from_problem(
        cls, problem: Problem, unknowns: Mapping[str, float]
    ) -> InitialValueProblem | None:
        """Return the initial value problem that these conditions state, if they state one.

        Returns:
            None for everything else: more coordinates than time, conditions elsewhere than at the
            start, an algebraic equation, or another number of equations than fields.
        """
        if problem.domain.dim != 1:
            return None
        candidate = cls.at_point(problem, unknowns, 0, problem.domain.low)
        if candidate is None or candidate.has_algebraic_fields:
            return None
        return candidate

    @classmethod
    def at_point(
        cls, problem: Problem, unknowns: Mapping[str, float], axis: int, base_point: Tensor
    ) -> InitialValueProblem | None:
        """Return the initial value problem along an axis through a point (d,), None if it is none.

        Fields may be algebraic: a field without derivatives has an equation but no initial value.
        """
        equations: list[Condition] = []
        initial_conditions: list[Condition] = []
        for condition in problem.conditions:
            if condition.is_equation and condition.on is None:
                equations.append(condition)
            elif _holds_at_start(problem, condition, axis):
                initial_conditions.append(condition)
            else:
                return None
        if not equations or not initial_conditions:
            return None
        try:
            candidate = cls(problem, unknowns, equations, initial_conditions, axis, base_point)
        except _NotOrdinary:
            return None
        if not candidate._is_square():
            return None
        return candidate

    @property
    def has_algebraic_fields(self) -> bool:
        """Return True if a field has no derivatives."""
        return min(self._orders) == 0

    @property
    def orders(self) -> list[int]:
        """The highest derivative of each field in the equations."""
        return list(self._orders)

    def find_initial_state(self) -> Tensor:
        """Return (u₁, u₁', …, u₂, …) at the start; raise IntegrationFailed if it is not found."""
        state = self._solve_initial_conditions(lambda times: times.new_zeros(1, len(self._orders)))
        if state is None:
            raise IntegrationFailed
        return state

    def linearize(self, t: float, state: Tensor) -> LeadingTerms:
        """Return the highest derivatives at a state; raise IntegrationFailed if there are none."""
        try:
            self._differentiate_state(t, state)
        except (ArithmeticError, torch.linalg.LinAlgError):
            raise IntegrationFailed from None
        highest = self._highest
        slopes = _differentiate(lambda h: self._equation_residuals(t, state, h), highest)
        return LeadingTerms(highest, slopes)

    def integrate(
        self, guess: Trajectory, most_evaluations: int | None = None
    ) -> Trajectory | None:
        """Return the solution, or None if the integration fails.

        Args:
            guess: near which the initial values are looked for, such as the network's own.
            most_evaluations: after which it is given up, `LIMITS.evaluations` by default.
        """
        from scipy.integrate import solve_ivp  # slow to import

        initial_state = self._solve_initial_conditions(guess)
        if initial_state is None:
            return None
        evaluations = 0
        latest_time = self._start
        evaluations_then = 0
        if most_evaluations is None:
            most_evaluations = LIMITS.evaluations

        def slope(t: float, state: np.ndarray) -> np.ndarray:
            nonlocal evaluations, latest_time, evaluations_then
            evaluations += 1
            if t > latest_time:
                latest_time = t
                evaluations_then = evaluations
            is_standing = evaluations - evaluations_then > LIMITS.standing_evaluations
            if is_standing or evaluations > most_evaluations:
                raise _TooLong
            return self._differentiate_state(t, torch.from_numpy(state)).numpy()

        scales = self._find_scales(initial_state, guess)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = solve_ivp(
                    slope,
                    (self._start, self._end),
                    initial_state.numpy(),
                    method="LSODA",
                    rtol=LIMITS.relative_tolerance,
                    atol=LIMITS.relative_tolerance * LIMITS.absolute_share * scales,
                    dense_output=True,
                )
        except (_TooLong, ArithmeticError, ValueError, torch.linalg.LinAlgError):
            return None
        if not outcome.success or not np.isfinite(outcome.y).all():
            return None

        def trajectory(times: Tensor) -> Tensor:
            times = times.detach().cpu().double()
            return self._read_fields(times, torch.from_numpy(outcome.sol(times.numpy()).T))

        return trajectory

    def _read_fields(self, times: Tensor, states: Tensor) -> Tensor:
        """Return the fields at times (N,) from states (N, n); equations give the algebraic ones."""
        values = torch.empty(len(times), len(self._orders), dtype=torch.float64)
        for field, column in self._value_columns().items():
            values[:, field] = states[:, column]
        if self.has_algebraic_fields:
            is_algebraic = torch.tensor(self._orders) == 0
            for row, (t, state) in enumerate(zip(times.tolist(), states, strict=True)):
                self._differentiate_state(t, state)
                values[row, is_algebraic] = self._highest[is_algebraic]
        return values

    def _find_scales(self, initial_state: Tensor, guess: Trajectory) -> np.ndarray:
        """Return the size of each entry of the state, to which absolute tolerances are relative.

        A field and its derivatives count as the field does where it is known to be nonzero, so that
        a small one is integrated as accurately as a large one.
        """
        times = torch.linspace(self._start, self._end, LIMITS.scale_times, dtype=torch.float64)
        by_field = guess(times).detach().abs().amax(0).cpu().double()
        by_state = torch.zeros_like(by_field)
        for field, part in enumerate(initial_state.split(self._orders)):
            if len(part):
                by_state[field] = part.abs().max()
        sizes = torch.maximum(by_field, by_state)
        smallest = LIMITS.smallest_field * float(sizes.max())
        sizes = sizes.clamp(min=max(smallest, torch.finfo(torch.float64).tiny))
        repeats = torch.tensor(self._orders)
        return sizes.repeat_interleave(repeats).numpy()

    # --- the equations as functions of the state -------------------------------------------------

    def _find_orders(self) -> list[int]:
        """Return the highest derivative of each field in the equations."""
        orders = dict.fromkeys(self._problem.fields, 0)

        def look_up(name: str, index: Index | None) -> Tensor:
            orders[name] = max(orders[name], self._find_order(index))
            return torch.full((1,), LIMITS.probe_value, dtype=torch.float64)

        for condition in (*self._equations, *self._initial_conditions):
            self._residual(condition, self._start, look_up)
        return [orders[name] for name in self._problem.fields]

    def _find_order(self, index: Index | None) -> int:
        """Return the order of a derivative in time; raise if it is one along another axis."""
        if index is None and self._problem.domain.dim == 1:
            return 2
        if index is None or any(axis != self._axis for axis in index):
            raise _NotOrdinary
        return len(index)

    def _is_square(self) -> bool:
        """Return True if there are as many equations as fields, and initial values as states."""
        if max(self._orders) == 0:
            return False
        state = torch.full((sum(self._orders),), LIMITS.probe_value, dtype=torch.float64)
        highest = torch.full((len(self._orders),), LIMITS.probe_derivative, dtype=torch.float64)
        equations = self._equation_residuals(self._start, state, highest)
        initial = self._initial_residuals(state)
        return len(equations) == len(highest) and len(initial) == len(state)

    def _value_columns(self) -> dict[int, int]:
        """Return where the value of each field stands in the state (u₁, u₁', …, u₂, …).

        Algebraic fields are not in the state.
        """
        columns = {}
        position = 0
        for field, order in enumerate(self._orders):
            if order:
                columns[field] = position
            position += order
        return columns

    def _residual(
        self, condition: Condition, t: float, look_up: Callable[[str, Index | None], Tensor]
    ) -> Tensor:
        """Return the residuals of a condition at one time, from derivatives that are looked up."""
        problem = self._problem
        point = self._base_point.double().clone()
        point[self._axis] = t
        point = point[None]
        normals = torch.zeros_like(point)
        normals[:, self._axis] = -1.0
        points = Points(point, torch.ones(1, dtype=torch.float64), normals)
        fields = {}
        for name in problem.fields:
            fields[name] = Field(
                lambda index, name=name: look_up(name, index), problem.coordinates, normals
            )
        sources = {}
        coordinates = dict(zip(problem.domain.names, point.unbind(-1), strict=True))
        for name, source in problem.sources.items():
            sources[name] = _evaluate_source(source, {"points": point, **coordinates})
        coordinates |= sources
        view = View([fields], points, coordinates, self._unknowns, {})
        residuals = condition.residual(view)
        columns = [residuals] if isinstance(residuals, (Tensor, Field)) else list(residuals)
        values = [c.value if isinstance(c, Field) else c for c in columns]
        return torch.cat([v.reshape(-1) for v in values])

    def _make_lookup(self, state: Tensor, highest: Tensor) -> Callable[[str, Index | None], Tensor]:
        """Return a look-up of derivatives by field and order in the state and the highest ones."""
        derivatives: dict[str, list[Tensor]] = {}
        position = 0
        for number, (name, order) in enumerate(
            zip(self._problem.fields, self._orders, strict=True)
        ):
            lower = [state[k : k + 1] for k in range(position, position + order)]
            derivatives[name] = [*lower, highest[number : number + 1]]
            position += order

        def look_up(name: str, index: Index | None) -> Tensor:
            return derivatives[name][self._find_order(index)]

        return look_up

    def _equation_residuals(self, t: float, state: Tensor, highest: Tensor) -> Tensor:
        look_up = self._make_lookup(state, highest)
        return torch.cat([self._residual(c, t, look_up) for c in self._equations])

    def _initial_residuals(self, state: Tensor) -> Tensor:
        look_up = self._make_lookup(state, torch.zeros_like(self._highest))
        conditions = self._initial_conditions
        return torch.cat([self._residual(c, self._start, look_up) for c in conditions])

    def _differentiate_state(self, t: float, state: Tensor) -> Tensor:
        """Return the state's derivative; Newton's method finds the highest derivatives."""
        self._highest = _find_root(
            lambda highest: self._equation_residuals(t, state, highest), self._highest
        )
        slopes = []
        position = 0
        for number, order in enumerate(self._orders):
            if order:
                slopes.append(state[position + 1 : position + order])
                slopes.append(self._highest[number : number + 1])
            position += order
        return torch.cat(slopes)

    def _solve_initial_conditions(self, guess: Trajectory) -> Tensor | None:
        """Return the state near a guess that meets all initial conditions, if it is found."""
        state = torch.zeros(sum(self._orders), dtype=torch.float64)
        start = torch.tensor([self._start], dtype=torch.float64)
        values = guess(start)[0].detach().cpu().double()
        for field, column in self._value_columns().items():
            state[column] = values[field]
        try:
            return _find_root(self._initial_residuals, state)
        except (ArithmeticError, torch.linalg.LinAlgError):
            return None


def compare_with_integration(
    problem: Problem, unknowns: Mapping[str, float], solution: FieldFunction
) -> ErrorProfile | None:
    """Return how far a solution is from that of an integrator.

    Returns:
        None where the problem is no ordinary initial value problem.

    Raises:
        IntegrationFailed: it cannot be integrated to the end, or takes too long.
    """
    axis = _find_time_axis(problem, unknowns)
    if axis is None:
        return None
    base_points = problem.domain.low[None]
    if problem.domain.dim > 1:
        base_points = problem.domain.sample(LIMITS.base_points, "sobol", seed=SEEDS.inspection).x
    edges = torch.linspace(
        float(problem.domain.low[axis]),
        float(problem.domain.high[axis]),
        LIMITS.windows + 1,
        dtype=torch.float64,
    )
    squared_errors = []
    squared_sizes = []
    for base_point in base_points:
        line = TimeLine(solution, axis, base_point)
        initial_value_problem = InitialValueProblem.at_point(problem, unknowns, axis, base_point)
        assert initial_value_problem is not None
        trajectory = initial_value_problem.integrate(line, LIMITS.evaluations // len(base_points))
        if trajectory is None:
            raise IntegrationFailed
        times = _list_times(edges)
        reference = trajectory(times.flatten()).unflatten(0, times.shape)
        difference = line(times.flatten()).detach().cpu().double().unflatten(0, times.shape)
        squared_errors.append((difference - reference).square().mean(1))
        squared_sizes.append(reference.square().mean(1))
    return _build_profile(problem, edges.tolist(), squared_errors, squared_sizes)


@dataclass(frozen=True)
class TimeLine:
    """A solution as a function of time along an axis through a point, (N,) ↦ (N, fields)."""

    solution: FieldFunction
    axis: int
    base_point: Tensor

    def __call__(self, times: Tensor) -> Tensor:
        points = self.base_point.expand(len(times), -1).clone()
        points[:, self.axis] = times.to(points)
        return self.solution(points)


def _find_time_axis(problem: Problem, unknowns: Mapping[str, float]) -> int | None:
    """Return the axis along which an initial value problem evolves; None if it is none."""
    domain = problem.domain
    if isinstance(domain, SpaceTime):
        domain = domain.space
    if not isinstance(domain, Box):
        return None
    for axis in range(problem.domain.dim):
        if InitialValueProblem.at_point(problem, unknowns, axis, problem.domain.low) is not None:
            return axis
    return None


def _list_times(edges: Tensor) -> Tensor:
    """Return the compared times of every window, (windows, times)."""
    shares = torch.linspace(0, 1, LIMITS.compared_times, dtype=torch.float64)
    return edges[:-1, None] + shares * (edges[1:] - edges[:-1])[:, None]


def _build_profile(
    problem: Problem,
    edges: Sequence[float],
    squared_errors: Sequence[Tensor],
    squared_sizes: Sequence[Tensor],
) -> ErrorProfile:
    """Return the errors window by window, from those at every base point,
    (windows, fields) each.
    """
    errors = torch.stack(list(squared_errors)).mean(0)
    sizes = torch.stack(list(squared_sizes)).mean(0)
    windows = []
    for (start, end), error, size in zip(pairwise(edges), errors, sizes, strict=True):
        windows.append(WindowError(start, end, error, size))
    totals = sizes.sum(0)
    is_nonzero = totals > LIMITS.smallest_field**2 * totals.sum()
    names = zip(problem.fields, is_nonzero.tolist(), strict=True)
    nonzero_fields = frozenset(name for name, nonzero in names if nonzero)
    return ErrorProfile(tuple(windows), problem.fields, nonzero_fields, is_integrated=True)


def _holds_at_start(problem: Problem, condition: Condition, axis: int) -> bool:
    """Return True if all points of the condition are where the axis begins."""
    region = condition.region(problem.domain)
    if condition.is_measured or not isinstance(region, Region):
        return False
    count = region.point_count or _START_POINTS
    (points,) = draw_sites(problem, condition, count, "sobol", SEEDS.inspection)
    return bool((points.x[:, axis] == problem.domain.low[axis]).all())


def _evaluate_source(source: Callable[..., object], offered: Mapping[str, Tensor]) -> Tensor:
    """Return a source's value at one time."""
    value = call_by_name(source, offered, "A source")
    return torch.as_tensor(value, dtype=torch.float64).reshape(-1)


def _find_root(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return a root near `start` by Newton's method; raise ArithmeticError if it is not reached."""
    x = start
    for _ in range(LIMITS.newton_steps):
        move = torch.linalg.solve(_differentiate(function, x), function(x).detach())
        x = x - move
        scale = 1.0 + float(x.abs().max())
        if float(move.abs().max()) <= LIMITS.newton_tolerance * scale:
            return x
    raise ArithmeticError("Newton's method did not converge")


def _differentiate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the Jacobian of a function at x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        values = function(leaf)
        rows = [torch.autograd.grad(v, leaf, retain_graph=True)[0] for v in values]
    return torch.stack(rows)
