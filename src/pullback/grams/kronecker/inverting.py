"""Inverses of many sides together, and which of them failed: the device is asked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.products import full_precision
from .sides import add, is_diagonal, pseudo_inverse, round_off, shifted

_LARGE = 128  # from this size on a matrix is inverted by itself on a CPU
_AT_ONCE = 2**25  # entries of matrices inverted at once: each takes its memory several times


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
    """A side divided by `scale`, plus `shift`; formed where it is needed only."""

    side: Tensor
    scale: Tensor | float | None
    shift: Tensor | None

    def form(self) -> Tensor:
        """Return it, in memory of its own unless it is the side itself."""
        out = self.side if self.scale is None else over_groups(self.side, self.scale)
        if self.shift is None:
            return out
        if self.shift.ndim > 1:
            return add(out, self.shift)
        return shifted(out, self.shift, spare=out is not self.side)


def over_groups(side: Tensor, by: Tensor | float) -> Tensor:
    """Divide a side by a number, or by one per group, (G,)."""
    if isinstance(by, Tensor) and by.ndim:
        by = by.view(-1, *[1] * (side.ndim - 1))
    return side / by


def inverses(
    sides: Sequence[Tensor],
    *,
    scales: Sequence[Tensor | float] | None = None,
    shifts: Sequence[Tensor] | None = None,
    singular: bool = False,
    factors: bool = False,
) -> Inverses:
    """Return the inverses of many sides, or of side/scale + shift, those of a size together.

    Args:
        sides: what to invert.
        scales: a divisor of each, a number on its device, or one per group.
        shifts: what is added to each: multiples of the identity (G,), or a side.
        singular: whether to invert on the range only (Moore–Penrose) where a matrix is singular to
            working precision; without it such a side has failed.
        factors: give the lower Cholesky factors of matrices instead, to solve with.
    """
    none = [None] * len(sides)
    given = list(map(_Shifted, sides, scales or none, shifts or none))
    out, told = list(sides), []
    for indices in _alike(given):
        counts = [len(sides[i]) for i in indices]
        some = [given[i].form() for i in indices]
        stack = some[0] if len(some) == 1 else torch.cat(some)
        step = max(1, _AT_ONCE // max(1, stack[0].numel()))
        parts = [_invert(part, singular, factors) for part in stack.split(step)]
        found, good = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        told.append((indices, counts, good))
        for i, inverse in zip(indices, found.split(counts), strict=True):
            out[i] = inverse
    failed = _failed(told, len(out))
    ranks: list[Tensor | None] = [None] * len(out)
    if singular:
        for i, bad in enumerate(failed):
            if bad and bool(torch.isfinite(one := given[i].form()).all()):
                out[i], ranks[i] = pseudo_inverse(one)
                failed[i] = False
    return Inverses(out, failed, ranks)


def _invert(stack: Tensor, singular: bool, factors: bool) -> tuple[Tensor, Tensor]:
    """Return inverses of matrices of one size, and which of them are to be trusted."""
    if is_diagonal(stack):
        return _reciprocal(stack)
    return _cholesky(stack, strict=singular, factors=factors)


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


def _alike(given: Sequence[_Shifted]) -> list[list[int]]:
    """Indices of the sides by shape and dtype, but for the number of groups."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, one in enumerate(given):
        n, device = one.side.shape[-1], one.side.device
        dims = max(t.ndim for t in (one.side, one.shift) if t is not None)
        alone = i if goes_alone(n, device) else -1
        groups.setdefault((dims, n, one.side.dtype, device, alone), []).append(i)
    return list(groups.values())


def goes_alone(n: int, device: torch.device) -> bool:
    """Whether an n×n matrix is not stacked with others.

    LAPACK takes one matrix after the other, and larger ones leave the cache.
    """
    return device.type == "cpu" and n >= _LARGE


def _reciprocal(side: Tensor) -> tuple[Tensor, Tensor]:
    good = (side > torch.finfo(side.dtype).tiny) & torch.isfinite(side)
    return torch.where(good, 1 / side, 0.0), good.all(-1)


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
