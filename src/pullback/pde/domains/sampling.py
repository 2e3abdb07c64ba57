"""Points with quadrature weights, and the samplers that place them in the unit cube."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from ..._core.errors import PullbackError, refuse_unknown

_PANEL = 256  # a Gauss rule of more nodes is split into panels: its cost is quadratic


@dataclass(frozen=True)
class Points:
    """∫_Ω f ≈ Σᵢ weights[i]·f(x[i]).

    Attributes:
        x: points, (N, d).
        weights: (N,); they sum to the measure of the region.
        normals: outward unit normals on a boundary, (N, d).
        part: which these are of `whole` points, where other processes have the rest.
    """

    x: Tensor
    weights: Tensor
    normals: Tensor | None = None
    part: slice | None = None
    whole: int = 0

    def __len__(self) -> int:
        return self.x.shape[0]

    def to(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Points:
        """The same points in another dtype or on another device."""
        x, w = (t.to(device=device, dtype=dtype) for t in (self.x, self.weights))
        n = self.normals
        normals = None if n is None else n.to(device=device, dtype=dtype)
        return replace(self, x=x, weights=w, normals=normals)

    def share(self, rank: int, size: int) -> Points:
        """Every `size`-th point from number `rank` on."""
        part = slice(rank, None, size)
        normals = None if self.normals is None else self.normals[part]
        return Points(self.x[part], self.weights[part], normals, part, len(self))

    def own(self, values: Tensor) -> Tensor:
        """Values at these points, from those at the whole."""
        given = self.part is not None and values.ndim and len(values) == self.whole
        return values[self.part] if given else values

    @staticmethod
    def cat(parts: Sequence[Points]) -> Points:
        """All points of the parts; normals only where every part has them."""
        normals = [p.normals for p in parts if p.normals is not None]
        return Points(
            torch.cat([p.x for p in parts]),
            torch.cat([p.weights for p in parts]),
            torch.cat(normals) if len(normals) == len(parts) else None,
        )


@dataclass(frozen=True)
class Axis:
    """What one coordinate u ∈ [0, 1] of a measure-preserving chart is like.

    Attributes:
        periodic: u = 0 and u = 1 are the same place (an angle).
        power: u = r^power with r the smooth coordinate (a radius in `power` dimensions).
    """

    periodic: bool = False
    power: int = 1


class Sampler(ABC):
    """Points in the unit cube whose weighted mean approximates the integral."""

    @abstractmethod
    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Points in [0, 1]^dim, (n', dim), and weights (n',) that sum to 1; n' ≤ n."""

    def draw(
        self, n: int, axes: tuple[Axis, ...], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """`unit` for a chart with these axes; without axes there is one point."""
        if not axes:
            return torch.zeros(1, 0, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        return self.unit(n, len(axes), generator)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Product(Sampler):
    """A full grid: the same number m of nodes along each axis, n' = m^dim ≤ n.

    m = 1 is refused unless n = 1: such a grid would throw nearly all points away.
    """

    @abstractmethod
    def rule(self, m: int, axis: Axis) -> tuple[Tensor, Tensor]:
        """m nodes in [0, 1] and their weights, which sum to 1."""

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.draw(n, (Axis(),) * dim, generator)

    def draw(
        self, n: int, axes: tuple[Axis, ...], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if not axes:
            return super().draw(n, axes, generator)
        if 1 < n < 2 ** len(axes):
            self.refuse(n, len(axes), 2 ** len(axes))
        return self.full(root(n, len(axes)), axes)

    def refuse(self, n: int, dim: int, smallest: int) -> None:
        """Raise: n points cannot make a full grid."""
        raise PullbackError(
            f"{n} points make no full grid in {dim} dimensions",
            "there would be a single node along each axis",
            f"Use n ≥ {smallest}, or the sampler 'sobol'",
        )

    def full(self, m: int, axes: tuple[Axis, ...]) -> tuple[Tensor, Tensor]:
        """The grid of m nodes along each axis, (m^dim, dim), and its weights."""
        rules = [self.rule(m, axis) for axis in axes]
        nodes = torch.meshgrid(*(nodes for nodes, _ in rules), indexing="ij")
        weights = torch.meshgrid(*(weights for _, weights in rules), indexing="ij")
        return torch.stack(nodes, -1).view(-1, len(axes)), torch.stack(weights).prod(0).view(-1)


class Grid(Product):
    """Equally spaced points: the midpoint rule, of second order.

    Midpoints lie inside and have equal weights.
    """

    def rule(self, m: int, axis: Axis) -> tuple[Tensor, Tensor]:
        return equal((torch.arange(m, dtype=torch.float64) + 0.5) / m)


class Gauss(Product):
    """Tensor Gauss–Legendre: m nodes along an axis are exact for polynomials of degree 2m − 1.

    A radius gets the Gauss–Jacobi rule of its weight r^(d−1), an angle equally spaced nodes, so
    balls are as accurate as boxes. More than 256 nodes along an axis are split into panels.
    """

    def rule(self, m: int, axis: Axis) -> tuple[Tensor, Tensor]:
        if axis.periodic:
            return Grid().rule(m, axis)
        panels = 1 if axis.power > 1 else -(-m // _PANEL)
        sizes = [m // panels + (i < m % panels) for i in range(panels)]
        rules = [jacobi(size, axis.power) for size in sizes]
        nodes = [(i + r) / panels for i, (r, _) in enumerate(rules)]
        return torch.cat(nodes) ** axis.power, torch.cat([w / panels for _, w in rules])


class Uniform(Sampler):
    """Independent uniform points."""

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return equal(torch.rand(n, dim, generator=generator, dtype=torch.float64))


class LatinHypercube(Sampler):
    """One point in each of the n slices along every axis."""

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        cells = torch.rand(n, dim, generator=generator, dtype=torch.float64).argsort(0)
        jitter = torch.rand(n, dim, generator=generator, dtype=torch.float64)
        return equal((cells + jitter) / n)


class Sobol(Sampler):
    """A scrambled Sobol sequence; best where n is a power of two."""

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if dim > SobolEngine.MAXDIM:
            raise PullbackError(
                f"There is no Sobol sequence in {dim} dimensions",
                f"its direction numbers are known up to {SobolEngine.MAXDIM}",
                "Use the sampler 'lhs' or 'uniform'",
            )
        seed = int(torch.randint(2**31, (), generator=generator))
        points = SobolEngine(dim, scramble=True, seed=seed).draw(n, dtype=torch.float64)
        # the points are multiples of 2⁻³⁰; the centers of these cells never touch a face
        return equal(points + 2.0**-31)


SAMPLERS: dict[str, type[Sampler]] = {
    "sobol": Sobol,
    "grid": Grid,
    "gauss": Gauss,
    "uniform": Uniform,
    "lhs": LatinHypercube,
}


def sampler(which: str | Sampler) -> Sampler:
    """The sampler of this name: "sobol", "grid", "gauss", "uniform" or "lhs"."""
    if isinstance(which, Sampler):
        return which
    refuse_unknown("sampler", which, SAMPLERS)
    return SAMPLERS[which]()


def equal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Points with the weights 1/n."""
    return x, torch.full((len(x),), 1 / len(x), dtype=x.dtype)


def root(n: int, dim: int) -> int:
    """The largest m with m^dim ≤ n."""
    m = round(n ** (1 / dim))
    while m**dim > n:
        m -= 1
    return m


@lru_cache(maxsize=256)
def jacobi(m: int, power: int) -> tuple[Tensor, Tensor]:
    """The Gauss rule of ∫₀¹ f(r) power·r^(power−1) dr: m nodes and weights."""
    found = scipy.special.roots_jacobi(m, 0.0, power - 1.0)
    nodes, weights = (torch.from_numpy(np.asarray(t, dtype=np.float64)) for t in found[:2])
    return (nodes + 1) / 2, weights / weights.sum()
