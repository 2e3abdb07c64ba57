"""A search for a rate, which is doubled and halved until the best one has a worse one beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..framework.curves import finite
from ..framework.records import Record

#: rate ↦ what a run with it gave, with its final loss as "final"
Train = Callable[[float], Record]


@dataclass(frozen=True)
class BracketLimits:
    """Where a search for a rate ends."""

    #: what a rate is multiplied or divided by; curves of large networks are steeper than those of
    #: small ones, and a best rate in between may be 0.04 better
    factor: float = 2.0
    #: runs of one search; eight steps of two reach a rate that is wrong by a factor of 50
    most_runs: int = 8


_LIMITS = BracketLimits()


def bracket(train: Train, start: float) -> list[Record]:
    """Return runs at rates of which the best has a worse one above and a worse one below it.

    The rate is doubled while the loss falls; if it does not fall at first, it is halved while it
    falls. Runs come in the order of their rates. The best is at an end of the list only if the
    limit of runs was reached.

    >>> runs = bracket(lambda rate: {"lr": rate, "final": abs(rate - 5)}, 1.0)
    >>> [run["lr"] for run in runs]
    [1.0, 2.0, 4.0, 8.0]
    """
    runs = [train(start), train(_LIMITS.factor * start)]
    while len(runs) < _LIMITS.most_runs and find_best(runs) is runs[-1]:
        runs.append(train(_LIMITS.factor * runs[-1]["lr"]))
    while len(runs) < _LIMITS.most_runs and find_best(runs) is runs[0]:
        runs.insert(0, train(runs[0]["lr"] / _LIMITS.factor))
    return runs


def find_best(runs: Sequence[Record]) -> Record:
    """Return the run with the lowest final loss; one that diverged is the worst."""
    return min(runs, key=lambda run: finite(run["final"]))
