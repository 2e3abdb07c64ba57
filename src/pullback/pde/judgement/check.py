"""A table to judge a solution by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan

from .estimate import Estimate
from .validation import Residual

#: said of what can take any value
NOT_DETERMINED = "not determined by the conditions"

_COLUMNS = ("condition", "residual", "largest", "its terms", "relative")


@dataclass(frozen=True)
class Check:
    """A table to judge a solution by; `print` it.

    Attributes:
        name: of the problem.
        stopped: the run's verdict.
        residuals: every condition at fresh points.
        estimate: of the error, where there is one.
        unknowns: coefficients that were found.
        difference: relative L² difference to another solution, where one was given.
        error: the true one, where it is known.
    """

    name: str
    stopped: str
    residuals: Mapping[str, Residual]
    estimate: Estimate | None = None
    unknowns: Mapping[str, float] = field(default_factory=dict)
    difference: float | None = None
    error: float | None = None

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.stopped}", *self._format_residuals()]
        if self.estimate is not None:
            lines.append(_format_estimate(self.estimate))
        lines += [self._format_unknown(name) for name in self.unknowns]
        if self.difference is not None:
            lines.append(f"difference to the other solution: {self.difference:.1e}")
        if self.error is not None:
            lines.append(f"true error: {self.error:.1e}")
        return "\n".join(lines)

    __repr__ = __str__

    def _format_residuals(self) -> list[str]:
        rows: list[Sequence[str]] = [_COLUMNS]
        for name, residual in self.residuals.items():
            numbers = (residual.rms, residual.largest, residual.size, residual.relative)
            rows.append([name, *(f"{number:.1e}" for number in numbers)])
        return _align_columns(rows)

    def _format_unknown(self, name: str) -> str:
        text = f"{name} = {self.unknowns[name]:.6g}"
        if self.estimate is None or name not in self.estimate.spread:
            return text
        spread = self.estimate.spread[name]
        if spread == inf:
            return f"{text}, {NOT_DETERMINED}"
        return f"{text} ± {spread:.1g}"


def _format_estimate(estimate: Estimate) -> str:
    label = "estimated error"
    if not estimate.affine:
        label += " (linearized)"
    if isnan(estimate.error):
        return f"{label}: unknown"
    if not isfinite(estimate.error):
        return f"{label}: {NOT_DETERMINED}"
    return f"{label}: {estimate.error:.1e}"


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return lines
