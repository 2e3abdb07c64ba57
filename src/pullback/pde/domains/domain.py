"""Domains: regions of full dimension with a boundary, their unions, intersections, differences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..arguments import index_of, require
from .patch import Keep, Patch, cuboid, drop_empty
from .region import Pairs, PatchRegion, PointSet, Region

_CACHED = ("patches", "boundary", "initial", "final")
#: how far beside a boundary the other shape is asked for, as a share of the extent
_PROBE_SHARE = 1e-6


class Domain(Region):
    """A region of full dimension, with a boundary that has normals.

    `a | b`, `a & b` and `a - b` are the union, the intersection and the difference.
    """

    #: whether the last coordinate is time
    evolves: bool = False

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
            "Use .boundary.where(predicate) for a part of the boundary, and a Box for Periodic",
        )

    def pairs(self, name: str) -> Pairs:
        """Matched points on the two faces of coordinate `name`, for periodic conditions."""
        return Pairs(self.face(name, "low"), self.face(name, "high"), index_of(name, self.names))

    def points(self, x: Tensor, weights: Tensor | None = None) -> PointSet:
        """Measured points (N, d) of this domain; refuses points outside."""
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

    def __or__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, other: Domain
    ) -> Domain:
        if isinstance(other, Domain):
            return Union(self, other)
        return NotImplemented

    def __and__(self, other: Domain) -> Domain:
        if isinstance(other, Domain):
            return Intersection(self, other)
        return NotImplemented

    def __sub__(self, other: Domain) -> Domain:
        if isinstance(other, Domain):
            return Difference(self, other)
        return NotImplemented


class Composite(Domain):
    """Two shapes a and b combined.

    Points are drawn from the shapes themselves, and those of them that do not belong to the
    result are rejected. Measures are therefore exact up to the share that is rejected, which is
    estimated on a fixed Sobol sequence of 2¹⁶ points (error about 1e-4 of the shape).
    The boundary consists of the parts of ∂a and ∂b on the result's boundary: whether a point of
    ∂a is one is decided just beside it, along its normal, so common faces count once or not
    at all.
    """

    def __init__(self, a: Domain, b: Domain) -> None:
        for domain in (a, b):
            usable = isinstance(domain, Domain) and not domain.evolves
            what = f"A part of the {type(self).__name__.lower()}"
            require(usable, what, domain, "Combine the spaces first: SpaceTime(a - b, time)")
        if a.dim != b.dim:
            raise PullbackError(
                "The domains have different dimensions", f"{a.dim} and {b.dim}", "Use equal ones"
            )
        if a.names != b.names:
            raise PullbackError(
                "The domains have different coordinates",
                f"({', '.join(a.names)}) and ({', '.join(b.names)})",
                "Give both the same names=",
            )
        self.a = a
        self.b = b
        self.names = a.names
        self.low, self.high = self._extent()
        _ = self.patches  # an empty result is refused here, not at the first sample

    def _extent(self) -> tuple[Tensor, Tensor]:
        """Return the corners of the result's bounding box."""
        return self.a.low, self.a.high

    @abstractmethod
    def _cut_patches(self) -> list[Patch]:
        """Return the disjoint patches of the result, some of which may be empty."""

    @abstractmethod
    def _cut_boundary(self) -> list[Patch]:
        """Return the patches of the result's boundary, some of which may be empty."""

    def build(self) -> Sequence[Patch]:
        return drop_empty(self._cut_patches(), f"The {type(self).__name__.lower()}")

    def build_boundary(self) -> Region:
        def inside(x: Tensor, tol: float) -> Tensor:
            is_on_shape = self.a.boundary.inside(x, tol) | self.b.boundary.inside(x, tol)
            step = max(self._step, 10 * tol)
            has_outer_neighbour = torch.zeros(len(x), dtype=torch.bool)
            for shift in torch.eye(self.dim, dtype=x.dtype) * step:
                has_outer_neighbour |= ~self.inside(x + shift, 0.0)
                has_outer_neighbour |= ~self.inside(x - shift, 0.0)
            return is_on_shape & self.inside(x, tol) & has_outer_neighbour

        what = f"The boundary of the {type(self).__name__.lower()}"
        return PatchRegion(
            self.names, drop_empty(self._cut_boundary(), what), self.low, self.high, inside
        )

    @property
    def _step(self) -> float:
        """Return the distance beside a boundary point at which a shape is evaluated."""
        extents = [(d.high - d.low).min() for d in (self.a, self.b)]
        return _PROBE_SHARE * float(torch.stack(extents).min())

    def _probe(self, shape: Domain, side: float) -> Keep:
        """Return a mask of boundary points whose neighbours outward (+1) or inward are in `shape`.

        Neighbours are a small step away along the normal.
        """
        step = side * self._step

        def keep(x: Tensor, normals: Tensor | None) -> Tensor:
            assert normals is not None
            return shape.inside(x + step * normals, 0.0)

        return keep

    def __repr__(self) -> str:
        sign = {"Union": "|", "Intersection": "&", "Difference": "-"}[type(self).__name__]
        return f"({self.a!r} {sign} {self.b!r})"


