"""Balls in any dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import scipy
import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..arguments import check_names, check_positive, require
from .domain import Domain
from .patch import Patch, Placed
from .region import PatchRegion, Region
from .sampling import Axis


class Ball(Domain):
    """{x : ‖x − c‖ ≤ R} in any dimension, and its sphere as the boundary.

    Points are images of the unit cube under x = c + R u₁^(1/d) ω(u₂, ..., u_d), which keeps
    volumes, so every sampler spreads them evenly.

    Args:
        center: c, (d,).
        radius: R > 0.
        names: of the coordinates.

    >>> round(Ball((0, 0, 0), 2.0).measure, 3)
    33.51
    """

    def __init__(
        self,
        center: Sequence[float] | Tensor,
        radius: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> None:
        c = torch.as_tensor(center, dtype=torch.float64).detach().cpu()
        point = c.ndim == 1 and len(c) > 0 and bool(c.isfinite().all())
        require(point, "A ball's center", center, "Pass finite coordinates, such as (0.0, 0.0)")
        self.center = c
        self.radius = check_positive("A ball's radius", radius)
        self.names = check_names(names, len(c))
        self.low = c - self.radius
        self.high = c + self.radius

    def build(self) -> Sequence[Patch]:
        d = self.dim
        size = math.exp(d / 2 * math.log(math.pi) - math.lgamma(d / 2 + 1)) * self.radius**d

        def place(u: Tensor) -> Placed:
            if d == 1:
                return self.center + self.radius * (2 * u - 1), None
            r = self.radius * u[:, :1] ** (1 / d)
            return self.center + r * direction(u[:, 1:]), None

        axes: tuple[Axis, ...] = (Axis(),)
        if d > 1:
            axes = (Axis(power=d), *_angles(d))
        return (Patch(axes, size, place),)

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return (x - self.center).norm(dim=1) <= self.radius + tol

    def build_boundary(self) -> Region:
        def inside(x: Tensor, tol: float) -> Tensor:
            return ((x - self.center).norm(dim=1) - self.radius).abs() <= tol

        return PatchRegion(self.names, self._sphere(), self.low, self.high, inside)

    def _sphere(self) -> list[Patch]:
        """Return the sphere as one patch; in one dimension the two ends."""
        if self.dim == 1:
            return [self._end(-1.0), self._end(1.0)]

        def place(u: Tensor) -> Placed:
            normals = direction(u)
            return self.center + self.radius * normals, normals

        size = self.measure * self.dim / self.radius
        return [Patch(_angles(self.dim), size, place)]

    def _end(self, normal: float) -> Patch:
        """Return an end of an interval, with its outward normal ±1."""

        def place(u: Tensor) -> Placed:
            normals = torch.full((len(u), 1), normal, dtype=u.dtype)
            return self.center + self.radius * normals, normals

        return Patch((), 1.0, place)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.center.tolist()}, {self.radius})"


class Disk(Ball):
    """The ball in two dimensions."""

    def __init__(
        self,
        center: Sequence[float] | Tensor = (0.0, 0.0),
        radius: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(center, radius, names)
        if self.dim != 2:
            raise PullbackError(
                "A disk lies in the plane",
                f"its center has {self.dim} coordinates",
                "Use Ball in other dimensions",
            )


def direction(u: Tensor) -> Tensor:
    """Return uniform unit vectors ω ∈ S^(d−1), (N, d), from u ∈ [0, 1]^(d−1).

    Coordinate by coordinate: ω₁ = t has the density ∝ (1 − t²)^((d−3)/2), that is
    (1 + t)/2 ~ Beta(a, a) with a = (d−1)/2, and the others are √(1 − t²) times a point of
    S^(d−2); the last two are a cosine and a sine.
    """
    d = u.shape[1] + 1
    radius = torch.ones(len(u), dtype=u.dtype)  # of the remaining coordinates
    columns = []
    for i in range(d - 2):
        half = u[:, i]
        a = (d - 1 - i) / 2
        if a != 1:
            half = torch.from_numpy(scipy.special.betaincinv(a, a, half.numpy()))
        columns.append(radius * (2 * half - 1))
        radius = radius * 2 * (half * (1 - half)).clamp_min(0).sqrt()  # √(1 − t²)
    angle = 2 * math.pi * u[:, -1]
    omega = torch.stack([*columns, radius * angle.cos(), radius * angle.sin()], 1)
    return omega / omega.norm(dim=1, keepdim=True)


def _angles(d: int) -> tuple[Axis, ...]:
    """Return the axes of S^(d−1), d ≥ 2."""
    return (Axis(),) * (d - 2) + (Axis(periodic=True),)
