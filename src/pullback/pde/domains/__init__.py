"""Where a PDE lives: domains, their boundaries, faces and slices, and measured points."""

from .ball import Ball, Disk
from .box import Box, Interval
from .domain import Difference, Domain, Intersection, Union
from .polygon import Polygon
from .region import Pairs, PatchRegion, PointSet, Region
from .spacetime import SpaceTime

__all__ = [
    "Region",
    "Domain",
    "Interval",
    "Box",
    "Ball",
    "Disk",
    "Polygon",
    "SpaceTime",
    "Union",
    "Intersection",
    "Difference",
    "PointSet",
    "Pairs",
    "PatchRegion",
]
