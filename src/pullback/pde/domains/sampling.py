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

#: a Gauss rule of more nodes is split into panels, because its cost is quadratic
_LARGEST_GAUSS_RULE = 256


@dataclass(frozen=True)
class Points:
    """∫_Ω f ≈ Σᵢ weights[i]·f(x[i]).

    Attributes:
        x: points, (N, d).
        weights: (N,); they sum to the measure of the region.
        normals: outward unit normals on a boundary, (N, d).
        selection: which of `total_count` points these are, if they are not all.
        total_count: of all processes and chunks; 0 without a selection.
    """

    x: Tensor
    weights: Tensor
    normals: Tensor | None = None
    selection: slice | None = None
    total_count: int = 0

    def __len__(self) -> int:
        return self.x.shape[0]

    def to(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Points:
        """Return the same points in another dtype or on another device."""
        normals = self.normals
        if normals is not None:
            normals = normals.to(device=device, dtype=dtype)
        x = self.x.to(device=device, dtype=dtype)
        weights = self.weights.to(device=device, dtype=dtype)
        return replace(self, x=x, weights=weights, normals=normals)

    def share(self, rank: int, size: int) -> Points:
        """Return every `size`-th point from number `rank` on."""
        selection = slice(rank, None, size)
        normals = self.normals
        if normals is not None:
            normals = normals[selection]
        return Points(self.x[selection], self.weights[selection], normals, selection, len(self))

    def narrow(self, start: int, stop: int) -> Points:
        """Return the points of the numbers in [start, stop)."""
        chosen = slice(start, stop)
        normals = self.normals
        if normals is not None:
            normals = normals[chosen]
        total_count = self.total_count or len(self)
        numbers = range(total_count)[self.selection or slice(None)][chosen]
        selection = slice(numbers.start, numbers.stop, numbers.step)
        return Points(self.x[chosen], self.weights[chosen], normals, selection, total_count)

    def take_share_of(self, values: Tensor) -> Tensor:
        """Return the values at these points, from values at those of all processes.

        Values of another length are those at these points already.
        """
        if self.selection is None or not values.ndim or len(values) != self.total_count:
            return values
        return values[self.selection]

    @staticmethod
    def cat(parts: Sequence[Points]) -> Points:
        """Return all points together; they have normals if every part has them."""
        normals = [points.normals for points in parts if points.normals is not None]
        return Points(
            torch.cat([points.x for points in parts]),
            torch.cat([points.weights for points in parts]),
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
        """Return points in [0, 1]^dim, (n', dim), and weights (n',) that sum to 1; n' ≤ n."""

    def draw(
        self, n: int, axes: tuple[Axis, ...], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return `unit` points for a chart with these axes; without axes one point."""
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
        """Return m nodes in [0, 1] and their weights, which sum to 1."""

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.draw(n, (Axis(),) * dim, generator)

    def draw(
        self, n: int, axes: tuple[Axis, ...], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if not axes:
            return super().draw(n, axes, generator)
        if 1 < n < 2 ** len(axes):
            self.refuse(n, len(axes), 2 ** len(axes))
        return self.full(integer_root(n, len(axes)), axes)

    def refuse(self, n: int, dim: int, smallest: int) -> None:
        """Raise: n points cannot make a full grid."""
        raise PullbackError(
            f"{n} points make no full grid in {dim} dimensions",
            "there would be a single node along each axis",
            f"Use n ≥ {smallest}, or the sampler 'sobol'",
        )

    def full(self, m: int, axes: tuple[Axis, ...]) -> tuple[Tensor, Tensor]:
        """Return the grid of m nodes along each axis, (m^dim, dim), and its weights."""
        rules = [self.rule(m, axis) for axis in axes]
        nodes = torch.meshgrid(*(nodes for nodes, _ in rules), indexing="ij")
        weights = torch.meshgrid(*(weights for _, weights in rules), indexing="ij")
        return torch.stack(nodes, -1).view(-1, len(axes)), torch.stack(weights).prod(0).view(-1)


class Grid(Product):
    """Equally spaced points: the midpoint rule, of second order.

    Midpoints lie inside and have equal weights.
    """

    def rule(self, m: int, axis: Axis) -> tuple[Tensor, Tensor]:
        return with_equal_weights((torch.arange(m, dtype=torch.float64) + 0.5) / m)


class Gauss(Product):
    """Tensor Gauss–Legendre: m nodes along an axis are exact for polynomials of degree 2m − 1.

    A radius gets the Gauss–Jacobi rule of its weight r^(d−1), an angle equally spaced nodes, so
    balls are as accurate as boxes. More than 256 nodes along an axis are split into panels.
    """

    def rule(self, m: int, axis: Axis) -> tuple[Tensor, Tensor]:
        if axis.periodic:
            return Grid().rule(m, axis)
        panels = 1
        if axis.power == 1:
            panels = -(-m // _LARGEST_GAUSS_RULE)
        nodes = []
        weights = []
        for i in range(panels):
            size = m // panels + (i < m % panels)
            panel_nodes, panel_weights = gauss_jacobi(size, axis.power)
            nodes.append((i + panel_nodes) / panels)
            weights.append(panel_weights / panels)
        return torch.cat(nodes) ** axis.power, torch.cat(weights)


class Uniform(Sampler):
    """Independent uniform points."""

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return with_equal_weights(torch.rand(n, dim, generator=generator, dtype=torch.float64))


class LatinHypercube(Sampler):
    """One point in each of the n slices along every axis."""

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        cells = torch.rand(n, dim, generator=generator, dtype=torch.float64).argsort(0)
        jitter = torch.rand(n, dim, generator=generator, dtype=torch.float64)
        return with_equal_weights((cells + jitter) / n)


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
        return with_equal_weights(points + 2.0**-31)


SAMPLERS: dict[str, type[Sampler]] = {
    "sobol": Sobol,
    "grid": Grid,
    "gauss": Gauss,
    "uniform": Uniform,
    "lhs": LatinHypercube,
}


def find_sampler(sampler: str | Sampler) -> Sampler:
    """Return the sampler of this name: "sobol", "grid", "gauss", "uniform" or "lhs"."""
    if isinstance(sampler, Sampler):
        return sampler
    refuse_unknown("sampler", sampler, SAMPLERS)
    return SAMPLERS[sampler]()


def with_equal_weights(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return points with the weights 1/n."""
    return x, torch.full((len(x),), 1 / len(x), dtype=x.dtype)


def integer_root(n: int, dim: int) -> int:
    """Return the largest m with m^dim ≤ n."""
    m = round(n ** (1 / dim))
    while m**dim > n:
        m -= 1
    return m


@lru_cache(maxsize=256)
def gauss_jacobi(m: int, power: int) -> tuple[Tensor, Tensor]:
    """Return m nodes and weights of the Gauss rule for ∫₀¹ f(r) power·r^(power−1) dr."""
    rule = scipy.special.roots_jacobi(m, 0.0, power - 1.0)
    nodes = torch.from_numpy(np.asarray(rule[0], dtype=np.float64))
    weights = torch.from_numpy(np.asarray(rule[1], dtype=np.float64))
    return (nodes + 1) / 2, weights / weights.sum()
