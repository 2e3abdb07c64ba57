"""A spatial domain over an interval of time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..arguments import check_bounds, require
from .domain import Domain
from .patch import Patch
from .region import PatchRegion, Region


class SpaceTime(Domain):
    """Ω × [t₀, t₁]; t is the last coordinate.

    `boundary` is the lateral one, ∂Ω × [t₀, t₁], with normals (n, 0); `initial` and `final` are
    the slices t = t₀ and t = t₁.

    >>> from pullback.pde.domains import Interval
    >>> domain = SpaceTime(Interval(-1, 1), (0, 3))
    >>> domain.names, domain.measure, domain.boundary.measure, domain.initial.measure
    (('x', 't'), 6.0, 6.0, 2.0)
    """

    evolves = True

    def __init__(self, space: Domain, time: Sequence[float]) -> None:
        remedy = "Pass an Interval, Box, Ball, Polygon, or a combination of these"
        require(isinstance(space, Domain), "The spatial domain", space, remedy)
        if "t" in space.names:
            raise PullbackError(
                'The coordinate name "t" is used twice',
                f"the space has the coordinates {', '.join(space.names)}",
                'Give the space other names; "t" is the time',
            )
        self.space = space
        self.time: tuple[float, float] = check_bounds(time, "The time")
        self.names = (*space.names, "t")
        self.low, self.high = self._extent(space, *self.time)

    def build(self) -> Sequence[Patch]:
        return tuple(p.times(*self.time) for p in self.space.patches)

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return self.space.inside(x[:, :-1], tol) & self._is_during(x, tol)

    def build_boundary(self) -> Region:
        return self._over(self.space.boundary)

    @cached_property
    def initial(self) -> Region:
        """The slice t = t₀."""
        return self._slice(self.time[0], -1.0)

    @cached_property
    def final(self) -> Region:
        """The slice t = t₁."""
        return self._slice(self.time[1], 1.0)

    def slab(self, a: float, b: float) -> SpaceTime:
        """The same space over [a, b]."""
        return SpaceTime(self.space, (a, b))

    def face(self, name: str | int, side: str | None = None) -> Region:
        if name == "t":
            raise PullbackError(
                "Time has no lateral face",
                "the sides t = const are slices",
                "Use .initial or .final",
            )
        return self._over(self.space.face(name, side))

    def _over(self, region: Region) -> Region:
        """A part of the space, at all times."""

        def inside(x: Tensor, tol: float) -> Tensor:
            return region.inside(x[:, :-1], tol) & self._is_during(x, tol)

        patches = [p.times(*self.time) for p in region.patches]
        return PatchRegion(self.names, patches, *self._extent(region, *self.time), inside)

    def _slice(self, t: float, normal: float) -> Region:
        def inside(x: Tensor, tol: float) -> Tensor:
            return self.space.inside(x[:, :-1], tol) & ((x[:, -1] - t).abs() <= tol)

        patches = [p.lift(t, normal) for p in self.space.patches]
        return PatchRegion(self.names, patches, *self._extent(self.space, t, t), inside)

    def _is_during(self, x: Tensor, tol: float) -> Tensor:
        return (x[:, -1] >= self.time[0] - tol) & (x[:, -1] <= self.time[1] + tol)

    @staticmethod
    def _extent(space: Region, a: float, b: float) -> tuple[Tensor, Tensor]:
        low, high = (torch.tensor([t], dtype=torch.float64) for t in (a, b))
        return torch.cat([space.low, low]), torch.cat([space.high, high])

    def __repr__(self) -> str:
        return f"SpaceTime({self.space!r}, {self.time})"
