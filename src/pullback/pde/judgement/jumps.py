"""Coefficients that jump: the equation then needs conditions on the kink, which it does not state.

In (a u')' = f with a coefficient a that jumps, u' jumps too, and a u' does not. Written as
a u'' + a' u' = f with the values of a on both sides, the jump is left out, and the equation holds
for another, smooth function. No residual sees that, and no second discretization does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..discretization.residual import LocalResidual
from ..discretization.seeds import SEEDS
from ..domains.sampling import Points
from ..problem.conditions import Condition
from ..problem.problem import Problem


@dataclass(frozen=True)
class JumpThresholds:
    """Where jumps are looked for, and what is one.

    Attributes:
        lines: through the domain, between two of its points.
        points_per_line: at which coefficients are compared.
        halvings: of the piece of a line with the largest change; it is 1e-14 of the line then.
        narrow_halvings, narrow_share: after which the piece is 1e-4 of the line; a change of which
            so much is left there is narrower than the spacing of points, and acts as a jump.
        smallest_jump: of a coefficient, as a share of its largest value.
        derivatives: made-up values of all derivatives; a jump at the same place for both of them
            is one of the coordinates, and not the switch of an inequality such as min(u, f − u'').
        smallest_order: of the derivatives whose coefficients make kinks.
    """

    lines: int = 32
    points_per_line: int = 64
    halvings: int = 40
    narrow_halvings: int = 7
    narrow_share: float = 0.5
    smallest_jump: float = 0.01
    derivatives: tuple[float, float] = (1.0, -0.3)
    smallest_order: int = 2


THRESHOLDS = JumpThresholds()


def find_jump(problem: Problem) -> str:
    """Return where a coefficient of a highest derivative jumps, in words; empty if none does."""
    for condition in problem.conditions:
        if condition.is_equation and condition.on is None:
            point = _find_jump_of(problem, condition)
            if point is not None:
                names = problem.domain.names
                pairs = zip(names, point.tolist(), strict=True)
                coordinates = ", ".join(f"{name} = {value:.3g}" for name, value in pairs)
                return f"{condition.name!r} near {coordinates}"
    return ""


def _find_jump_of(problem: Problem, condition: Condition) -> Tensor | None:
    """Return a point (d,) at which a coefficient jumps, None if there is none."""
    coefficients = [Coefficients(problem, condition, value) for value in THRESHOLDS.derivatives]
    if coefficients[0].order < THRESHOLDS.smallest_order:
        return None
    jumps = Lines.draw(problem).find_jumps(coefficients)
    if not len(jumps):
        return None
    return jumps[0]


class Coefficients:
    """The slopes of an equation by its highest derivatives, as functions of the coordinates.

    Args:
        problem, condition: whose equation it is.
        value: of all derivatives.

    Attributes:
        order: of the highest derivatives.
    """

    def __init__(self, problem: Problem, condition: Condition, value: float) -> None:
        self._problem = problem
        self._condition = condition
        self._value = value
        local = self._localize(problem.domain.sample(1, "sobol", seed=SEEDS.inspection).x)
        self.order = max(2 if index is None else len(index) for index in local.indices)

    def _localize(self, x: Tensor) -> LocalResidual:
        points = Points(x, torch.full_like(x[:, 0], 1 / len(x)), None)
        return LocalResidual(self._problem, self._condition, (points,))

    def __call__(self, x: Tensor) -> Tensor:
        """Return all coefficients at points (N, d): (N, C)."""
        local = self._localize(x)
        value = torch.full_like(x[:, 0], self._value)
        slopes = local.linearize(dict.fromkeys(local.keys, value)).slopes
        columns = []
        for (_, _, index), slope in slopes.items():
            if index is None or len(index) == self.order:
                columns.append(slope)
        return torch.cat(columns, 1)


@dataclass(frozen=True)
class Lines:
    """Pieces of lines through the domain, from `start` to `end`, (L, d) each."""

    start: Tensor
    end: Tensor

    @classmethod
    def draw(cls, problem: Problem) -> Lines:
        """Return lines between points of the domain."""
        x = problem.domain.sample(2 * THRESHOLDS.lines, "uniform", seed=SEEDS.inspection).x
        return cls(x[: THRESHOLDS.lines], x[THRESHOLDS.lines :])

    def find_jumps(self, coefficients: Sequence[Coefficients]) -> Tensor:
        """Return points (J, d) at which a coefficient changes by a large share of itself at once.

        Args:
            coefficients: for several made-up derivatives. The first ones say where, and all of
                them must change there.
        """
        first = coefficients[0]
        count = len(self.start)
        points = THRESHOLDS.points_per_line
        shares = torch.linspace(0, 1, points, dtype=torch.float64)[:, None, None]
        x = self.start + shares * (self.end - self.start)  # (points, L, d)
        values = first(x.flatten(0, 1)).unflatten(0, (points, count))
        steepest = _measure_changes(values[:-1], values[1:]).argmax(0)  # of (points − 1, L)
        columns = torch.arange(count)
        pieces = Lines(x[steepest, columns], x[steepest + 1, columns])
        narrow = pieces._halve_often(first, THRESHOLDS.narrow_halvings)
        tiny = narrow._halve_often(first, THRESHOLDS.halvings - THRESHOLDS.narrow_halvings)
        is_jump = torch.ones(count, dtype=torch.bool)
        for others in coefficients:
            sizes = others(x.flatten(0, 1)).nan_to_num().abs()
            smallest = THRESHOLDS.smallest_jump * float(sizes.max())
            change = narrow._measure_change(others)
            is_narrow = change >= THRESHOLDS.narrow_share * pieces._measure_change(others)
            is_large = tiny._measure_change(others) > smallest
            is_jump &= is_large | (is_narrow & (change > smallest))
        return tiny.start[is_jump]

    def _halve_often(self, coefficients: Coefficients, count: int) -> Lines:
        """Return the pieces after so many halvings."""
        pieces = self
        for _ in range(count):
            pieces = pieces._halve(coefficients)
        return pieces

    def _measure_change(self, coefficients: Coefficients) -> Tensor:
        """Return the largest change of a coefficient from start to end, (L,)."""
        return _measure_changes(coefficients(self.start), coefficients(self.end))

    def _halve(self, coefficients: Coefficients) -> Lines:
        """Return the halves on which the coefficients change most."""
        middle = (self.start + self.end) / 2
        values = coefficients(torch.cat([self.start, middle, self.end]))
        first, second, third = values.chunk(3)
        is_first = _measure_changes(first, second) > _measure_changes(second, third)
        start = torch.where(is_first[:, None], self.start, middle)
        end = torch.where(is_first[:, None], middle, self.end)
        return Lines(start, end)


def _measure_changes(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest change of a coefficient at each point, 0 where one is not finite."""
    return (after - before).abs().nan_to_num(posinf=0.0).amax(-1)
