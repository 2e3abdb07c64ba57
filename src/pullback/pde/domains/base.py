"""Region, from which points are drawn, and Domain, a region with a boundary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..kinds import require
from ..sampling import Points, Sampler
from ..sampling import sampler as named
from .checks import check_count, check_points, check_seed, index_of
from .patch import Patch, draw, nonempty, quadrature

if TYPE_CHECKING:
    from .box import Pairs
    from .pointset import PointSet

Predicate = Callable[[Tensor], Tensor]
Inside = Callable[[Tensor, float], Tensor]
_CACHED = ("patches", "boundary", "initial", "final")


class Region(ABC):
    """Anything points can be drawn from: a domain, its boundary, a face, measured points.

    Attributes:
        names: the coordinates' names.
        low, high: a bounding box, (d,) each.
    """

    names: tuple[str, ...]
    low: Tensor
    high: Tensor

    @abstractmethod
    def build(self) -> Sequence[Patch]:
        """Disjoint images of unit cubes that make up the region."""

    @abstractmethod
    def inside(self, x: Tensor, tol: float) -> Tensor:
        """Whether points (N, d) in float64 lie within `tol` of the region; tol < 0 shrinks it."""

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        """What `build` gave."""
        return tuple(self.build())

    @property
    def dim(self) -> int:
        """The number d of coordinates."""
        return len(self.names)

    @property
    def measure(self) -> float:
        """∫ 1: length, area, volume; the number of points where the region is a set of points.

        Boxes, balls, polygons and their boundaries are exact; what is cut out of them is estimated
        with a fixed Sobol sequence of 2¹⁶ points (relative error about 1e-4).
        """
        return sum(p.measure for p in self.patches)

    @property
    def scale(self) -> float:
        """The largest extent or coordinate, to which tolerances are relative."""
        return float(torch.stack([self.high - self.low, self.low.abs(), self.high.abs()]).max())

    def sample(self, n: int, sampler: str | Sampler = "sobol", *, seed: int = 0) -> Points:
        """About n points whose weights sum to the measure; the same ones for the same seed.

        Exactly n with "sobol", "uniform" and "lhs"; "grid" and "gauss" give the largest full
        grid of at most n. A region of several parts shares n in proportion to their measures
        and puts at least one point on each; a part that is a single point (an end of an
        interval) gets just that one.
        """
        n, which = check_count(n), named(sampler)
        return draw(self.patches, n, which, torch.Generator().manual_seed(check_seed(seed)))

    def quadrature(self, n: int = 10_000) -> Points:
        """Fixed points for measuring errors: tensor Gauss up to three dimensions, else Sobol.

        Where a part of a shape is cut off the integrand jumps, so there it is Sobol too, with a
        relative error of about 1e-4 at the default n.
        """
        return quadrature(self.patches, check_count(n))

    def contains(self, x: Tensor, tol: float | None = None) -> Tensor:
        """Which of the points (N, d) lie in the closed region, (N,) bool.

        Args:
            x: the points.
            tol: the distance still counted as inside, along an axis; unless given 1e-9 (1e-6
                below float64) of the region's largest extent or coordinate.
        """
        points = check_points(x, self.dim)
        if tol is None:
            tol = self.scale * (1e-9 if x.dtype == torch.float64 else 1e-6)
        return self.inside(points, tol).to(x.device)

    def where(self, predicate: Predicate) -> Region:
        """The part of the region where `predicate(x)`, (N, d) ↦ (N,) bool, is true.

        Its measure is the accepted share of this region's, estimated on a fixed Sobol sequence.
        """
        return PatchRegion(
            self.names,
            nonempty(
                [p.only(lambda x, _: mask(predicate, x)) for p in self.patches],
                "The part of a region for which the predicate is true",
            ),
            self.low,
            self.high,
            lambda x, tol: self.inside(x, tol) & mask(predicate, x),
        )


class PatchRegion(Region):
    """A region given by its patches: a boundary, a face, a slice, or a part of one."""

    def __init__(
        self,
        names: tuple[str, ...],
        patches: Sequence[Patch],
        low: Tensor,
        high: Tensor,
        inside: Inside,
    ) -> None:
        self.names, self.low, self.high = names, low, high
        self._patches, self._inside = tuple(patches), inside

    def build(self) -> Sequence[Patch]:
        return self._patches

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return self._inside(x, tol)

    def __repr__(self) -> str:
        return f"<part of ({', '.join(self.names)}), measure {self.measure:.6g}>"


class Domain(Region):
    """A region of full dimension, with a boundary that has normals.

    `a | b`, `a & b` and `a - b` are the union, the intersection and the difference.
    """

    @abstractmethod
    def build_boundary(self) -> Region:
        """∂Ω, with normals."""

    @cached_property
    def boundary(self) -> Region:
        """∂Ω; its points carry outward unit normals."""
        return self.build_boundary()

    def face(self, name: str | int, side: str | None = None) -> Region:
        """A side with its normals: coordinate `name` "low" or "high", or edge number `name`."""
        index_of(name, self.names)
        raise PullbackError(
            f"{type(self).__name__} has no faces",
            f"no part of its boundary is a side {name} = const",
            "Use .boundary.where(predicate) for a part of the boundary",
        )

    def pairs(self, name: str) -> Pairs:
        """Matched points on the two faces of coordinate `name`, for periodic conditions."""
        index_of(name, self.names)
        raise PullbackError(
            f"{type(self).__name__} has no opposite faces",
            "only boxes and their products with time can be periodic",
            "Use a Box or an Interval",
        )

    def points(self, x: Tensor, weights: Tensor | None = None) -> PointSet:
        """Measured points (N, d) of this domain; refuses points outside."""
        from .pointset import PointSet

        outside = ~self.contains(x)
        if outside.any():
            first = int(outside.nonzero()[0, 0])
            raise PullbackError(
                f"{int(outside.sum())} of {len(x)} points lie outside the domain",
                f"point {first} is {x[first].tolist()}",
                "Remove them (x[domain.contains(x)]), or enlarge the domain",
            )
        return PointSet(x, self.names, weights)

    def __getstate__(self) -> dict[str, Any]:
        # what is cached holds functions, which do not pickle, and is built again on demand
        return {k: v for k, v in self.__dict__.items() if k not in _CACHED}

    def __or__(self, other: Domain) -> Domain:
        from .composite import Union

        return Union(self, other) if isinstance(other, Domain) else NotImplemented

    def __and__(self, other: Domain) -> Domain:
        from .composite import Intersection

        return Intersection(self, other) if isinstance(other, Domain) else NotImplemented

    def __sub__(self, other: Domain) -> Domain:
        from .composite import Difference

        return Difference(self, other) if isinstance(other, Domain) else NotImplemented


def mask(predicate: Predicate, x: Tensor) -> Tensor:
    """predicate(x), if it is a mask of the points."""
    require(callable(predicate), "The predicate", predicate, "Pass a function (N, d) ↦ (N,) bool")
    found = predicate(x)
    if not isinstance(found, Tensor) or found.shape != x.shape[:1] or found.dtype != torch.bool:
        got = f"shape {tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else found
        raise PullbackError(
            "where() needs a mask",
            f"for {len(x)} points the predicate gave {got!s}",
            "Return a bool tensor of shape (N,), such as x[:, 0] > 0.5",
        )
    return found
