"""Where a PDE lives: domains, their boundaries, faces and slices, and measured points."""

from .ball import Ball, Disk
from .base import Domain, Region
from .box import Box, Interval, Pairs
from .composite import Difference, Intersection, Union
from .pointset import PointSet
from .polygon import Polygon
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
]
