"""Inverses of many Kronecker factors together, and which of them failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor

from ..._core.products import full_precision
from . import factor_matrix, panel_inverse


@dataclass(frozen=True)
class _StackLimits:
    """How many matrices are inverted at once."""

    #: rows from which on a CPU takes matrices one by one: LAPACK does so anyway, and stacks of
    #: larger ones leave the cache
    large_on_cpu: int = 128
    #: entries of the matrices that are factorized at once: 128 MiB in float32, four times that
    #: with the temporaries, which is little beside a model whose factors are as large
    entries_at_once: int = 2**25


_LIMITS = _StackLimits()


@dataclass(frozen=True)
class FactorInverses:
    """The inverses of factors, and what became of each."""

    #: inverses in the form of their factors, or lower Cholesky factors
    matrices: list[Tensor]
    #: which factors could not be inverted
    failed: list[bool]
    #: directions used, per factor and group; None where none was left out
    ranks: list[Tensor | None]

    def __getitem__(self, indices: slice) -> FactorInverses:
        return FactorInverses(self.matrices[indices], self.failed[indices], self.ranks[indices])


@dataclass(frozen=True)
class _DampedFactor:
    """factor/divisor + shift·1, which takes memory only when it is inverted."""

    factor: Tensor
    divisor: Tensor | float
    shift: Tensor

    @classmethod
    def of(cls, factor: Tensor, divisor: Tensor | float, shift: Tensor) -> _DampedFactor:
        """With a shift of one number per group, (G,), or with a shift that is a factor itself."""
        if shift.ndim == 1:
            return cls(factor, divisor, shift)
        total = factor_matrix.add(divide_groups(factor, divisor), shift)
        return cls(total, 1.0, total.new_zeros(len(total)))

    def materialize(self, out: Tensor | None = None) -> Tensor:
        """Return factor/divisor + shift·1 as a factor in memory of its own, or in `out`."""
        divided = divide_groups(self.factor, self.divisor, out)
        if factor_matrix.is_diagonal(divided):
            return divided.add_(self.shift[:, None])
        return factor_matrix.add_identity(divided, self.shift, overwrite=True)


@dataclass(frozen=True)
class _InverseStack:
    """Inverses of factors of one shape, one after the other along the first axis."""

    #: which factors they belong to
    indices: list[int]
    #: the number of groups of each
    group_counts: list[int]
    matrices: Tensor
    #: whether each matrix's inverse can be trusted, on its device
    is_trusted: Tensor


def divide_groups(factor: Tensor, divisor: Tensor | float, out: Tensor | None = None) -> Tensor:
    """Divide a factor by a number, or by one per group, (G,); `out` takes the result."""
    if isinstance(divisor, Tensor) and divisor.ndim:
        divisor = factor_matrix.per_group(divisor, factor)
    return torch.div(factor, divisor, out=out)


def invert_factors(
    factors: Sequence[Tensor],
    divisors: Sequence[Tensor | float],
    shifts: Sequence[Tensor],
    *,
    singular: bool = False,
    as_cholesky: bool = False,
) -> FactorInverses:
    """Return the inverses of factor/divisor + shift for many factors, those of a size together.

    The device is waited for once, to learn which inverses failed.

    Args:
        factors: matrices (G, n, n) or diagonals (G, n).
        divisors: of each, a number on its device, or one per group.
        shifts: what is added to each: multiples of the identity (G,), or a factor.
        singular: whether to invert on the range only (Moore–Penrose) where a matrix is singular to
            working precision; without it such a factor has failed.
        as_cholesky: give the lower Cholesky factors of matrices instead, to solve with.
    """
    damped = list(starmap(_DampedFactor.of, zip(factors, divisors, shifts, strict=True)))
    if singular or as_cholesky:
        groups = _group_by_shape([damped_factor.factor for damped_factor in damped])
        stacks = [_invert_stack(damped, indices, singular, as_cholesky) for indices in groups]
    else:
        stacks = _invert_by_size(damped)
    matrices = [damped_factor.factor for damped_factor in damped]
    for stack in stacks:
        for i, matrix in zip(stack.indices, stack.matrices.split(stack.group_counts), strict=True):
            matrices[i] = matrix
    failed = _find_failed(stacks, len(damped))
    inverses = FactorInverses(matrices, failed, [None] * len(damped))
    if singular:
        _invert_failed_on_range(inverses, damped)
    return inverses


def _invert_by_size(damped: Sequence[_DampedFactor]) -> list[_InverseStack]:
    """Invert factors by a factorization, or by products of panels where those are faster."""
    stacks: list[_InverseStack] = []
    with_panels: dict[torch.dtype, list[list[int]]] = {}
    for indices in _group_by_shape([damped_factor.factor for damped_factor in damped]):
        factor = damped[indices[0]].factor
        if _has_panels(factor):
            with_panels.setdefault(factor.dtype, []).append(indices)
        else:
            stacks.append(_invert_stack(damped, indices, strict=False, as_cholesky=False))
    for groups in with_panels.values():
        stacks += _invert_by_panels(damped, groups)
    return stacks


def _invert_failed_on_range(inverses: FactorInverses, damped: Sequence[_DampedFactor]) -> None:
    """Replace failed inverses of finite factors by pseudo-inverses, in place."""
    for i, damped_factor in enumerate(damped):
        if not inverses.failed[i]:
            continue
        formed = damped_factor.materialize()
        if bool(torch.isfinite(formed).all()):
            inverses.matrices[i], inverses.ranks[i] = factor_matrix.pseudo_inverse(formed)
            inverses.failed[i] = False


def _group_by_shape(factors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the factors by shape and dtype, but for the number of groups."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, factor in enumerate(factors):
        shape = (factor.ndim, factor.shape[-1], factor.dtype, factor.device)
        if is_inverted_alone(factor.shape[-1], factor.device):
            shape = (*shape, i)  # a group of its own
        groups.setdefault(shape, []).append(i)
    return list(groups.values())


def is_inverted_alone(n: int, device: torch.device) -> bool:
    """Return True if an n×n matrix is not stacked with others."""
    return device.type == "cpu" and n >= _LIMITS.large_on_cpu


def _has_panels(factor: Tensor) -> bool:
    """Return True if many products are faster than one factorization: large matrices on a GPU."""
    if factor_matrix.is_diagonal(factor) or not factor.is_cuda:
        return False
    return factor.shape[-1] >= panel_inverse.SIZES.least_rows


def _invert_by_panels(
    damped: Sequence[_DampedFactor], groups: Sequence[list[int]]
) -> list[_InverseStack]:
    """Invert groups of factors, each group of one shape, all together."""
    padded_stacks: list[Tensor] = []
    group_counts: list[list[int]] = []
    for indices in groups:
        factors = [damped[i].factor for i in indices]
        counts = [len(factor) for factor in factors]
        n = factors[0].shape[-1]
        padded = panel_inverse.allocate_padded(sum(counts), n, factors[0])
        for i, piece in zip(indices, padded.split(counts), strict=True):
            damped[i].materialize(out=piece[:, :n, :n])
        padded_stacks.append(padded)
        group_counts.append(counts)
    stacks: list[_InverseStack] = []
    inverses = panel_inverse.invert_by_panels(padded_stacks)
    for indices, counts, inverse in zip(groups, group_counts, inverses, strict=True):
        n = damped[indices[0]].factor.shape[-1]
        corner = inverse.matrices[:, :n, :n]
        stacks.append(_InverseStack(indices, counts, corner, inverse.is_trusted))
    return stacks


def _invert_stack(
    damped: Sequence[_DampedFactor], indices: list[int], strict: bool, as_cholesky: bool
) -> _InverseStack:
    """Invert factors of one shape together, in memory of their own."""
    factors = [damped[i].factor for i in indices]
    group_counts = [len(factor) for factor in factors]
    stack = factors[0].new_empty(sum(group_counts), *factors[0].shape[1:])
    for i, piece in zip(indices, stack.split(group_counts), strict=True):
        damped[i].materialize(out=piece)
    if factor_matrix.is_diagonal(stack):
        is_positive = (stack > torch.finfo(stack.dtype).tiny) & torch.isfinite(stack)
        stack = torch.where(is_positive, 1 / stack, 0.0)
        return _InverseStack(indices, group_counts, stack, is_positive.all(-1))
    trusted = []
    at_once = max(1, _LIMITS.entries_at_once // stack.shape[-1] ** 2)
    for piece in stack.split(at_once):
        inverse, is_trusted = _invert_matrices(piece, strict=strict, as_cholesky=as_cholesky)
        piece.copy_(inverse)
        trusted.append(is_trusted)
    return _InverseStack(indices, group_counts, stack, torch.cat(trusted))


def _invert_matrices(matrices: Tensor, *, strict: bool, as_cholesky: bool) -> tuple[Tensor, Tensor]:
    """S⁻¹ = L⁻ᵀL⁻¹ or L, and where it can be trusted: pivots above n·ε of their entry.

    Round-off may leave large pivots in a singular matrix whose entries differ much; a `strict`
    test looks at its condition number too.
    """
    entries = matrices.diagonal(dim1=-2, dim2=-1)
    lower, info = torch.linalg.cholesky_ex(matrices)
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    floor = matrices.shape[-1] * torch.finfo(matrices.dtype).eps
    is_trusted = (info == 0) & (pivots.square() > floor * entries).all(-1)
    if lower.is_cuda or not bool(is_trusted.all()):  # a zero pivot is an error for torch
        eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
        lower = torch.where(is_trusted[:, None, None], lower, eye)
    if as_cholesky:
        return lower, is_trusted
    inverse = _invert_from_cholesky(lower)
    if strict:
        condition = torch.linalg.matrix_norm(matrices) * torch.linalg.matrix_norm(inverse)
        is_trusted = is_trusted & (condition * factor_matrix.round_off(matrices) < 1)
    return inverse, is_trusted


def _invert_from_cholesky(lower: Tensor) -> Tensor:
    """L⁻ᵀL⁻¹; on CUDA by products, which are faster there than LAPACK's way.

    It is symmetric, and read row by row: products with a part of a matrix given by its columns are
    slower on ARM by an eighth.
    """
    if not lower.is_cuda:
        return torch.cholesky_inverse(lower).mT
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    with full_precision(lower.device, 0):
        inverse_lower = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
        return inverse_lower.mT @ inverse_lower


def _find_failed(stacks: Sequence[_InverseStack], count: int) -> list[bool]:
    """Return which of `count` factors have a matrix whose inverse cannot be trusted."""
    failed = [False] * count
    by_device: dict[torch.device, list[_InverseStack]] = {}
    for stack in stacks:
        by_device.setdefault(stack.is_trusted.device, []).append(stack)
    for on_device in by_device.values():
        # the only place that waits for the device
        is_trusted = torch.cat([stack.is_trusted for stack in on_device]).tolist()
        start = 0
        for stack in on_device:
            for i, groups in zip(stack.indices, stack.group_counts, strict=True):
                failed[i] = not all(is_trusted[start : start + groups])
                start += groups
    return failed
