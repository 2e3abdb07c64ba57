"""Inverses of many sides together, and which of them failed: the device is asked once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.products import full_precision
from . import blocked
from .sides import add, is_diagonal, pseudo_inverse, round_off, shifted

_LARGE = 128  # from this size on a matrix is inverted by itself on a CPU
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
class _Shifted:
    """A matrix or diagonal side/scale + shift·1, formed where it is needed only."""

    side: Tensor
    scale: Tensor | float
    shift: Tensor

    def form(self) -> Tensor:
        """Return it, in memory of its own."""
        return shifted(over_groups(self.side, self.scale), self.shift, spare=True)

    def write(self, out: Tensor) -> None:
        """Form it in larger matrices that end in multiples of the identity."""
        n = self.side.shape[-1]
        over_groups(self.side, self.scale, out[:, :n, :n])
        out.diagonal(dim1=-2, dim2=-1).add_(self.shift[:, None])


def over_groups(side: Tensor, by: Tensor | float, out: Tensor | None = None) -> Tensor:
    """Divide a side by a number, or by one per group, (G,)."""
    if isinstance(by, Tensor) and by.ndim:
        by = by.view(-1, *[1] * (side.ndim - 1))
    return torch.div(side, by, out=out)


def inverses(
    sides: Sequence[Tensor],
    scales: Sequence[Tensor | float],
    shifts: Sequence[Tensor],
    *,
    singular: bool = False,
    factors: bool = False,
) -> Inverses:
    """Return the inverses of side/scale + shift for many sides, those of a size together.

    Args:
        sides: what to invert.
        scales: a divisor of each, a number on its device, or one per group.
        shifts: what is added to each: multiples of the identity (G,), or a side.
        singular: whether to invert on the range only (Moore–Penrose) where a matrix is singular to
            working precision; without it such a side has failed.
        factors: give the lower Cholesky factors of matrices instead, to solve with.
    """
    given: list[_Shifted] = []
    for side, scale, shift in zip(sides, scales, shifts, strict=True):
        if shift.ndim > 1:
            total = add(over_groups(side, scale), shift)
            given.append(_Shifted(total, 1.0, total.new_zeros(len(total))))
        else:
            given.append(_Shifted(side, scale, shift))
    out = [one.side for one in given]
    told: list[tuple[list[int], list[int], Tensor]] = []
    for indices, found, good in _invert(given, singular, factors):
        counts = [len(out[i]) for i in indices]
        told.append((indices, counts, good))
        for i, inverse in zip(indices, found.split(counts), strict=True):
            n = out[i].shape[-1]
            out[i] = inverse if is_diagonal(out[i]) else inverse[:, :n, :n]
    failed = _failed(told, len(out))
    ranks: list[Tensor | None] = [None] * len(out)
    if singular:
        for i, bad in enumerate(failed):
            if bad and bool(torch.isfinite(one := given[i].form()).all()):
                out[i], ranks[i] = pseudo_inverse(one)
                failed[i] = False
    return Inverses(out, failed, ranks)


def _invert(
    given: Sequence[_Shifted], singular: bool, factors: bool
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield indices, their inverses one after the other, and which matrices are to be trusted."""
    large: dict[tuple[object, ...], list[int]] = {}
    sides = [one.side for one in given]
    for indices in _alike(sides):
        first = sides[indices[0]]
        if _by_panels(first) and not is_diagonal(first) and not factors and not singular:
            large.setdefault((first.dtype, first.device), []).extend(indices)
            continue
        some = [given[i].form() for i in indices]
        stack = some[0] if len(some) == 1 else torch.cat(some)
        if is_diagonal(stack):
            good = (stack > torch.finfo(stack.dtype).tiny) & torch.isfinite(stack)
            yield indices, torch.where(good, 1 / stack, 0.0), good.all(-1)
        else:
            yield indices, *_cholesky(stack, strict=singular, factors=factors)
    for some in large.values():
        sizes: dict[int, list[int]] = {}
        for i in sorted(some, key=lambda i: -sides[i].shape[-1]):
            sizes.setdefault(blocked.padded(sides[i].shape[-1]), []).append(i)
        stacks = []
        for indices in sizes.values():  # matrices of nearly one size, the first of them the largest
            counts, largest = [len(sides[i]) for i in indices], sides[indices[0]]
            stacks.append(blocked.room(sum(counts), largest.shape[-1], largest))
            for part, i in zip(stacks[-1].split(counts), indices, strict=True):
                given[i].write(part)
        found = blocked.invert(stacks)
        for indices, (inverse, good) in zip(sizes.values(), found, strict=True):
            yield indices, inverse, good


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
    """Indices of the sides by shape and dtype, but for the number of groups."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, side in enumerate(sides):
        alone = i if goes_alone(side.shape[-1], side.device) else -1
        kind = (side.ndim, side.shape[-1], side.dtype, side.device, alone)
        groups.setdefault(kind, []).append(i)
    return list(groups.values())


def goes_alone(n: int, device: torch.device) -> bool:
    """Whether an n×n matrix is not stacked with others.

    LAPACK takes one matrix after the other, and larger ones leave the cache.
    """
    return device.type == "cpu" and n >= _LARGE


def _cholesky(side: Tensor, *, strict: bool, factors: bool) -> tuple[Tensor, Tensor]:
    """S⁻¹ = L⁻ᵀL⁻¹, and where that is to be trusted: pivots above n·ε of their entry.

    Round-off may leave large pivots in a singular matrix whose entries differ much; a `strict`
    test looks at its condition number too.
    """
    entries = side.diagonal(dim1=-2, dim2=-1)
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
