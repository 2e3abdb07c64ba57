"""Patches: measure-preserving images of the unit cube, from which all regions are glued."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .sampling import Axis, Gauss, Points, Product, Sampler, Sobol, integer_root

#: Sobol points with which the accepted share of a patch is estimated; the error is about 1e-4
_SHARE_POINTS = 2**16
#: points beyond which rejection sampling gives up
_MOST_CANDIDATES = 2**24

Placed = tuple[Tensor, Tensor | None]
Keep = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Patch:
    """{place(u) : u ∈ [0, 1]^k, keep(place(u))}, with du · size the surface or volume element.

    Attributes:
        axes: the k coordinates; none for a single point.
        size: the measure of the whole image.
        place: u (N, k), k ≥ 0, ↦ points (N, d), and their normals (N, d) on a boundary.
        keep: points and normals ↦ mask (N,) of those that belong to the patch; None keeps all.
        known_share: of the image that is kept, where it need not be estimated.
    """

    axes: tuple[Axis, ...]
    size: float
    place: Callable[[Tensor], Placed]
    keep: Keep | None = None
    known_share: float | None = None

    @cached_property
    def share(self) -> float:
        """The kept share of the image, by a fixed fine Sobol sequence."""
        if self.known_share is not None:
            return self.known_share
        if self.keep is None:
            return 1.0
        u, w = Sobol().draw(_SHARE_POINTS, self.axes, torch.Generator().manual_seed(0))
        return float(w[self.keep(*self.place(u))].sum())

    @property
    def measure(self) -> float:
        """The measure of the kept part."""
        return self.size * self.share

    def only(self, keep: Keep, *, flip: bool = False) -> Patch:
        """Return the part that `keep` keeps as well, and with `flip` opposite normals.

        `keep` is asked with the normals as they were before.
        """
        previous_keep = self.keep

        def keep_both(x: Tensor, normals: Tensor | None) -> Tensor:
            if flip and normals is not None:
                normals = -normals
            mask = keep(x, normals)
            if previous_keep is None:
                return mask
            return mask & previous_keep(x, normals)

        def place_flipped(u: Tensor) -> Placed:
            x, normals = self.place(u)
            if normals is None:
                return x, None
            return x, -normals

        place = place_flipped if flip else self.place
        return replace(self, place=place, keep=keep_both, known_share=None)

    def lift(self, value: float, normal: float) -> Patch:
        """Return the patch at a value of one more coordinate, with the normal ±e of that one."""

        def place(u: Tensor) -> Placed:
            x, _ = self.place(u)
            column = torch.ones_like(x[:, :1])
            e = torch.cat([torch.zeros_like(x), normal * column], 1)
            return torch.cat([x, value * column], 1), e

        return replace(
            self,
            place=place,
            keep=self._keep_by_first_coordinates(),
            known_share=self._share_if_cut(),
        )

    def times(self, a: float, b: float) -> Patch:
        """Return the patch × [a, b], a further and last coordinate; normals are (n, 0)."""

        def place(u: Tensor) -> Placed:
            x, n = self.place(u[:, :-1])
            if n is not None:
                n = torch.cat([n, torch.zeros_like(n[:, :1])], 1)
            return torch.cat([x, a + (b - a) * u[:, -1:]], 1), n

        axes = (*self.axes, Axis())
        size = self.size * (b - a)
        return Patch(axes, size, place, self._keep_by_first_coordinates(), self._share_if_cut())

    def _keep_by_first_coordinates(self) -> Keep | None:
        """Return `keep` as a function of points with one more coordinate."""
        keep = self.keep
        if keep is None:
            return None

        def keep_below(x: Tensor, normals: Tensor | None) -> Tensor:
            if normals is not None:
                normals = normals[:, :-1]
            return keep(x[:, :-1], normals)

        return keep_below

    def _share_if_cut(self) -> float | None:
        """Return the share if something is cut off, so that it is not estimated again."""
        if self.keep is None:
            return None
        return self.share

    def draw(self, n: int, sampler: Sampler, generator: torch.Generator) -> Points:
        """Return about n points; their weights sum to the measure."""
        if self.keep is None or not self.axes:  # a single point is kept, or has no share
            u, w = sampler.draw(n, self.axes, generator)
            x, normals = self.place(u)
            return Points(x, w * self.size, normals)
        if isinstance(sampler, Product):
            return self._draw_grid(n, sampler, generator, self.keep)
        return self._draw_by_rejection(n, sampler, generator, self.keep)

    def _accept(self, u: Tensor, w: Tensor, keep: Keep, n: int | None = None) -> Points:
        """Return the first n kept points, with weights that sum to the measure."""
        x, normals = self.place(u)
        chosen = keep(x, normals).nonzero()[:n, 0]
        w = w[chosen]
        if normals is not None:
            normals = normals[chosen]
        return Points(x[chosen], w * (self.measure / w.sum()), normals)

    def _draw_by_rejection(
        self, n: int, sampler: Sampler, generator: torch.Generator, keep: Keep
    ) -> Points:
        """Return the first n points of a sequence that are kept."""
        start = generator.get_state()
        count = math.ceil(1.1 * n / self.share) + 16
        while True:
            generator.set_state(start)
            u, w = sampler.draw(count, self.axes, generator)
            points = self._accept(u, w, keep, n)
            if len(points) == n:
                return points
            if count > _MOST_CANDIDATES:
                raise PullbackError(
                    f"Only {len(points)} of {n} points were found",
                    f"the region is {self.share:.1e} of the shape it is drawn from",
                    "Draw fewer points, or describe the region by smaller shapes",
                )
            count *= 2

    def _draw_grid(
        self, n: int, sampler: Product, generator: torch.Generator, keep: Keep
    ) -> Points:
        """Return the largest full grid of which 1 to n points are kept; else n Sobol points."""
        dim = len(self.axes)
        m = integer_root(math.ceil(n / self.share), dim)
        if n > 1 and m < 2:
            sampler.refuse(n, dim, math.ceil(self.share * 2**dim) + 1)
        # one more node may still fit, but in many dimensions it multiplies the candidates
        for nodes in range(m + (dim <= 3), 0, -1):
            u, w = sampler.full(nodes, self.axes)
            points = self._accept(u, w, keep)
            if 0 < len(points) <= n:
                return points
        return self._draw_by_rejection(n, Sobol(), generator, keep)


def cuboid(low: Tensor, high: Tensor) -> Patch:
    """Return Π [aᵢ, bᵢ] from its corners, (d,) each."""
    return Patch(
        (Axis(),) * len(low),
        math.prod((high - low).tolist()),
        lambda u: (low + (high - low) * u, None),
    )


def drop_empty(patches: Sequence[Patch], what: str) -> tuple[Patch, ...]:
    """Return the patches of which something is kept; raise if there are none."""
    nonempty = tuple(patch for patch in patches if patch.share > 0)
    if not nonempty:
        raise PullbackError(
            f"{what} is empty",
            f"none of {_SHARE_POINTS} points spread over it belongs to it",
            "Check that the parts overlap; a region this thin wants smaller shapes",
        )
    return nonempty


def draw_points(
    patches: Sequence[Patch], n: int, sampler: Sampler, generator: torch.Generator
) -> Points:
    """Return n points in proportion to the measures of patches, at least one on each."""
    counts = allot_points(patches, n)
    if isinstance(sampler, Product):
        counts = _round_to_grids(patches, counts, n, sampler)
    drawn = [
        patch.draw(count, sampler, generator) for patch, count in zip(patches, counts, strict=True)
    ]
    return Points.cat(drawn)


def place_quadrature(patches: Sequence[Patch], n: int) -> Points:
    """Return Gauss points on whole patches of up to three axes, else fixed Sobol points."""
    drawn = []
    for patch, count in zip(patches, allot_points(patches, n), strict=True):
        dim = len(patch.axes)
        is_smooth = patch.share == 1.0 and dim <= 3
        sampler: Sampler = Sobol()
        if is_smooth and count >= 2**dim:
            sampler = Gauss()
        drawn.append(patch.draw(count, sampler, torch.Generator().manual_seed(0)))
    return Points.cat(drawn)


def allot_points(patches: Sequence[Patch], n: int) -> list[int]:
    """Return how many of n points each patch gets, in proportion to the measures.

    Remainders are rounded; a patch that is a single point gets one.
    """
    counts = [1] * len(patches)
    extended = [i for i, patch in enumerate(patches) if patch.axes]  # no single points
    spare = n - len(patches)
    if not extended or spare <= 0:
        return counts
    total = sum(patches[i].measure for i in extended)
    budget = spare + len(extended)
    ideal = {i: budget * patches[i].measure / total for i in extended}
    for i in extended:
        counts[i] = max(1, math.floor(ideal[i] * (1 + 1e-12)))
    by_remainder = sorted(extended, key=lambda i: counts[i] - ideal[i])
    for i in by_remainder[: max(0, n - sum(counts))]:
        counts[i] += 1
    while sum(counts) > n:  # the ones given to tiny patches are taken from the largest
        counts[max(extended, key=lambda i: counts[i])] -= 1
    return counts


def _round_to_grids(
    patches: Sequence[Patch], counts: list[int], n: int, sampler: Product
) -> list[int]:
    """Return the counts with one point where a small patch has too few for a grid.

    Raise if the largest patch has too few.
    """
    largest = max(patches, key=lambda p: p.measure)
    dim = len(largest.axes)
    if len(patches) == 1 or dim < 2:
        return counts
    total = sum(p.measure for p in patches)
    smallest = math.ceil(2**dim * total / largest.measure * (1 - 1e-12))
    if len(patches) < n < smallest:
        sampler.refuse(n, dim, smallest)
    return [k if k >= 2**dim else 1 for k in counts]
