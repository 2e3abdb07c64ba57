"""Experiments that solve a set of problems, each within the same seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class ProblemSetExperiment(Experiment):
    """An experiment on named problems.

    Attributes:
        problems, quick_problems: names.
        seconds, quick_seconds: of every solve.
    """

    problems: Sequence[str]
    quick_problems: Sequence[str]
    seconds: float
    quick_seconds: float

    def choose_problems(self, quick: bool) -> Sequence[str]:
        """Return the names of this version's problems."""
        if quick:
            return self.quick_problems
        return self.problems

    def choose_seconds(self, quick: bool) -> float:
        """Return the seconds of every solve in this version."""
        if quick:
            return self.quick_seconds
        return self.seconds
