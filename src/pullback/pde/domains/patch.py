"""Patches: measure-preserving images of the unit cube, from which all regions are glued."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .sampling import Axis, Gauss, Points, Product, Sampler, Sobol, root

_FINE = 2**16  # points of the estimate of an accepted share; its error is about 1e-4
_CANDIDATES = 2**24  # rejection gives up beyond this many

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
        known: the share of the image that is kept, where it need not be estimated.
    """

    axes: tuple[Axis, ...]
    size: float
    place: Callable[[Tensor], Placed]
    keep: Keep | None = None
    known: float | None = None

    @cached_property
    def share(self) -> float:
        """The kept share of the image, by a fixed fine Sobol sequence."""
        if self.keep is None or self.known is not None:
            return 1.0 if self.known is None else self.known
        u, w = Sobol().draw(_FINE, self.axes, torch.Generator().manual_seed(0))
        return float(w[self.keep(*self.place(u))].sum())

    @property
    def measure(self) -> float:
        """The measure of the kept part."""
        return self.size * self.share

    def only(self, keep: Keep, *, flip: bool = False) -> Patch:
        """The part that `keep` also keeps (asked with the unflipped normals)."""
        before, place = self.keep, self.place

        def both(x: Tensor, normals: Tensor | None) -> Tensor:
            if flip and normals is not None:
                normals = -normals
            mask = keep(x, normals)
            return mask if before is None else mask & before(x, normals)

        def flipped(u: Tensor) -> Placed:
            x, normals = place(u)
            return x, None if normals is None else -normals

        return replace(self, place=flipped if flip else place, keep=both, known=None)

    def lift(self, value: float, normal: float) -> Patch:
        """The patch at a fixed value of one more coordinate, with the normal ±e of that one."""

        def place(u: Tensor) -> Placed:
            x, _ = self.place(u)
            column = torch.ones_like(x[:, :1])
            e = torch.cat([torch.zeros_like(x), normal * column], 1)
            return torch.cat([x, value * column], 1), e

        return replace(self, place=place, keep=self._lower(), known=self._known())

    def times(self, a: float, b: float) -> Patch:
        """The patch × [a, b], a further and last coordinate; normals are (n, 0)."""

        def place(u: Tensor) -> Placed:
            x, n = self.place(u[:, :-1])
            if n is not None:
                n = torch.cat([n, torch.zeros_like(n[:, :1])], 1)
            return torch.cat([x, a + (b - a) * u[:, -1:]], 1), n

        axes, size = (*self.axes, Axis()), self.size * (b - a)
        return Patch(axes, size, place, self._lower(), self._known())

    def _lower(self) -> Keep | None:
        """`keep` asked without the last coordinate; slices ask without their normals."""
        keep = self.keep
        if keep is None:
            return None
        return lambda x, n: keep(x[:, :-1], None if n is None else n[:, :-1])

    def _known(self) -> float | None:
        return None if self.keep is None else self.share

    def draw(self, n: int, sampler: Sampler, generator: torch.Generator) -> Points:
        """About n points; their weights sum to the measure."""
        if self.keep is None or not self.axes:  # a single point is kept, or has no share
            u, w = sampler.draw(n, self.axes, generator)
            x, normals = self.place(u)
            return Points(x, w * self.size, normals)
        if isinstance(sampler, Product):
            return self._grid(n, sampler, generator, self.keep)
        return self._reject(n, sampler, generator, self.keep)

    def _accept(self, u: Tensor, w: Tensor, keep: Keep, n: int | None = None) -> Points:
        """The first n kept points, with weights that sum to the measure."""
        x, normals = self.place(u)
        chosen = keep(x, normals).nonzero()[:n, 0]
        w = w[chosen]
        return Points(
            x[chosen],
            w * (self.measure / w.sum()),
            None if normals is None else normals[chosen],
        )

    def _reject(self, n: int, sampler: Sampler, generator: torch.Generator, keep: Keep) -> Points:
        """Draw the same sequence further and further until n of its points are kept."""
        start = generator.get_state()
        count = math.ceil(1.1 * n / self.share) + 16
        while True:
            generator.set_state(start)
            found = self._accept(*sampler.draw(count, self.axes, generator), keep, n)
            if len(found) == n:
                return found
            if count > _CANDIDATES:
                raise PullbackError(
                    f"Only {len(found)} of {n} points were found",
                    f"the region is {self.share:.1e} of the shape it is drawn from",
                    "Draw fewer points, or describe the region by smaller shapes",
                )
            count *= 2

    def _grid(self, n: int, sampler: Product, generator: torch.Generator, keep: Keep) -> Points:
        """The largest full grid of which 1 to n points are kept; n Sobol points if none is."""
        dim = len(self.axes)
        m = root(math.ceil(n / self.share), dim)
        if n > 1 and m < 2:
            sampler.refuse(n, dim, math.ceil(self.share * 2**dim) + 1)
        # one more node may still fit, but in many dimensions it multiplies the candidates
        for nodes in range(m + (dim <= 3), 0, -1):
            found = self._accept(*sampler.full(nodes, self.axes), keep)
            if 0 < len(found) <= n:
                return found
        return self._reject(n, Sobol(), generator, keep)


