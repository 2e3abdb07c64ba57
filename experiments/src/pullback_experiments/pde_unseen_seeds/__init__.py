"""Seeds that no set-up was tuned on: how many reach the target, with and without the strategy.

Poisson's and the heat equation have their tuned set-ups. Those of Burgers, Allen–Cahn and KdV have
fewer neurons and points, so that a seed takes a minute on one thread, and targets to match. A solve
ends at its target. *Alone*, the given network takes all steps; with the *strategy* of `pde.solve`
others are tried where it does not get on.
"""

from __future__ import annotations

from .experiment import UnseenSeeds

__all__ = ["EXPERIMENTS", "UnseenSeeds"]

EXPERIMENTS = (UnseenSeeds(),)
