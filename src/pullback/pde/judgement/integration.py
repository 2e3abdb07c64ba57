"""An ordinary initial value problem, integrated in time by another method than the network's.

Residuals can be small everywhere while the solution is wrong, because an unstable equation
amplifies a tiny violation. For ordinary differential equations with initial values the answer can
be compared with a second discretization, which shares no points, no network and no tangents with
the first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...maps.jets import Index
from ..discretization.sites import draw_sites
from ..domains import PointSet, Region
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
        windows: of time, in which two solutions are compared.
        compared_times: in every window.
        smallest_field: share of the whole solution below which a field is not judged by itself.
    """

    relative_tolerance: float = 1e-10
    newton_steps: int = 12
    newton_tolerance: float = 1e-9
    evaluations: int = 30_000
    windows: int = 50
    compared_times: int = 20
    smallest_field: float = 1e-10


LIMITS = IntegrationLimits()

#: u(t) of all fields at times (N,): (N, fields)
Trajectory = Callable[[Tensor], Tensor]


class IntegrationFailed(Exception):
    """An initial value problem cannot be integrated to its end."""


class _TooLong(Exception):
    """The integration takes more evaluations than allowed."""


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

    `from_problem` returns None for everything else: more coordinates than time, conditions
    elsewhere than at the start, an algebraic equation, or another number of equations than fields.
    """

    def __init__(
        self,
        problem: Problem,
        unknowns: Mapping[str, float],
        equations: list[Condition],
        initial_conditions: list[Condition],
    ) -> None:
        self._problem = problem
        self._unknowns = {n: torch.tensor(v, dtype=torch.float64) for n, v in unknowns.items()}
        self._equations = equations
        self._initial_conditions = initial_conditions
        self._start = float(problem.domain.low[0])
        self._end = float(problem.domain.high[0])
        self._orders = self._find_orders()
        self._highest = torch.zeros(len(problem.fields), dtype=torch.float64)

    @classmethod
    def from_problem(
        cls, problem: Problem, unknowns: Mapping[str, float]
    ) -> InitialValueProblem | None:
        """Return the initial value problem that these conditions state, if they state one."""
        if problem.domain.dim != 1:
            return None
        equations: list[Condition] = []
        initial_conditions: list[Condition] = []
        for condition in problem.conditions:
            if condition.is_equation and condition.on is None:
                equations.append(condition)
            elif _holds_at_start(problem, condition):
                initial_conditions.append(condition)
            else:
                return None
        if not equations or not initial_conditions:
            return None
        candidate = cls(problem, unknowns, equations, initial_conditions)
        if not candidate._is_square():
            return None
        return candidate

    @property
    def orders(self) -> list[int]:
        """The highest derivative of each field in the equations."""
        return list(self._orders)

    def find_initial_state(self) -> Tensor:
        """Return (u₁, u₁', …, u₂, …) at the start; raise IntegrationFailed if it is not found."""
        state = self._find_initial_state(lambda times: times.new_zeros(1, len(self._orders)))
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

    def integrate(self, guess: Trajectory) -> Trajectory | None:
        """Return the solution, or None if the integration fails.

        Args:
            guess: near which the initial values are looked for, such as the network's own.
        """
        from scipy.integrate import solve_ivp  # slow to import

        initial_state = self._find_initial_state(guess)
        if initial_state is None:
            return None
        evaluations = 0

        def slope(t: float, state: np.ndarray) -> np.ndarray:
            nonlocal evaluations
            evaluations += 1
            if evaluations > LIMITS.evaluations:
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
                    atol=LIMITS.relative_tolerance * 1e-3 * scales,
                    dense_output=True,
                )
        except (_TooLong, ArithmeticError, ValueError, torch.linalg.LinAlgError):
            return None
        if not outcome.success or not np.isfinite(outcome.y).all():
            return None
        columns = self._value_columns()

        def trajectory(times: Tensor) -> Tensor:
            states = torch.from_numpy(outcome.sol(times.detach().cpu().double().numpy()).T)
            return states[:, columns]

        return trajectory

    def _find_scales(self, initial_state: Tensor, guess: Trajectory) -> np.ndarray:
        """Return the size of each entry of the state, to which absolute tolerances are relative.

        A field and its derivatives count as the field does where it is known to be nonzero, so that
        a small one is integrated as accurately as a large one.
        """
        times = torch.linspace(self._start, self._end, 50, dtype=torch.float64)
        by_field = guess(times).detach().abs().amax(0).cpu().double()
        by_state = [part.abs().max() for part in initial_state.split(self._orders)]
        sizes = torch.maximum(by_field, torch.stack(by_state))
        smallest = LIMITS.smallest_field * float(sizes.max())
        sizes = sizes.clamp(min=max(smallest, torch.finfo(torch.float64).tiny))
        repeats = torch.tensor(self._orders)
        return sizes.repeat_interleave(repeats).numpy()

    # --- the equations as functions of the state -------------------------------------------------

    def _find_orders(self) -> list[int]:
        """Return the highest derivative of each field in the equations."""
        orders = dict.fromkeys(self._problem.fields, 0)

        def channel(name: str, index: Index | None) -> Tensor:
            order = 2 if index is None else len(index)
            orders[name] = max(orders[name], order)
            return torch.full((1,), 0.7, dtype=torch.float64)

        for condition in (*self._equations, *self._initial_conditions):
            self._residual(condition, self._start, channel)
        return [orders[name] for name in self._problem.fields]

    def _is_square(self) -> bool:
        """Return True if there are as many equations as fields, and initial values as states."""
        if min(self._orders) == 0:
            return False
        state = torch.full((sum(self._orders),), 0.7, dtype=torch.float64)
        highest = torch.full((len(self._orders),), 0.3, dtype=torch.float64)
        equations = self._equation_residuals(self._start, state, highest)
        initial = self._initial_residuals(state)
        return len(equations) == len(highest) and len(initial) == len(state)

    def _value_columns(self) -> list[int]:
        """Return where each field's value stands in the state (u₁, u₁', …, u₂, …)."""
        columns = []
        position = 0
        for order in self._orders:
            columns.append(position)
            position += order
        return columns

    def _residual(
        self, condition: Condition, t: float, channel: Callable[[str, Index | None], Tensor]
    ) -> Tensor:
        """Return the residuals of a condition at one time, from the fields' derivatives there."""
        problem = self._problem
        time = torch.tensor([[t]], dtype=torch.float64)
        normals = torch.full((1, 1), -1.0, dtype=torch.float64)
        points = Points(time, torch.ones(1, dtype=torch.float64), normals)
        fields = {}
        for name in problem.fields:
            fields[name] = Field(
                lambda index, name=name: channel(name, index), problem.coordinates, normals
            )
        sources = {}
        offered = {"points": time, problem.domain.names[0]: time[:, 0]}
        for name, source in problem.sources.items():
            sources[name] = _evaluate_source(source, offered)
        coordinates = {problem.domain.names[0]: time[:, 0], **sources}
        view = View([fields], points, coordinates, self._unknowns, {})
        residuals = condition.residual(view)
        columns = [residuals] if isinstance(residuals, (Tensor, Field)) else list(residuals)
        values = [c.value if isinstance(c, Field) else c for c in columns]
        return torch.cat([v.reshape(-1) for v in values])

    def _make_lookup(self, state: Tensor, highest: Tensor) -> Callable[[str, Index | None], Tensor]:
        """Return the derivatives by field and order, from the state and the highest ones."""
        derivatives: dict[str, list[Tensor]] = {}
        position = 0
        for number, (name, order) in enumerate(
            zip(self._problem.fields, self._orders, strict=True)
        ):
            lower = [state[k : k + 1] for k in range(position, position + order)]
            derivatives[name] = [*lower, highest[number : number + 1]]
            position += order

        def channel(name: str, index: Index | None) -> Tensor:
            order = 2 if index is None else len(index)
            return derivatives[name][order]

        return channel

    def _equation_residuals(self, t: float, state: Tensor, highest: Tensor) -> Tensor:
        channel = self._make_lookup(state, highest)
        return torch.cat([self._residual(c, t, channel) for c in self._equations])

    def _initial_residuals(self, state: Tensor) -> Tensor:
        channel = self._make_lookup(state, torch.zeros_like(self._highest))
        conditions = self._initial_conditions
        return torch.cat([self._residual(c, self._start, channel) for c in conditions])

    def _differentiate_state(self, t: float, state: Tensor) -> Tensor:
        """Return the state's derivative; Newton's method finds the highest derivatives."""
        self._highest = _find_root(
            lambda highest: self._equation_residuals(t, state, highest), self._highest
        )
        slopes = []
        position = 0
        for number, order in enumerate(self._orders):
            slopes.append(state[position + 1 : position + order])
            slopes.append(self._highest[number : number + 1])
            position += order
        return torch.cat(slopes)

    def _find_initial_state(self, guess: Trajectory) -> Tensor | None:
        """Return the state at the start that meets all initial conditions."""
        state = torch.zeros(sum(self._orders), dtype=torch.float64)
        start = torch.tensor([self._start], dtype=torch.float64)
        state[self._value_columns()] = guess(start)[0].detach().cpu().double()
        try:
            return _find_root(self._initial_residuals, state)
        except (ArithmeticError, torch.linalg.LinAlgError):
            return None


