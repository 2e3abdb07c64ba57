"""Seeds of the points at which equations are evaluated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PointSeeds:
    """Seeds, and distances between seeds; all are primes, so that no two kinds of points agree."""

    #: between two draws of a run's own points
    draw_stride: int = 1_000_003
    #: between two refinements of a run's own points
    refinement_stride: int = 7_368_787
    #: of points at which a problem itself is inspected; no run draws with this seed
    inspection: int = 15_487_469
    #: of the fresh points that judge a solution; no run draws with this seed
    validation: int = 104_729
    #: between two draws of the fresh points at which a run measures its loss
    validation_stride: int = 15_485_863


SEEDS = PointSeeds()
