"""Blocks of F̂: their names and coordinates, averages of their factors, and the Gram of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...._core.errors import PullbackError
from ...._core.flags import lerp_unless
from ....grams.kronecker import GramBlock, Pair, Units, factor_matrix, merge_pairs
from ....grams.kronecker.cholesky_inverse import divide_groups
from ....grams.kronecker.packed_matrix import (
    FactorMatrix,
    get_entries,
    map_entries,
    unpack,
    zeros_like,
)


class FactorKey(NamedTuple):
    """One factor of a block: the kind of layer that used the parameter, and the side.

    In the coordinates of a weight (O, I), "left" acts on its rows and "right" on its columns; where
    the bias shares the block, "mean" is the mean input. Units and diagonals have a "left" alone.
    """

    role: str
    side: str


UNITS = FactorKey("units", "left")
DIAGONAL = FactorKey("diagonal", "left")
#: second moments of the gradient in a block's eigenbases (EKFAC)
SPECTRUM = FactorKey("spectrum", "values")
#: means of one statistics step, or averages of many
Factors = Mapping[FactorKey, FactorMatrix]


@dataclass(frozen=True)
class BlockKey:
    """The parameters of one block, and what is held for them.

    `kind` is "kronecker" (weight and perhaps bias, or a bias alone), "units" (gain and shift of
    every unit) or "diagonal" (single entries). A `turned` weight is held as (G, I, O), and its
    coordinates are those of its transpose.
    """

    kind: str
    names: tuple[str, ...]
    bias: bool = False
    turned: bool = False

    def __hash__(self) -> int:
        return hash(self.names)  # few blocks share a parameter

    @cached_property
    def joint(self) -> bool:
        """Whether a Kronecker block holds weight and bias together."""
        return self.kind == "kronecker" and len(self.names) == 2

    @cached_property
    def kronecker(self) -> bool:
        return self.kind == "kronecker"


def block_shape(key: BlockKey, factors: Factors) -> tuple[int, ...]:
    """Return the shape of a block's coordinates: (G, O, I) with the bias as a column, or (U, k)."""
    if not key.kronecker:
        return tuple(next(iter(factors.values())).shape[:2])
    rows = max(t.shape[-1] for f, t in factors.items() if f.side == "left")
    bordered = [f.side == "mean" for f in factors]
    columns = max(t.shape[-1] + any(bordered) for f, t in factors.items() if f.side == "right")
    return next(iter(factors.values())).shape[0], rows, columns