class Union(Composite):
    """a ∪ b: all of a, and b outside a."""

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return self.a.inside(x, tol) | self.b.inside(x, tol)

    def _extent(self) -> tuple[Tensor, Tensor]:
        return torch.minimum(self.a.low, self.b.low), torch.maximum(self.a.high, self.b.high)

    def _cut_patches(self) -> list[Patch]:
        outside = [p.only(lambda x, _: ~self.a.inside(x, 0.0)) for p in self.b.patches]
        return [*self.a.patches, *outside]

    def _cut_boundary(self) -> list[Patch]:
        over_a = self._probe(self.a, 1.0)
        over_b = self._probe(self.b, 1.0)
        under_a = self._probe(self.a, -1.0)
        return [
            *(p.only(lambda x, n: ~over_b(x, n)) for p in self.a.boundary.patches),
            *(
                p.only(lambda x, n: ~(over_a(x, n) | under_a(x, n)))
                for p in self.b.boundary.patches
            ),
        ]


class Intersection(Composite):
    """a ∩ b, drawn from the smallest of a, b and the bounding box."""

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return self.a.inside(x, tol) & self.b.inside(x, tol)

    def _extent(self) -> tuple[Tensor, Tensor]:
        low = torch.maximum(self.a.low, self.b.low)
        high = torch.minimum(self.a.high, self.b.high)
        if not (low < high).all():
            raise PullbackError(
                "The intersection is empty",
                "the bounding boxes do not overlap",
                "Check the positions of the two domains",
            )
        return low, high

    def _cut_patches(self) -> list[Patch]:
        hosts = (self.a.patches, self.b.patches, (cuboid(self.low, self.high),))
        host = min(hosts, key=lambda patches: sum(p.measure for p in patches))
        return [p.only(lambda x, _: self.inside(x, 0.0)) for p in host]

    def _cut_boundary(self) -> list[Patch]:
        over_a = self._probe(self.a, 1.0)
        under_a = self._probe(self.a, -1.0)
        under_b = self._probe(self.b, -1.0)
        return [
            *(p.only(under_b) for p in self.a.boundary.patches),
            *(p.only(lambda x, n: over_a(x, n) & under_a(x, n)) for p in self.b.boundary.patches),
        ]


class Difference(Composite):
    """a ∖ b; the normals on the boundary of b point into b."""

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return self.a.inside(x, tol) & ~self.b.inside(x, -tol)

    def _cut_patches(self) -> list[Patch]:
        return [p.only(lambda x, _: ~self.b.inside(x, 0.0)) for p in self.a.patches]

    def _cut_boundary(self) -> list[Patch]:
        over_a = self._probe(self.a, 1.0)
        under_a = self._probe(self.a, -1.0)
        under_b = self._probe(self.b, -1.0)
        return [
            *(p.only(lambda x, n: ~under_b(x, n)) for p in self.a.boundary.patches),
            *(
                p.only(lambda x, n: over_a(x, n) & under_a(x, n), flip=True)
                for p in self.b.boundary.patches
            ),
        ]
