"""Problems that can be cut in time, and their restrictions to windows of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._core.errors import PullbackError
from ..domains import Domain, Interval, Region
from ..judgement.integration import InitialValueProblem
from ..networks.windows import require_cut_in_time, restrict_to_window
from ..problem.conditions import Condition, FieldAtTime
from ..problem.fields import View
from ..problem.problem import Problem


class TimeWindows(ABC):
    """A problem that can be solved on one window of time after the other.

    Attributes:
        problem: of the whole time.
        start, end: of the whole time.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.start = float(problem.domain.low[-1])
        self.end = float(problem.domain.high[-1])

    @abstractmethod
    def restrict(self, start: float, end: float, initial_values: FieldAtTime | None) -> Problem:
        """Return the problem on a window.

        Args:
            start, end: of the window.
            initial_values: gives all fields at its beginning, or their time derivatives; None for
                the first window.
        """


class SpaceTimeWindows(TimeWindows):
    """Windows of a problem in space and time, whose `Initial` conditions are handed on."""

    def __init__(self, problem: Problem) -> None:
        require_cut_in_time(problem)
        super().__init__(problem)

    def restrict(self, start: float, end: float, initial_values: FieldAtTime | None) -> Problem:
        return restrict_to_window(self.problem, start, end, initial_values)


class OrdinaryWindows(TimeWindows):
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


def find_time_windows(problem: Problem) -> TimeWindows:
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
