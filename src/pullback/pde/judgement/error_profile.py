"""The error of a solution by a second discretization, over the windows of time and by field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: share of itself from which on the error of a field leaves open whether the field is zero
_LOST_SHARE = 0.1


@dataclass(frozen=True)
class WindowError:
    """The error on a window of time.

    Attributes:
        start, end: of the window.
        squared_errors: mean squares of the error of each field, (m,).
        squared_sizes: those of the second solution, (m,).
        unexplained: root mean square of what unresolved residuals may add, all fields together.
    """

    start: float
    end: float
    squared_errors: Tensor
    squared_sizes: Tensor
    unexplained: float = 0.0


@dataclass(frozen=True)
class ErrorProfile:
    """How far a solution is from another one that shares nothing with it.

    Attributes:
        windows: of time, in order; one for problems without time.
        fields: names.
        nonzero_fields: those that cannot vanish, because a condition gives them other values.
        unresolved: share of the residuals that the second solution leaves: 0 for integrators.
        is_integrated: whether the second solution is an integrator's, which there is just one of.
        is_determined: whether the conditions leave no other solution near this one.
        is_bounded: whether it is known how much the residuals that are left are amplified.
    """

    windows: tuple[WindowError, ...]
    fields: tuple[str, ...]
    nonzero_fields: frozenset[str] = frozenset()
    unresolved: float = 0.0
    is_integrated: bool = False
    is_determined: bool = True
    is_bounded: bool = True

    @property
    def total(self) -> float:
        """The relative L² error, all fields together."""
        return _divide(float(self._errors.sum()), float(self._sizes.sum()))

    @property
    def by_field(self) -> dict[str, float]:
        """The relative L² error of each field."""
        pairs = zip(self.fields, self._errors.tolist(), self._sizes.tolist(), strict=True)
        return {name: _divide(error, size) for name, error, size in pairs}

    @property
    def error(self) -> float:
        """The largest error: of all fields together, and of each that is judged by itself.

        A field that may be zero, such as the velocity across a channel, is not judged by itself:
        its error is all there is of it. The error is infinite where the conditions do not determine
        the solution.
        """
        if not self.is_determined:
            return math.inf
        by_field = self.by_field
        judged = [by_field[name] for name in self.fields if name not in self.lost_fields]
        judged += [by_field[name] for name in self.nonzero_fields]
        return max([self.total, *judged])

    @property
    def unexplained(self) -> float:
        """What residuals that the second solution leaves may add to the relative error."""
        squared = sum((w.end - w.start) * w.unexplained**2 for w in self.windows)
        return _divide(squared, float(self._sizes.sum()))

    @property
    def lost_fields(self) -> tuple[str, ...]:
        """Fields that may be zero as far as their errors tell."""
        by_field = self.by_field
        names = [name for name, error in by_field.items() if error > _LOST_SHARE]
        return tuple(name for name in names if name not in self.nonzero_fields)

    @property
    def lost_from(self) -> float | None:
        """The time from which on the error is as large as the solution; None if it never is.

        A single window has no times to tell apart: that of a steady problem is one.
        """
        if len(self.windows) == 1:
            return None
        time = None
        for window in reversed(self.windows):
            if float(window.squared_errors.sum()) < float(window.squared_sizes.sum()):
                break
            time = window.start
        return time

    @property
    def _errors(self) -> Tensor:
        return self._sum([window.squared_errors for window in self.windows])

    @property
    def _sizes(self) -> Tensor:
        return self._sum([window.squared_sizes for window in self.windows])

    def _sum(self, means: Sequence[Tensor]) -> Tensor:
        """Return the sum of mean squares over the windows, weighted by their lengths."""
        lengths = torch.tensor([window.end - window.start for window in self.windows])
        return lengths.double() @ torch.stack(list(means)).double()


def _divide(squared_error: float, squared_size: float) -> float:
    """Return the root of a ratio of squares, infinite over zero."""
    if squared_size == 0.0:
        return math.inf if squared_error else 0.0
    return math.sqrt(squared_error / squared_size)
