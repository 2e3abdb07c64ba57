"""Intervals and boxes, and their faces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..arguments import check_bounds, check_names, index_of
from .domain import Domain
from .patch import Patch, Placed, cuboid
from .region import PatchRegion, Region
from .sampling import Axis

_SIDES = ("low", "high")


class Box(Domain):
    """Π [aᵢ, bᵢ] in any dimension.

    Its boundary is its 2d faces: the two ends in one dimension. Midpoints (the sampler "grid")
    avoid edges and corners.

    Args:
        bounds: the pairs (aᵢ, bᵢ).
        names: of the coordinates; x, y, z, or x1, ..., xd beyond three, unless given.

    >>> box = Box([(0, 1), (0, 2)])
    >>> box.measure, box.boundary.measure, len(box.sample(100))
    (2.0, 6.0, 100)
    """

    def __init__(
        self, bounds: Iterable[Sequence[float]], names: Sequence[str] | None = None
    ) -> None:
        if isinstance(bounds, Tensor):
            bounds = bounds.tolist()
        try:
            pairs = list(bounds)
        except TypeError:
            pairs = []
        if not pairs:
            raise PullbackError(
                "Box needs bounds", f"got {bounds!r}", "Pass a list of pairs [(a, b), ...]"
            )
        ends = [check_bounds(pair, f"Side {i + 1} of the box") for i, pair in enumerate(pairs)]
        self.names = check_names(names, len(ends))
        self.low, self.high = torch.tensor(ends, dtype=torch.float64).unbind(1)
        self.bounds: tuple[tuple[float, float], ...] = tuple(ends)

    def build(self) -> Sequence[Patch]:
        return (cuboid(self.low, self.high),)

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return ((x >= self.low - tol) & (x <= self.high + tol)).all(1)

    def build_boundary(self) -> Region:
        patches: list[Patch] = []
        for name in self.names:
            for side in _SIDES:
                patches += self.face(name, side).patches

        def inside(x: Tensor, tol: float) -> Tensor:
            gap = torch.minimum((x - self.low).abs(), (x - self.high).abs())
            return self.inside(x, tol) & (gap <= tol).any(1)

        return PatchRegion(self.names, patches, self.low, self.high, inside)

    def face(self, name: str | int, side: str | None = None) -> Region:
        i = index_of(name, self.names)
        if side not in _SIDES:
            raise PullbackError(
                f"There is no side {side!r}", "a coordinate has two sides", 'Use "low" or "high"'
            )
        value = self.bounds[i][_SIDES.index(side)]
        sign = -1.0 if side == "low" else 1.0
        others = [j for j in range(self.dim) if j != i]
        low = self.low[others]
        high = self.high[others]

        def place(u: Tensor) -> Placed:
            x = torch.full((len(u), self.dim), value, dtype=torch.float64)
            x[:, others] = low + (high - low) * u
            normals = torch.zeros_like(x)
            normals[:, i] = sign
            return x, normals

        def inside(x: Tensor, tol: float) -> Tensor:
            return self.inside(x, tol) & ((x[:, i] - value).abs() <= tol)

        size = math.prod(b - a for j, (a, b) in enumerate(self.bounds) if j != i)
        ends = (self.low.clone(), self.high.clone())
        for end in ends:
            end[i] = value
        return PatchRegion(self.names, [Patch((Axis(),) * len(others), size, place)], *ends, inside)

    def __repr__(self) -> str:
        return f"Box({list(self.bounds)}, names={self.names})"


class Interval(Box):
    """[a, b]; its boundary is the two ends, with measure 2 and normals ∓1.

    >>> Interval(0, 1).boundary.sample(10).x
    tensor([[0.], [1.]], dtype=torch.float64)
    """

    def __init__(self, a: float, b: float, name: str = "x") -> None:
        super().__init__([check_bounds((a, b), "The interval")], (name,))
        self.a, self.b = self.bounds[0]

    def __repr__(self) -> str:
        return f"Interval({self.a}, {self.b}, name={self.names[0]!r})"
