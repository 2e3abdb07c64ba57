"""Exponential moving averages of the factors of blocks, and the Gram of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ...._core.flags import lerp_unless
from ....grams.kronecker import Pair, Units, factor_matrix, merge_pairs
from ....grams.kronecker.packed_matrix import (
    FactorMatrix,
    get_entries,
    map_entries,
    unpack,
    zeros_like,
)
from .block import BlockKey, FactorKey, Factors, FactorSide, block_shape


@dataclass
class Average:
    """An exponential moving average of a block's factors, from an empty beginning.

    `mass` is the weight of all statistics in it, a number on the device that is averaged with them
    (each set has mass 1): dividing by it removes the weight of the empty beginning.
    `mean` is the plain mean of `count` sets, where a damping asks for it.
    """

    value: dict[FactorKey, FactorMatrix]
    mass: Tensor
    mean: dict[FactorKey, FactorMatrix] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def empty(cls, factors: Factors, *, has_mean: bool) -> Average:
        """Return zeros of the factors' shapes."""
        value = {f: zeros_like(t) for f, t in factors.items()}
        if has_mean:
            mean = {f: zeros_like(t) for f, t in factors.items()}
        else:
            mean = {}
        return cls(value, get_entries(next(iter(value.values()))).new_zeros(()), mean)

    def fits(self, new: Factors) -> bool:
        """Return True for factors of the same names, shapes, dtype and device."""
        memories = {(t.dtype, t.device) for t in map(get_entries, new.values())}
        return self.has_shapes(new) and memories == {(self.mass.dtype, self.mass.device)}

    def has_shapes(self, new: Factors) -> bool:
        """Return True for factors of the same names and shapes, of any dtype and device."""
        value = self.value
        if value.keys() != new.keys():
            return False
        return all(value[f].shape == t.shape for f, t in new.items())

    def can_add_on_device(self, new: Factors) -> bool:
        """Return whether one kernel on the device can add these factors: their memory is alike."""
        if not self.mass.is_cuda or self.mean or not self.fits(new):
            return False
        return all(
            get_entries(self.value[f]).stride() == get_entries(t).stride() for f, t in new.items()
        )

    def normalize(self) -> dict[FactorKey, Tensor]:
        """Return the average without the weight of the empty beginning, in memory of its own."""
        return {f: divide_by_mass(unpack(t), self.mass) for f, t in self.value.items()}

    @property
    def form(self) -> tuple[object, ...]:
        """What averages must have in common to be stacked."""
        shapes = [(f, t.shape[1:]) for f, t in self.value.items()]
        return *shapes, self.mass.dtype, self.mass.device

    def replace_tensors(self, change: Callable[[Tensor], Tensor], *, mass: bool = True) -> None:
        """Replace the entries of all factors, and if `mass` that: move them to a device, say."""
        self.value = {f: map_entries(change, t) for f, t in self.value.items()}
        self.mean = {f: map_entries(change, t) for f, t in self.mean.items()}
        if mass:
            self.mass = change(self.mass)

    def sides(self) -> list[Tensor]:
        """Return the entries of all factors, without copies."""
        return [*map(get_entries, self.value.values()), *map(get_entries, self.mean.values())]


def divide_by_mass(factor: Tensor, mass: Tensor) -> Tensor:
    """Return a factor (G, ...) divided by a number, or by one per group."""
    if mass.ndim:
        mass = mass.view(-1, *[1] * (factor.ndim - 1))
    return factor / mass


def stack_averages(averages: Sequence[Average]) -> Average:
    """Return averages of one form as that of one block, whose groups have a mass each.

    Plain means are left out: `BlockStates.refresh` stacks no blocks that have one.
    """
    if len(averages) == 1:
        return averages[0]

    def join(factor: FactorKey, side: FactorMatrix) -> FactorMatrix:
        entries = [get_entries(average.value[factor]) for average in averages]
        return map_entries(lambda _: torch.cat(entries), side)

    value = {factor: join(factor, side) for factor, side in averages[0].value.items()}
    groups = [next(iter(average.value.values())).shape[0] for average in averages]
    masses = [a.mass.expand(n) for a, n in zip(averages, groups, strict=True)]
    return Average(value, torch.cat(masses))


def ema_update(
    pairs: Iterable[tuple[Average, Factors]], ema: float, is_void: Tensor | None = None
) -> None:
    """Set value ← ema·value + (1 − ema)·new and mass ← ema·mass + (1 − ema) for all blocks at once.

    Plain means take up `new` as well. Where the float32 flag `is_void` on the device is 1, nothing
    changes. An average that another process holds comes without factors: then its mass alone is
    updated.
    """
    # one kernel serves one device and dtype
    by_memory: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    ones: dict[object, Tensor] = {}
    for average, new in pairs:
        memory = (average.mass.device, average.mass.dtype)
        if memory not in ones:
            ones[memory] = torch.ones_like(average.mass)
        values, news = by_memory.setdefault(memory, ([], []))
        values += [average.mass, *(get_entries(average.value[f]) for f in new)]
        news += [ones[memory], *map(get_entries, new.values())]
        if average.mean:
            average.count += 1
            for f, t in new.items():
                get_entries(average.mean[f]).lerp_(get_entries(t), 1 / average.count)
    for values, news in by_memory.values():
        lerp_unless(is_void, values, news, 1 - ema)


def gram_of(key: BlockKey, factors: Factors, corner: Tensor | float = 1.0) -> Pair | Units:
    """Return the Gram block of a set of factors; several uses are merged to one product.

    `corner` is the second moment of the bias's input, 1 unless factors are yet to be divided: a
    number, or one per group.
    """
    if not key.is_kronecker:
        return Units(unpack(next(iter(factors.values()))))
    uses = sorted({factor.use for factor in factors})
    width = block_shape(key, factors)[2]
    pairs: list[Pair] = []
    for use in uses:
        left = unpack(factors[FactorKey(use, FactorSide.ROWS)])
        pairs.append(Pair(left, _append_bias_input(factors, use, width, corner)))
    return merge_pairs(pairs)


def undivided_gram(key: BlockKey, average: Average) -> tuple[Pair | Units, Tensor]:
    """Return the Gram block of an average, and what each of its factors must be divided by.

    Nothing is copied for it where there is one use; the sum of several has a scale of its own.
    """
    if len({factor.use for factor in average.value}) == 1:
        return gram_of(key, average.value, average.mass), average.mass
    return gram_of(key, average.normalize()), torch.ones_like(average.mass)


def _append_bias_input(factors: Factors, use: str, width: int, corner: Tensor | float) -> Tensor:
    """Return mean āāᵀ (G, `width`, `width`) of ā = (a, 1) for one use, from mean aaᵀ and mean a.

    A use without a bias has zeros in the place of the bias.
    """
    side = unpack(factors[FactorKey(use, FactorSide.COLUMNS)])
    mean = factors.get(FactorKey(use, FactorSide.MEAN))
    n = side.shape[-1]
    if n == width:
        return side
    if factor_matrix.is_diagonal(side):
        return F.pad(side, (0, width - n))
    if mean is None:
        return F.pad(side, (0, width - n, 0, width - n))
    mean_input = get_entries(mean)
    out = side.new_empty(len(side), width, width)
    out[:, :n, :n] = side
    out[:, n, :n] = mean_input
    out[:, :n, n] = mean_input
    out[:, n, n] = corner
    return out
