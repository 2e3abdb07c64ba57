"""docstring later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..._core.errors import PullbackError
from .experiment import Experiment
from .table import EXPERIMENTS

__all__ = ["EXPERIMENTS", "Experiment", "run", "seed_range"]


def run(
    quick: bool,
    seeds: Sequence[int],
    out: Path,
    console: Console,
    *,
    names: Sequence[str] | None = None,
) -> bool:
    """The named experiments, by default all; whether their claims hold."""
    for name in names or ():
        if name not in EXPERIMENTS:
            raise PullbackError(
                f"There is no experiment {name!r}",
                f"there are {', '.join(EXPERIMENTS)}",
                "Name one of these",
            )
    chosen = [EXPERIMENTS[name] for name in names or EXPERIMENTS]
    return all([experiment.run(quick, seeds, out, console) for experiment in chosen])


def seed_range(text: str) -> list[int]:
    """Seeds as people write them.

    >>> seed_range("0-3"), seed_range("1,4,7-8")
    ([0, 1, 2, 3], [1, 4, 7, 8])
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = part.split("-")
        if not 1 <= len(ends) <= 2 or not all(end.strip().isdigit() for end in ends):
            raise PullbackError(
                f"The seeds {text!r} cannot be read", f"{part!r} is no range", "Write 0-9 or 0,3,5"
            )
        seeds += range(int(ends[0]), int(ends[-1]) + 1)
    if not seeds:
        raise PullbackError("There are no seeds", f"got {text!r}", "Write 0-9 or 0,3,5")
    return seeds
