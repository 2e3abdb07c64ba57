"""Inverses of many sides together, and which of them failed: the device is asked once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.products import full_precision
from . import blocked, halves
from .sides import is_diagonal, pseudo_inverse, round_off, shifted

_LARGE = 128  # from this size on a matrix is inverted by itself on a CPU
_EXTRA = 2**35  # multiplications that it may take to fill matrices up to the size of others
_BLOCKED = 96  # from this size on matrices are inverted by panels on a GPU


@dataclass(frozen=True)
class Inverses:
    """Inverses of some sides, what became of them, and how many directions each has."""

    sides: list[Tensor]
    #: which of them could not be inverted
    failed: list[bool]
    #: directions used, per side and group; None where none was left out
    ranks: list[Tensor | None]


@dataclass(frozen=True)
class _Given:
    """What to invert: side/scale + shift·1, never formed where it can be written to a stack."""

    sides: Sequence[Tensor]
    scales: Sequence[Tensor] | None
    shifts: Sequence[Tensor] | None

    @property
    def fresh(self) -> bool:
        """Whether matrices are formed anew, and may be overwritten."""
        return self.shifts is not None

    def one(self, i: int) -> Tensor:
        """One of them."""
        out, fresh = self.sides[i], False
        if self.scales is not None:
            out, fresh = out / self.scales[i], True
        return out if self.shifts is None else shifted(out, self.shifts[i], spare=fresh)

    def stacked(self, indices: Sequence[int]) -> Tensor:
        """Several of one size."""
        if len(indices) == 1:
            return self.one(indices[0])
        return torch.cat([self.one(i) for i in indices])

    def filled(self, indices: Sequence[int]) -> Tensor:
        """Several of nearly one size, each filled up with a multiple of the identity."""
        some = [self.sides[i] for i in indices]
        counts = [len(s) for s in some]
        out = blocked.room(sum(counts), some[0].shape[-1], some[0])
        views = [
            part[:, : s.shape[-1], : s.shape[-1]]
            for part, s in zip(out.split(counts), some, strict=True)
        ]
        if self.scales is None:
            torch._foreach_copy_(views, list(some))
        else:
            for view, side, i in zip(views, some, indices, strict=True):
                torch.div(side, self.scales[i], out=view)
        if self.shifts is not None:
            shift = torch.cat([self.shifts[i] for i in indices])
            out.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
        return out


def inverses(
    sides: Sequence[Tensor],
    *,
    scales: Sequence[Tensor] | None = None,
    shifts: Sequence[Tensor] | None = None,
    singular: bool = False,
    factors: bool = False,
) -> Inverses:
    """The inverses of many sides, or of side/scale + shift·1 for each, those of a size together.

    Args:
        sides: what to invert.
        scales: a divisor of each, a number on its device.
        shifts: what is added to the diagonal of each, one number per group, (G,).
        singular: whether to invert on the range only (Moore–Penrose) where a matrix is singular to
            working precision; without it such a side has failed.
        factors: give the lower Cholesky factors of matrices instead, to solve with.
    """
    given = _Given(sides, scales, shifts)
    out: list[Tensor] = list(sides)
    told: list[tuple[list[int], list[int], Tensor]] = []
    for indices, found, good in _found(given, singular, factors):
        counts = [len(sides[i]) for i in indices]
        told.append((indices, counts, good))
        for i, inverse in zip(indices, found.split(counts), strict=True):
            n = sides[i].shape[-1]
            out[i] = inverse if is_diagonal(sides[i]) else inverse[:, :n, :n]
    failed = _failed(told, len(sides))
    ranks: list[Tensor | None] = [None] * len(sides)
    if singular:
        for i, bad in enumerate(failed):
            if bad and bool(torch.isfinite(one := given.one(i)).all()):
                out[i], ranks[i] = pseudo_inverse(one)
                failed[i] = False
    return Inverses(out, failed, ranks)


def _found(
    given: _Given, singular: bool, factors: bool
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Indices, their inverses one after the other, and which matrices are to be trusted."""
    large: dict[tuple[object, ...], list[int]] = {}
    for indices in _alike(given.sides):
        first = given.sides[indices[0]]
        if is_diagonal(first):
            yield indices, *_reciprocal(given.stacked(indices))
        elif _by_panels(first) and not factors and not singular:
            large.setdefault((first.dtype, first.device), []).extend(indices)
        else:
            spare, stack = given.fresh and not singular, given.stacked(indices)
            yield indices, *_cholesky(stack, strict=singular, factors=factors, spare=spare)
    for some in large.values():
        together = _near(given.sides, some)
        found = blocked.invert([given.filled(indices) for indices in together])
        for indices, (inverse, good) in zip(together, found, strict=True):
            yield indices, inverse, good