def cuboid(low: Tensor, high: Tensor) -> Patch:
    """Π [aᵢ, bᵢ] from its corners, (d,) each."""
    return Patch(
        (Axis(),) * len(low),
        math.prod((high - low).tolist()),
        lambda u: (low + (high - low) * u, None),
    )


def nonempty(patches: Sequence[Patch], what: str) -> tuple[Patch, ...]:
    """The patches of which something is kept."""
    kept = tuple(p for p in patches if p.share > 0)
    if not kept:
        raise PullbackError(
            f"{what} is empty",
            f"none of {_FINE} points spread over it belongs to it",
            "Check that the parts overlap; a region this thin wants smaller shapes",
        )
    return kept


def draw(patches: Sequence[Patch], n: int, sampler: Sampler, generator: torch.Generator) -> Points:
    """n points shared by the patches in proportion to their measures, at least one on each."""
    counts = shares(patches, n)
    if isinstance(sampler, Product):
        counts = _full(patches, counts, n, sampler)
    return Points.cat([p.draw(k, sampler, generator) for p, k in zip(patches, counts, strict=True)])


def quadrature(patches: Sequence[Patch], n: int) -> Points:
    """Gauss where a whole patch has up to three axes, else a fixed Sobol sequence."""
    parts = []
    for patch, k in zip(patches, shares(patches, n), strict=True):
        smooth = patch.share == 1.0 and len(patch.axes) <= 3
        which = Gauss() if smooth and k >= 2 ** len(patch.axes) else Sobol()
        parts.append(patch.draw(k, which, torch.Generator().manual_seed(0)))
    return Points.cat(parts)


def shares(patches: Sequence[Patch], n: int) -> list[int]:
    """n in proportion to the measures by largest remainders; single points take one each."""
    counts = [1] * len(patches)
    open_ = [i for i, p in enumerate(patches) if p.axes]
    spare = n - len(patches)
    if not open_ or spare <= 0:
        return counts
    total = sum(patches[i].measure for i in open_)
    budget = spare + len(open_)
    ideal = {i: budget * patches[i].measure / total for i in open_}
    for i in open_:
        counts[i] = max(1, math.floor(ideal[i] * (1 + 1e-12)))
    by_remainder = sorted(open_, key=lambda i: counts[i] - ideal[i])
    for i in by_remainder[: max(0, n - sum(counts))]:
        counts[i] += 1
    while sum(counts) > n:  # the ones given to tiny patches are taken from the largest
        counts[max(open_, key=lambda i: counts[i])] -= 1
    return counts


def _full(patches: Sequence[Patch], counts: list[int], n: int, sampler: Product) -> list[int]:
    """One point where a small patch's share makes no grid; refuse if the largest one's does not."""
    largest = max(patches, key=lambda p: p.measure)
    dim = len(largest.axes)
    if len(patches) == 1 or dim < 2:
        return counts
    total = sum(p.measure for p in patches)
    smallest = math.ceil(2**dim * total / largest.measure * (1 - 1e-12))
    if len(patches) < n < smallest:
        sampler.refuse(n, dim, smallest)
    return [k if k >= 2**dim else 1 for k in counts]
