"""Where a PDE lives: domains, their boundaries, faces and slices, and measured points."""

from .ball import Ball, Disk
from .box import Box, Interval
from .domain import Difference, Domain, Intersection, Union
from .polygon import Polygon
from .region import Pairs, PatchRegion, PointSet, Region
from .spacetime import SpaceTime

__all__ = [
    "Ball",
    "Box",
    "Difference",
    "Disk",
    "Domain",
    "Intersection",
    "Interval",
    "Pairs",
    "PatchRegion",
    "PointSet",
    "Polygon",
    "Region",
    "SpaceTime",
    "Union",
]
