"""Problems that can be cut in time, and their restrictions to windows of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..._core.errors import PullbackError
from ..domains import Domain, Interval, Region
from ..judgement.integration import InitialValueProblem
from ..networks.state import InUnits
from ..networks.windows import (
    read_initial_values,
    require_cut_in_time,
    rescale_time,
    restrict_to_window,
)
from ..problem.conditions import Condition, FieldAtTime
from ..problem.fields import View
from ..problem.problem import Problem
from .settings import Settings


@dataclass(frozen=True)
class MarchControl:
    """How the lengths of windows are controlled, in shares of the whole time.

    Attributes:
        first_share: length of the first window.
        shortest_share: below which windows are not halved any more.
        look_share: of its steps and its budget, after which a window is looked at.
        hopeless_residual: relative residuals at which it is given up then: 1 %.
        halvings_compared: halvings of a window that must divide its residuals by `useful_fall`, or
            shorter ones are no easier.
        useful_fall: see there.
        easy_share: of its steps, below which a window was easy, and the next is twice as long.
        easy_residual: the next is twice as long only if its relative residuals are below this too.
        accurate_residual: relative residuals above which a window is halved although it converged;
            None accepts what converged.
        shares_budget: whether a window leaves some of the budget to later ones; cheap ones do not.
        first_window_budget: in units of a later one's: the first begins with random parameters.
        earlier_tolerance: of windows before the last one, in units of the caller's `tol`. Later
            ones start from their errors and amplify these: with 1 all of 17 seeds of the KdV
            equation missed an error of 1e-2, by factors of 1.3 to 7.
    """

    first_share: float = 0.25
    shortest_share: float = 1 / 16
    look_share: float = 0.25
    hopeless_residual: float = 1e-2
    halvings_compared: int = 2
    useful_fall: float = 2.0
    easy_share: float = 0.5
    easy_residual: float = math.inf
    accurate_residual: float | None = None
    shares_budget: bool = True
    first_window_budget: float = 2.0
    earlier_tolerance: float = 0.01


@dataclass(frozen=True)
class TimeWindow:
    """A problem on a window of time, and the network that begins there.

    Attributes:
        problem: the restricted one.
        network: with initial parameters.
        units: of the fields in that problem, (m,); None where they are the whole problem's.
    """

    problem: Problem
    network: nn.Module
    units: Tensor | None = None

    def restore_units(self) -> nn.Module:
        """Return the network with its fields in the units of the whole problem."""
        if self.units is None:
            return self.network
        return InUnits(self.network, self.units)


class TimeWindows(ABC):
    """A problem that can be solved on one window of time after the other.

    Attributes:
        problem: of the whole time.
        start, end: of the whole time.
        control: of the lengths of windows.
    """

    control: MarchControl = MarchControl()

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.start = float(problem.domain.low[-1])
        self.end = float(problem.domain.high[-1])

    def adapt(self, settings: Settings) -> Settings:
        """Return the settings of a window."""
        return settings

    @abstractmethod
    def open(
        self, start: float, end: float, network: nn.Module, previous: nn.Module | None
    ) -> TimeWindow:
        """Return a window, with the network that begins there.

        Args:
            start, end: of the window.
            network: of the whole time, with its initial parameters.
            previous: that of the window before; None for the first one.
        """


class RestrictedWindows(TimeWindows):
    """Windows with a copy of the whole time's network each, which begins as the last one ended."""

    def open(
        self, start: float, end: float, network: nn.Module, previous: nn.Module | None
    ) -> TimeWindow:
        initial_values = None
        if previous is not None:
            initial_values = read_initial_values(previous, self.problem.domain.dim - 1)
        restricted = self.restrict(start, end, initial_values)
        copied = rescale_time(previous or network, restricted, keep_function=previous is not None)
        return TimeWindow(restricted, copied)

    @abstractmethod
    def restrict(self, start: float, end: float, initial_values: FieldAtTime | None) -> Problem:
        """Return the problem on a window.

        Args:
            start, end: of the window.
            initial_values: gives all fields at its beginning, or their time derivatives; None for
                the first window.
        """


class SpaceTimeWindows(RestrictedWindows):
    """Windows of a problem in space and time, whose `Initial` conditions are handed on."""

    def __init__(self, problem: Problem) -> None:
        require_cut_in_time(problem)
        super().__init__(problem)

    def restrict(self, start: float, end: float, initial_values: FieldAtTime | None) -> Problem:
        return restrict_to_window(self.problem, start, end, initial_values)


class OrdinaryWindows(RestrictedWindows):
    """Windows of an ordinary initial value problem; its whole state is handed on.

    Args:
        problem: on an interval of time.
        orders: the highest derivative of each field in the equations.
    """

    def __init__(self, problem: Problem, orders: Sequence[int]) -> None:
        super().__init__(problem)
        self._orders = tuple(orders)

    def restrict(self, start: float, end: float, initial_values: FieldAtTime | None) -> Problem:
        conditions = list(self.problem.conditions)
        if initial_values is not None:
            equations = [c for c in conditions if c.is_equation and c.on is None]
            weight = max(c.weight for c in conditions if c not in equations)
            state = InitialState(initial_values, self._orders, weight=weight)
            conditions = [*equations, state]
        restricted = self.problem.restrict(Interval(start, end, name="t"), conditions)
        restricted.name += f", t = {start:.4g} to {end:.4g}"
        return restricted


class InitialState(Condition):
    """All fields and their time derivatives below the highest ones are given at the start.

    Args:
        values: gives all fields (order 0) or their derivatives.
        orders: the highest derivative of each field in the equations.
    """

    is_initial = True
    prescribes_values = True

    def __init__(self, values: FieldAtTime, orders: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self._entries: list[StateEntry] = []
        for column, highest in enumerate(orders):
            for order in range(highest):
                self._entries.append(StateEntry(column, order, _read_entry(values, column, order)))

    def default(self, domain: Domain) -> Region:
        return domain.face("t", "low")

    def residual(self, view: View) -> list[Tensor]:
        names = list(view.fields[0])
        components = []
        for entry in self._entries:
            field = view.field(names[entry.column])
            derivative = field.value
            if entry.order:
                derivative = field.d(*["t"] * entry.order)
            components.append(derivative - view.value(entry.value, "The initial state"))
        return components


@dataclass(frozen=True)
class StateEntry:
    """One entry of the state: the derivative of a field, and the function that gives its value."""

    column: int
    order: int
    value: Callable[..., Tensor]


def _read_entry(values: FieldAtTime, column: int, order: int) -> Callable[..., Tensor]:
    return lambda points: values(points, order)[:, column]


def find_time_windows(problem: Problem) -> RestrictedWindows:
    """Return the windows of a problem; raise if it cannot be cut in time."""
    if problem.domain.names == ("t",):
        ordinary = InitialValueProblem.from_problem(problem, problem.unknowns)
        if ordinary is not None:
            return OrdinaryWindows(problem, ordinary.orders)
    return SpaceTimeWindows(problem)


def can_march(problem: Problem) -> bool:
    """Return True if the problem can be cut in time and has nothing that all windows share."""
    if problem.unknowns or any(c.is_measured or c.is_prior for c in problem.conditions):
        return False
    try:
        find_time_windows(problem)
    except PullbackError:
        return False
    return True
