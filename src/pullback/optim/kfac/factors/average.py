"""Averages of statistics over steps, and the Gram blocks that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ...._core.flags import lerp_unless
from ....grams.kronecker import GramBlock, Pair, Units, merged, sides
from ....grams.kronecker.inverting import over_groups
from ....grams.kronecker.packed import Side, map_memory, memory, whole, zeros_like
from .factor import BlockKey, Factor, Factors, block_shape


@dataclass
class Average:
    """An exponential moving average of a block's factors, from an empty beginning.

    `mass` is the weight of all statistics in it, a number on the device that is averaged with them
    (each set has mass 1): dividing by it removes the weight of the empty beginning.
    `mean` is the plain mean of `count` sets, where a damping asks for it.
    """

    value: dict[Factor, Side]
    mass: Tensor
    mean: dict[Factor, Side] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def empty(cls, like: Factors, *, mean: bool) -> Average:
        """Return zeros of the factors' shapes."""
        value = {f: zeros_like(t) for f, t in like.items()}
        plain = {f: zeros_like(t) for f, t in like.items()} if mean else {}
        return cls(value, memory(next(iter(value.values()))).new_zeros(()), plain)

    def fits(self, new: Factors) -> bool:
        """Whether these are factors of the same names, shapes, dtype and device."""
        kinds = {(t.dtype, t.device) for t in map(memory, new.values())}
        return self.of_shapes(new) and kinds == {(self.mass.dtype, self.mass.device)}

    def of_shapes(self, new: Factors) -> bool:
        """Whether these are factors of the same names and shapes."""
        held = self.value
        return held.keys() == new.keys() and all(held[f].shape == t.shape for f, t in new.items())

    def adds_up(self, new: Factors) -> bool:
        """Whether one kernel on the device can add these factors: their memory is alike."""
        if not self.mass.is_cuda or self.mean or self.value.keys() != new.keys():
            return False
        pairs = ((memory(self.value[f]), memory(t)) for f, t in new.items())
        return all(
            a.shape == b.shape and a.stride() == b.stride()
            and a.dtype == b.dtype and a.device == b.device
            for a, b in pairs
        )  # fmt: skip

    @property
    def started(self) -> bool:
        """Whether there are statistics in it; waits for the device."""
        return bool(self.mass > 0)

    def corrected(self) -> dict[Factor, Tensor]:
        """Return the average without the weight of the empty beginning, in memory of its own."""
        return {f: over_groups(whole(t), self.mass) for f, t in self.value.items()}

    @property
    def kind(self) -> tuple[object, ...]:
        """Averages of one kind can be `stacked`."""
        sides = [(f, t.shape[1:]) for f, t in self.value.items()]
        return *sides, self.mass.dtype, self.mass.device

    def map(self, change: Callable[[Tensor], Tensor]) -> Average:
        """Return the same with all tensors changed: moved to another device, say."""
        value = {f: map_memory(change, t) for f, t in self.value.items()}
        mean = {f: map_memory(change, t) for f, t in self.mean.items()}
        return Average(value, change(self.mass), mean, self.count)

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the memory of all sides; the mass stays."""
        self.value = {f: map_memory(change, t) for f, t in self.value.items()}
        self.mean = {f: map_memory(change, t) for f, t in self.mean.items()}

    def sides(self) -> list[Tensor]:
        """Return the memory of all sides."""
        return [*map(memory, self.value.values()), *map(memory, self.mean.values())]

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are held."""
        return [*self.sides(), self.mass]


def stacked(averages: Sequence[Average]) -> Average:
    """Return averages of one kind as that of one block, whose groups have a mass each."""
    if len(averages) == 1:
        return averages[0]

    def join(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    value = {
        f: map_memory(lambda _, f=f: join(memory(a.value[f]) for a in averages), t)
        for f, t in averages[0].value.items()
    }
    some = next(iter(value))
    return Average(value, join(a.mass.expand(a.value[some].shape[0]) for a in averages))


def ema_update(
    pairs: Iterable[tuple[Average, Factors]], ema: float, broken: Tensor | None = None
) -> None:
    """Set value ← ema·value + (1 − ema)·new for all blocks at once, and mass towards 1.

    Where the float32 flag `broken` on the device is 1, nothing changes. Without factors the mass
    alone does: another process has them.
    """
    kinds: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    ones: dict[object, Tensor] = {}
    for average, new in pairs:
        kind = (average.mass.device, average.mass.dtype)
        if kind not in ones:
            ones[kind] = torch.ones_like(average.mass)
        values, news = kinds.setdefault(kind, ([], []))
        values += [average.mass, *(memory(average.value[f]) for f in new)]
        news += [ones[kind], *map(memory, new.values())]
        if average.mean:
            average.count += 1
            for f, t in new.items():
                memory(average.mean[f]).lerp_(memory(t), 1 / average.count)
    for values, news in kinds.values():
        lerp_unless(broken, values, news, 1 - ema)


def block_of(key: BlockKey, factors: Factors, corner: Tensor | float = 1.0) -> GramBlock:
    """Return the Gram block of a set of factors; several roles are merged to one product.

    `corner` is the second moment of the bias's input, 1 unless factors are yet to be divided: a
    number, or one per group.
    """
    if not key.kronecker:
        return Units(whole(next(iter(factors.values()))))
    roles = sorted({factor.role for factor in factors})
    width = block_shape(key, factors)[2]
    pairs = [
        Pair(whole(factors[Factor(r, "left")]), _homogeneous(factors, r, width, corner))
        for r in roles
    ]
    return merged(pairs)


def undivided(
    key: BlockKey, average: Average, corner: Tensor | float = 1.0
) -> tuple[GramBlock, Tensor]:
    """Return the block of an average, and what each of its factors is yet to be divided by.

    Nothing is copied for it where there is one role; the sum of several has a scale of its own.
    """
    if len({factor.role for factor in average.value}) == 1:
        return block_of(key, average.value, corner * average.mass), average.mass
    return block_of(key, average.corrected(), corner), torch.ones_like(average.mass)


def _homogeneous(factors: Factors, role: str, width: int, corner: Tensor | float) -> Tensor:
    """Return mean āāᵀ of ā = (a, 1), from mean aaᵀ and mean a; padded with 0 without a bias."""
    side, mean = whole(factors[Factor(role, "right")]), factors.get(Factor(role, "mean"))
    n = side.shape[-1]
    if n == width:
        return side
    if sides.is_diagonal(side):
        return F.pad(side, (0, width - n))
    out = (side.new_zeros if mean is None else side.new_empty)(len(side), width, width)
    out[:, :n, :n] = side
    if mean is not None:
        out[:, n, :n] = out[:, :n, n] = memory(mean)
        out[:, n, n] = corner
    return out
