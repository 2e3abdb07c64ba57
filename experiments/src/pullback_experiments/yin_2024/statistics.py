"""Medians and quantiles over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from ..framework.quantiles import finite, held
from .runs import Record


class Summary:
    """One method over all seeds; a run that was lost counts as infinite."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = tuple(records)

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self.records)

    @property
    def stuck(self) -> int:
        """How many of them got stuck."""
        return sum(r.stuck is not None for r in self.records)

    @property
    def errors(self) -> list[float]:
        """The final errors."""
        return [finite(r.error[-1]) for r in self.records]

    @property
    def loss(self) -> float:
        """The median final loss."""
        return self.after(math.inf)

    @property
    def error(self) -> float:
        """The median final error."""
        return statistics.median(self.errors)

    @property
    def per_step(self) -> float:
        """The median time of a step, in seconds."""
        return statistics.median(r.seconds[-1] / r.steps[-1] for r in self.records)

    def after(self, step: float) -> float:
        """The median loss after so many steps."""
        return statistics.median(held(r.steps, r.loss, step) for r in self.records)

    def below(self, error: float) -> int:
        """How many runs ended with at most this error."""
        return sum(e <= error for e in self.errors)

    def first(self, name: str) -> float:
        """The median over runs of the first value seen of this name, NaN where there is none."""
        return _median(v[0] for r in self.records if (v := r.values(name)))

    def largest(self, name: str) -> float:
        """The median over runs of the largest value seen of this name."""
        return _median(max(v) for r in self.records if (v := r.values(name)))

    def median(self, name: str) -> float:
        """The median over runs and steps of the values seen of this name."""
        return _median(v for r in self.records for v in r.values(name))


def _median(values: Iterable[float]) -> float:
    kept = list(values)
    return statistics.median(kept) if kept else math.nan
