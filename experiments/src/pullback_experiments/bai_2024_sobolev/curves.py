"""What a curve over epochs says: when a level was reached, and where it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..framework.plain import Record
from ..framework.quantiles import finite, quantiles


def reached(record: Record, measure: str, level: float) -> float:
    """The epoch at which a loss first is as low, or an accuracy as high; ∞ where it never is.

    Between two epochs the curve is a line.

    >>> run = {"epoch": [0, 1, 2], "train loss": [2.0, 1.0, 0.5], "test accuracy": [0.0, 0.5, 0.6]}
    >>> reached(run, "train loss", 0.75), reached(run, "test accuracy", 0.9)
    (1.5, inf)
    """
    sign = -1.0 if "accuracy" in measure else 1.0
    values, goal = [sign * v for v in record[measure]], sign * level
    for place, value in enumerate(values):
        if value <= goal:  # NaN is not
            if place == 0:
                return float(record["epoch"][0])
            before, (a, b) = values[place - 1], record["epoch"][place - 1 : place + 1]
            return a + (b - a) * (before - goal) / (before - value)
    return math.inf


def epochs(records: Sequence[Record], measure: str, level: float) -> float:
    """The median over seeds."""
    return quantiles([reached(r, measure, level) for r in records])[1]


def final(records: Sequence[Record], measure: str) -> float:
    """The median over seeds of where it ended; a run that was lost counts as the worst."""
    ends = [r[measure][-1] for r in records]
    if "accuracy" in measure:
        return quantiles([0.0 if _lost(r) else v for r, v in zip(records, ends, strict=True)])[1]
    return quantiles([finite(v) for v in ends])[1]


def _lost(record: Record) -> bool:
    return not math.isfinite(record["train loss"][-1])


def clearly_fewer(a: float, b: float) -> bool:
    """Whether one count of epochs is at most nine tenths of another."""
    return math.isfinite(a) and a <= 0.9 * b


def counted(value: float) -> str:
    """Epochs for people.

    >>> counted(3.14159), counted(math.inf)
    ('3.1', 'never')
    """
    return f"{value:.1f}" if math.isfinite(value) else "never"
