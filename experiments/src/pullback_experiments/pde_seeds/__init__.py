"""Many seeds of tuned problems: how many end near a solution, with and without other beginnings.

The problems are those of the benchmark set with fewer neurons and points, so that a seed takes a
minute on one thread. *Alone*, the given network takes all steps; with the *strategy* of `pde.solve`
others are tried where it does not get on.
"""

from __future__ import annotations

from .experiment import Seeds

__all__ = ["EXPERIMENTS", "Seeds"]

EXPERIMENTS = (Seeds(),)
