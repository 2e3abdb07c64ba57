"""A table to judge a solution by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

from .estimate import Estimate
from .validation import Residual

#: said of what can take any value
LOOSE = "not determined by the conditions"


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
        head = ("condition", "residual", "largest", "its terms", "relative")
        rows = [
            (n, *(f"{v:.1e}" for v in (r.rms, r.largest, r.size, r.relative)))
            for n, r in self.residuals.items()
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [f"{self.name}: {self.stopped}"]
        for row in (head, *rows):
            cells = zip(row[1:], widths[1:], strict=True)
            lines.append("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in cells)]))
        if self.estimate is not None:
            kind = "" if self.estimate.affine else " (linearized)"
            known = f"{self.estimate.error:.1e}" if isfinite(self.estimate.error) else LOOSE
            lines.append(f"estimated error{kind}: {known}")
        for name, value in self.unknowns.items():
            spread = self.estimate.spread.get(name) if self.estimate else None
            known = "" if spread is None else f" ± {spread:.1g}"
            lines.append(f"{name} = {value:.6g}{', ' + LOOSE if spread == inf else known}")
        if self.difference is not None:
            lines.append(f"difference to the other solution: {self.difference:.1e}")
        if self.error is not None:
            lines.append(f"true error: {self.error:.1e}")
        return "\n".join(lines)

    __repr__ = __str__