def _near(sides: Sequence[Tensor], indices: Sequence[int]) -> list[list[int]]:
    """Sides to be stacked, the largest first: some more flops are cheaper than more kernels."""
    sizes: dict[int, list[int]] = {}
    for i in indices:
        sizes.setdefault(blocked.padded(sides[i].shape[-1]), []).append(i)
    out: list[tuple[int, list[int]]] = []
    for size, some in sorted(sizes.items(), reverse=True):
        count = sum(len(sides[i]) for i in some)
        if out and count * (out[-1][0] ** 3 - size**3) <= _EXTRA:
            out[-1][1].extend(some)
        else:
            out.append((size, list(some)))
    return [some for _, some in out]


def _by_panels(side: Tensor) -> bool:
    """Whether many products are faster than one factorization."""
    return side.is_cuda and side.shape[-1] >= _BLOCKED


def _failed(told: Sequence[tuple[list[int], list[int], Tensor]], count: int) -> list[bool]:
    """Which sides are not good, from what is known of their matrices on a device."""
    out = [False] * count
    devices: dict[torch.device, list[tuple[list[int], list[int], Tensor]]] = {}
    for one in told:
        devices.setdefault(one[2].device, []).append(one)
    for some in devices.values():
        flags = iter(torch.cat([good for *_, good in some]).tolist())  # the one time it is waited
        for indices, counts, _ in some:
            for i, n in zip(indices, counts, strict=True):
                out[i] = not all([next(flags) for _ in range(n)])
    return out


def _alike(sides: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the sides by shape and dtype, but for the number of groups.

    LAPACK takes one matrix after the other, and larger ones leave the cache: each goes alone.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, side in enumerate(sides):
        alone = i if side.device.type == "cpu" and side.shape[-1] >= _LARGE else -1
        kind = (side.ndim, side.shape[-1], side.dtype, side.device, alone)
        groups.setdefault(kind, []).append(i)
    return list(groups.values())


def _reciprocal(side: Tensor) -> tuple[Tensor, Tensor]:
    good = (side > torch.finfo(side.dtype).tiny) & torch.isfinite(side)
    return torch.where(good, 1 / side, 0.0), good.all(-1)


def _cholesky(side: Tensor, *, strict: bool, factors: bool, spare: bool) -> tuple[Tensor, Tensor]:
    """S⁻¹ = L⁻ᵀL⁻¹, and where that is to be trusted: pivots above n·ε of their entry.

    Round-off may leave large pivots in a singular matrix whose entries differ much; a `strict`
    test looks at its condition number too. A `spare` side may be overwritten.
    """
    entries = side.diagonal(dim1=-2, dim2=-1)
    if halves.pays(side):
        entries = entries.clone()
        lower, info = halves.factorized(side if spare else side.clone())
    else:
        lower, info = torch.linalg.cholesky_ex(side)
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    floor = side.shape[-1] * torch.finfo(side.dtype).eps
    good = (info == 0) & (pivots.square() > floor * entries).all(-1)
    if lower.is_cuda or not bool(good.all()):  # a zero pivot is an error for torch
        eye = torch.eye(side.shape[-1], dtype=side.dtype, device=side.device)
        lower = torch.where(good[:, None, None], lower, eye)
    if factors:
        return lower, good
    inverse = _inverse(lower)
    if strict:
        condition = torch.linalg.matrix_norm(side) * torch.linalg.matrix_norm(inverse)
        good = good & (condition * round_off(side) < 1)
    return inverse, good


def _inverse(lower: Tensor) -> Tensor:
    """L⁻ᵀL⁻¹; on CUDA by products, which are faster there than LAPACK's way.

    It is symmetric, and read row by row: products with a part of a matrix given by its columns are
    slower on ARM by an eighth.
    """
    if not lower.is_cuda:
        return torch.cholesky_inverse(lower).mT
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    with full_precision(lower.device, 0):
        half = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
        return half.mT @ half