def compare_with_integration(
    problem: Problem, unknowns: Mapping[str, float], solution: Trajectory
) -> ErrorProfile | None:
    """Return how far a solution is from that of an integrator.

    Returns:
        None where the problem is no ordinary initial value problem.

    Raises:
        IntegrationFailed: it cannot be integrated to the end, or takes too long.
    """
    initial_value_problem = InitialValueProblem.from_problem(problem, unknowns)
    if initial_value_problem is None:
        return None
    trajectory = initial_value_problem.integrate(solution)
    if trajectory is None:
        raise IntegrationFailed
    start = float(problem.domain.low[0])
    end = float(problem.domain.high[0])
    edges = torch.linspace(start, end, LIMITS.windows + 1, dtype=torch.float64).tolist()
    windows = []
    for a, b in pairwise(edges):
        times = torch.linspace(a, b, LIMITS.compared_times, dtype=torch.float64)
        reference = trajectory(times)
        difference = solution(times).detach().cpu().double() - reference
        windows.append(WindowError(a, b, difference.square().mean(0), reference.square().mean(0)))
    sizes = torch.stack([window.squared_sizes for window in windows]).sum(0)
    is_nonzero = sizes > LIMITS.smallest_field**2 * sizes.sum()
    names = zip(problem.fields, is_nonzero.tolist(), strict=True)
    nonzero_fields = frozenset(name for name, nonzero in names if nonzero)
    return ErrorProfile(tuple(windows), problem.fields, nonzero_fields, is_integrated=True)


def _holds_at_start(problem: Problem, condition: Condition) -> bool:
    """Return True if all points of the condition are the beginning of the interval."""
    region = condition.region(problem.domain)
    if condition.is_measured or not isinstance(region, Region) or isinstance(region, PointSet):
        return False
    (points,) = draw_sites(problem, condition, 4, "sobol", 0)
    return bool((points.x == problem.domain.low).all())


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
