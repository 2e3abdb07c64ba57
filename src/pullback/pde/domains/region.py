"""Regions: what points are drawn from. Parts of domains, measured points, pairs of faces."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..arguments import check_count, check_names, check_points, check_seed, index_of, require
from .patch import Patch, draw_points, drop_empty, place_quadrature
from .sampling import Points, Sampler, find_sampler

Predicate = Callable[..., Tensor]
Inside = Callable[[Tensor, float], Tensor]


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
        """Return which points (N, d) lie within `tol` of the region, (N,); tol < 0 shrinks it."""

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        """The patches that `build` returned."""
        return tuple(self.build())

    @property
    def dim(self) -> int:
        """The number d of coordinates."""
        return len(self.names)

    @property
    def point_count(self) -> int | None:
        """The number of points if they are given and cannot be drawn anew, else None."""
        return None

    @property
    def measure(self) -> float:
        """∫ 1: length, area, volume; the number of points where the region is a set of points.

        Boxes, balls, polygons and their boundaries are exact; what is cut out of them is estimated
        with a fixed Sobol sequence of 2¹⁶ points (relative error about 1e-4).
        """
        return sum(p.measure for p in self.patches)

    def sample(self, n: int, sampler: str | Sampler = "sobol", *, seed: int = 0) -> Points:
        """About n points whose weights sum to the measure; the same ones for the same seed.

        Exactly n with "sobol", "uniform" and "lhs"; "grid" and "gauss" give the largest full
        grid of at most n. A region of several parts shares n in proportion to their measures
        and puts at least one point on each; a part that is a single point (an end of an
        interval) gets just that one.
        """
        count = check_count(n)
        generator = torch.Generator().manual_seed(check_seed(seed))
        return draw_points(self.patches, count, find_sampler(sampler), generator)

    def sample_sites(
        self, n: int, sampler: str | Sampler = "sobol", *, seed: int = 0
    ) -> tuple[Points, ...]:
        """Return the points of `sample` as the only site of a condition; pairs have two."""
        return (self.sample(n, sampler, seed=seed),)

    def quadrature(self, n: int = 10_000) -> Points:
        """Fixed points for measuring errors: tensor Gauss up to three dimensions, else Sobol.

        Where a part of a shape is cut off the integrand jumps, so there it is Sobol too, with a
        relative error of about 1e-4 at the default n.
        """
        return place_quadrature(self.patches, check_count(n))

    def contains(self, x: Tensor, tol: float | None = None) -> Tensor:
        """Return which of the points (N, d) lie in the closed region, (N,) bool.

        Args:
            x: the points.
            tol: the distance still counted as inside, along an axis; unless given 1e-9 (1e-6
                below float64) of the region's largest extent or coordinate.
        """
        points = check_points(x, self.dim)
        if tol is None:
            sizes = torch.stack([self.high - self.low, self.low.abs(), self.high.abs()])
            tol = float(sizes.max()) * (1e-9 if x.dtype == torch.float64 else 1e-6)
        return self.inside(points, tol).to(x.device)

    def where(self, predicate: Predicate) -> Region:
        """The part of the region where `predicate(x)`, (N, d) ↦ (N,) bool, is true.

        A predicate of several arguments gets coordinates by name: `lambda x, y: x + y < 1`.

        Its measure is the accepted share of this region's, estimated on a fixed Sobol sequence.
        """
        return PatchRegion(
            self.names,
            drop_empty(
                [
                    p.only(lambda x, _: evaluate_mask(predicate, x, self.names))
                    for p in self.patches
                ],
                "The part of a region for which the predicate is true",
            ),
            self.low,
            self.high,
            lambda x, tol: self.inside(x, tol) & evaluate_mask(predicate, x, self.names),
        )

    def __or__(self, other: Region) -> Region:
        """Both parts, such as two faces of a box; a condition weighs twice where they overlap."""
        if not isinstance(other, Region):
            return NotImplemented
        if self.names != other.names:
            raise PullbackError(
                "The parts have different coordinates",
                f"got ({', '.join(self.names)}) and ({', '.join(other.names)})",
                "Join parts of one domain",
            )
        return PatchRegion(
            self.names,
            [*self.patches, *other.patches],
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            lambda x, tol: self.inside(x, tol) | other.inside(x, tol),
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
        self.names = names
        self.low = low
        self.high = high
        self._patches = tuple(patches)
        self._inside = inside

    def build(self) -> Sequence[Patch]:
        return self._patches

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return self._inside(x, tol)

    def __repr__(self) -> str:
        return f"<part of ({', '.join(self.names)}), measure {self.measure:.6g}>"


class PointSet(Region):
    """Given points x with weights that sum to 1, such as the places of measurements.

    Args:
        x: (N, d), or (N,) in one dimension.
        names: of the coordinates.
        weights: (N,), nonnegative; they are divided by their sum. Equal unless given.
    """

    def __init__(
        self, x: Tensor, names: Sequence[str] | None = None, weights: Tensor | None = None
    ) -> None:
        if isinstance(x, Tensor) and x.ndim == 1:
            x = x[:, None]
        if isinstance(x, Tensor) and x.ndim == 2:
            dim = x.shape[1]
        else:
            dim = len(names or "x")
        self.x = check_points(x, dim)
        if self.x.numel() == 0 or not self.x.isfinite().all():
            raise PullbackError(
                "PointSet needs points",
                f"got shape {tuple(self.x.shape)}" + " with non-finite entries" * bool(x.numel()),
                "Pass a finite tensor of shape (N, d) with N ≥ 1",
            )
        self.names = check_names(names, dim)
        self.weights = _weights(weights, len(self.x))
        self.low = self.x.amin(0)
        self.high = self.x.amax(0)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def point_count(self) -> int | None:
        return len(self)

    @property
    def measure(self) -> float:
        return float(self.weights.sum())

    def build(self) -> Sequence[Patch]:
        return tuple(
            Patch((), float(w), lambda u, x=x: (x.expand(len(u), -1), None))
            for x, w in zip(self.x, self.weights, strict=True)
        )

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return torch.cdist(x, self.x, p=torch.inf).amin(1) <= tol

    def sample(
        self, n: int | None = None, sampler: str | Sampler = "sobol", *, seed: int = 0
    ) -> Points:
        """All points; n must be their number, or None."""
        find_sampler(sampler)
        check_seed(seed)
        if n is not None and check_count(n) != len(self):
            raise PullbackError(
                f"{n} points were asked of a set of {len(self)}",
                "measured points cannot be drawn anew",
                f"Use n={len(self)} or n=None, or build PointSet from a part of them",
            )
        return Points(self.x, self.weights)

    def quadrature(self, n: int | None = None) -> Points:
        """All points, whatever n is."""
        return Points(self.x, self.weights)

    def where(self, predicate: Predicate) -> PointSet:
        chosen = evaluate_mask(predicate, self.x, self.names)
        if not chosen.any():
            raise PullbackError(
                "No point of the set is left", "the predicate is false on all", "Change it"
            )
        subset = PointSet(self.x[chosen], self.names)
        subset.weights = self.weights[chosen]  # the measure is the accepted share
        return subset

    def __repr__(self) -> str:
        return f"PointSet({len(self)} points of ({', '.join(self.names)}))"


def _weights(weights: Tensor | None, n: int) -> Tensor:
    """Nonnegative weights (N,) that sum to 1."""
    if weights is None:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    w = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    usable = w.shape == (n,) and bool(w.isfinite().all() & (w >= 0).all() & (w.sum() > 0))
    require(usable, "The tensor of weights", weights, f"Pass {n} weights ≥ 0, not all of them 0")
    return w / w.sum()


@dataclass(frozen=True)
class Pairs:
    """Points x on one face and x + (b − a)·eᵢ on the opposite one.

    Attributes:
        first, second: the faces where coordinate i is low and high.
        index: i.
    """

    first: Region
    second: Region
    index: int

    @property
    def names(self) -> tuple[str, ...]:
        """The coordinates' names."""
        return self.first.names

    @property
    def point_count(self) -> int | None:
        """None: the points are drawn."""
        return None

    def sample_sites(
        self, n: int, sampler: str | Sampler = "sobol", *, seed: int = 0
    ) -> tuple[Points, ...]:
        """Return the points of `sample` as the two sites of a condition."""
        return self.sample(n, sampler, seed=seed)

    def sample(
        self, n: int, sampler: str | Sampler = "sobol", *, seed: int = 0
    ) -> tuple[Points, Points]:
        """About n points on each face, matched in order; the normals are opposite."""
        points = self.first.sample(n, sampler, seed=seed)
        x = points.x.clone()
        x[:, self.index] = self.second.low[self.index]
        normals = None if points.normals is None else -points.normals
        return points, Points(x, points.weights, normals)


def evaluate_mask(predicate: Predicate, x: Tensor, names: Sequence[str]) -> Tensor:
    """Return predicate(x), or that of coordinates by name; raise if it is no mask of the points."""
    require(callable(predicate), "The predicate", predicate, "Pass a function (N, d) ↦ (N,) bool")
    requested = _list_required_names(predicate)
    if len(requested) > 1:
        mask = predicate(**{name: x[:, index_of(name, names)] for name in requested})
    else:
        mask = predicate(x)
    if not isinstance(mask, Tensor):
        _refuse_mask(mask, len(x))
    if mask.shape != x.shape[:1] or mask.dtype != torch.bool:
        _refuse_mask(f"shape {tuple(mask.shape)} of {mask.dtype}", len(x))
    return mask


def _list_required_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that a call must give; none for a built-in function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    return [p.name for p in required if p.kind in named_kinds]


def _refuse_mask(description: object, count: int) -> NoReturn:
    raise PullbackError(
        "where() needs a mask",
        f"for {count} points the predicate gave {description!s}",
        "Return a bool tensor of shape (N,), such as x[:, 0] > 0.5",
    )