def to_block(key: BlockKey, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return tensors of the parameters' shapes in the coordinates of their block."""
    if not key.kronecker:
        v = torch.stack([t.flatten() for t in tensors], 1)
    else:
        groups, rows, columns = shape[0], shape[1], shape[-1] - key.joint
        v = tensors[0]
        if v.numel() == groups * rows * columns:
            v = v.reshape(groups, -1, rows).mT if key.turned else v.reshape(groups, rows, -1)
            v = torch.cat([v, tensors[1].reshape(groups, -1, 1)], 2) if key.joint else v
    if tuple(v.shape) != tuple(shape):
        raise PullbackError(
            f"Parameter {key.names[0]!r} changed its shape",
            f"its block was built for {tuple(shape)}, the gradient gives {tuple(v.shape)}",
            "Build the optimizer again after changing the model",
        )
    return v


def describe(key: BlockKey, factors: Factors) -> str:
    """Return a block in words, for `coverage`."""
    if key.kind == "diagonal":
        return "diagonal"
    if key.kind == "units":
        return "units, gain and shift" if len(key.names) == 2 else "units"
    groups, rows, columns = block_shape(key, factors)
    size = f"{f'{groups} × ' if groups > 1 else ''}({rows} ⊗ {columns})"
    dense = {f.side for f, value in factors.items() if len(value.shape) == 3}
    marks = [
        f"{word} diagonal"
        for side, word in (("left", "output"), ("right", "input"))
        if side not in dense
    ]
    return ", ".join([f"kronecker {size}", *marks])


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
    def empty(cls, like: Factors, *, mean: bool) -> Average:
        """Return zeros of the factors' shapes."""
        value = {f: zeros_like(t) for f, t in like.items()}
        plain = {f: zeros_like(t) for f, t in like.items()} if mean else {}
        return cls(value, get_entries(next(iter(value.values()))).new_zeros(()), plain)

    def fits(self, new: Factors) -> bool:
        """Whether these are factors of the same names, shapes, dtype and device."""
        kinds = {(t.dtype, t.device) for t in map(get_entries, new.values())}
        return self.of_shapes(new) and kinds == {(self.mass.dtype, self.mass.device)}

    def of_shapes(self, new: Factors) -> bool:
        """Whether these are factors of the same names and shapes."""
        held = self.value
        return held.keys() == new.keys() and all(held[f].shape == t.shape for f, t in new.items())

    def adds_up(self, new: Factors) -> bool:
        """Whether one kernel on the device can add these factors: their memory is alike."""
        if not self.mass.is_cuda or self.mean or not self.fits(new):
            return False
        return all(
            get_entries(self.value[f]).stride() == get_entries(t).stride() for f, t in new.items()
        )

    def corrected(self) -> dict[FactorKey, Tensor]:
        """Return the average without the weight of the empty beginning, in memory of its own."""
        return {f: divide_groups(unpack(t), self.mass) for f, t in self.value.items()}

    @property
    def kind(self) -> tuple[object, ...]:
        """Averages of one kind can be `stacked`."""
        sides = [(f, t.shape[1:]) for f, t in self.value.items()]
        return *sides, self.mass.dtype, self.mass.device

    def change(self, change: Callable[[Tensor], Tensor], *, mass: bool = True) -> None:
        """Replace the memory of all sides, and that of the `mass`: move it to a device, say."""
        self.value = {f: map_entries(change, t) for f, t in self.value.items()}
        self.mean = {f: map_entries(change, t) for f, t in self.mean.items()}
        if mass:
            self.mass = change(self.mass)

    def sides(self) -> list[Tensor]:
        return [*map(get_entries, self.value.values()), *map(get_entries, self.mean.values())]


def stacked(averages: Sequence[Average]) -> Average:
    """Return averages of one kind as that of one block, whose groups have a mass each."""
    if len(averages) == 1:
        return averages[0]

    def join(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    value = {
        f: map_entries(lambda _, f=f: join(get_entries(a.value[f]) for a in averages), t)
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
        values += [average.mass, *(get_entries(average.value[f]) for f in new)]
        news += [ones[kind], *map(get_entries, new.values())]
        if average.mean:
            average.count += 1
            for f, t in new.items():
                get_entries(average.mean[f]).lerp_(get_entries(t), 1 / average.count)
    for values, news in kinds.values():
        lerp_unless(broken, values, news, 1 - ema)


def block_of(key: BlockKey, factors: Factors, corner: Tensor | float = 1.0) -> GramBlock:
    """Return the Gram block of a set of factors; several roles are merged to one product.

    `corner` is the second moment of the bias's input, 1 unless factors are yet to be divided: a
    number, or one per group.
    """
    if not key.kronecker:
        return Units(unpack(next(iter(factors.values()))))
    roles = sorted({factor.role for factor in factors})
    width = block_shape(key, factors)[2]
    pairs = [
        Pair(unpack(factors[FactorKey(r, "left")]), _homogeneous(factors, r, width, corner))
        for r in roles
    ]
    return merge_pairs(pairs)


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
    side, mean = unpack(factors[FactorKey(role, "right")]), factors.get(FactorKey(role, "mean"))
    n = side.shape[-1]
    if n == width:
        return side
    if factor_matrix.is_diagonal(side):
        return F.pad(side, (0, width - n))
    out = (side.new_zeros if mean is None else side.new_empty)(len(side), width, width)
    out[:, :n, :n] = side
    if mean is not None:
        out[:, n, :n] = out[:, :n, n] = get_entries(mean)
        out[:, n, n] = corner
    return out
