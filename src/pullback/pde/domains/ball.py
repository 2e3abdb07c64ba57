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
        self.center, self.radius = c, check_positive("A ball's radius", radius)
        self.names = check_names(names, len(c))
        self.low, self.high = c - self.radius, c + self.radius

    def build(self) -> Sequence[Patch]:
        d = self.dim
        size = math.exp(d / 2 * math.log(math.pi) - math.lgamma(d / 2 + 1)) * self.radius**d

        def place(u: Tensor) -> Placed:
            if d == 1:
                return self.center + self.radius * (2 * u - 1), None
            r = self.radius * u[:, :1] ** (1 / d)
            return self.center + r * direction(u[:, 1:]), None

        axes = (Axis(),) if d == 1 else (Axis(power=d), *_angles(d))
        return (Patch(axes, size, place),)

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return (x - self.center).norm(dim=1) <= self.radius + tol

    def build_boundary(self) -> Region:
        def inside(x: Tensor, tol: float) -> Tensor:
            return ((x - self.center).norm(dim=1) - self.radius).abs() <= tol

        return PatchRegion(self.names, self._sphere(), self.low, self.high, inside)

    def _sphere(self) -> list[Patch]:
        """The sphere as one patch; in one dimension the two ends."""

        def on(omega: Tensor) -> Placed:
            return self.center + self.radius * omega, omega

        if self.dim == 1:
            ends = (-1.0, 1.0)
            ones = [lambda u, e=e: on(torch.full((len(u), 1), e, dtype=u.dtype)) for e in ends]
            return [Patch((), 1.0, place) for place in ones]
        size = self.measure * self.dim / self.radius
        return [Patch(_angles(self.dim), size, lambda u: on(direction(u)))]

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
    """Uniform unit vectors ω ∈ S^(d−1), (N, d), from u ∈ [0, 1]^(d−1).

    Coordinate by coordinate: ω₁ = t has the density ∝ (1 − t²)^((d−3)/2), that is
    (1 + t)/2 ~ Beta(a, a) with a = (d−1)/2, and the others are √(1 − t²) times a point of
    S^(d−2); the last two are a cosine and a sine.
    """
    d = u.shape[1] + 1
    rest = torch.ones(len(u), dtype=u.dtype)
    columns = []
    for i in range(d - 2):
        v, a = u[:, i], (d - 1 - i) / 2
        half = v if a == 1 else torch.from_numpy(scipy.special.betaincinv(a, a, v.numpy()))
        columns.append(rest * (2 * half - 1))
        rest = rest * 2 * (half * (1 - half)).clamp_min(0).sqrt()  # √(1 − t²)
    angle = 2 * math.pi * u[:, -1]
    omega = torch.stack([*columns, rest * angle.cos(), rest * angle.sin()], 1)
    return omega / omega.norm(dim=1, keepdim=True)


def _angles(d: int) -> tuple[Axis, ...]:
    """The axes of S^(d−1), d ≥ 2."""
    return (Axis(),) * (d - 2) + (Axis(periodic=True),)
