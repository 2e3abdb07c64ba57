"""Blocks of F̂: their names, their factors, and their coordinates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ....grams.kronecker.packed_matrix import FactorMatrix


class BlockKind(StrEnum):
    """What the coordinates of a block are; saved states hold these values."""

    #: weight and perhaps bias of a linear map, or a bias alone
    KRONECKER = "kronecker"
    #: gain and shift of every unit
    UNITS = "units"
    #: single entries, each with a number of its own
    DIAGONAL = "diagonal"
    #: single entries without statistics
    ENTRIES = "entries"


class FactorSide(StrEnum):
    """Where a factor acts in the coordinates of a weight; saved states hold these values.

    Rows are the outputs of a layer and columns its inputs, but where a weight is held as
    (inputs, outputs) and its block is not that of the transpose (see `sums.get_factor_keys`).
    """

    #: on its rows; units and diagonals have this one alone
    ROWS = "left"
    #: on its columns
    COLUMNS = "right"
    #: the mean input, where the bias shares the block
    MEAN = "mean"
    #: second moments of the gradient in eigenbases
    SPECTRUM = "values"


class FactorKey(NamedTuple):
    """One factor of a block.

    `use` names how a layer used the parameter ("linear", "embedding", ...): see `maps.layers`. A
    parameter with several uses has factors for each of them.
    """

    use: str
    side: str


UNITS = FactorKey("units", FactorSide.ROWS)
DIAGONAL = FactorKey("diagonal", FactorSide.ROWS)
#: second moments of the gradient in a block's eigenbases (EKFAC)
SPECTRUM = FactorKey("spectrum", FactorSide.SPECTRUM)
#: means of one statistics step, or averages of many
Factors = Mapping[FactorKey, FactorMatrix]


@dataclass(frozen=True)
class Bases:
    """Bases of a block's rows and columns; None is the identity."""

    left: Tensor | None
    right: Tensor | None


@dataclass(frozen=True)
class BlockKey:
    """The parameters of one block, and what is held for them.

    Where `is_transposed`, the weight is held as (G, I, O), and its coordinates are those of its
    transpose. Where `is_bias`, the block is that of a bias by itself.
    """

    kind: BlockKind
    names: tuple[str, ...]
    is_bias: bool = False
    is_transposed: bool = False

    @cached_property
    def is_joint(self) -> bool:
        """Whether a Kronecker block holds weight and bias together."""
        return self.kind == BlockKind.KRONECKER and len(self.names) == 2

    @cached_property
    def is_kronecker(self) -> bool:
        """Whether the block is R ⊗ C: no matrix for each unit, and no number for each entry."""
        return self.kind == BlockKind.KRONECKER


def names_of(keys: Iterable[BlockKey]) -> set[str]:
    """Return the names of all parameters of these blocks."""
    names: set[str] = set()
    for key in keys:
        names.update(key.names)
    return names


def block_shape(key: BlockKey, factors: Factors) -> tuple[int, ...]:
    """Return the shape of a block's coordinates: (G, O, I) with the bias as a column, or (U, k)."""
    if not key.is_kronecker:
        return tuple(next(iter(factors.values())).shape[:2])
    sizes: dict[str, int] = {}
    for factor, side in factors.items():
        sizes[factor.side] = max(sizes.get(factor.side, 0), side.shape[-1])
    has_mean = int(FactorSide.MEAN in sizes)
    groups = next(iter(factors.values())).shape[0]
    return groups, sizes[FactorSide.ROWS], sizes[FactorSide.COLUMNS] + has_mean


def is_dense(factors: Factors, side: str) -> bool:
    """Return whether a side is held as a matrix, for one of its uses at least."""
    return any(factor.side == side and len(t.shape) == 3 for factor, t in factors.items())


def to_block(key: BlockKey, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return tensors of the parameters' shapes in the coordinates of their block."""
    if not key.is_kronecker:
        v = torch.stack([t.flatten() for t in tensors], 1)
    else:
        v = _to_matrices(key, tensors, shape)
    if tuple(v.shape) != tuple(shape):
        raise PullbackError(
            f"Parameter {key.names[0]!r} changed its shape",
            f"its block was built for {tuple(shape)}, the gradient gives {tuple(v.shape)}",
            "Build the optimizer again after changing the model",
        )
    return v


def _to_matrices(key: BlockKey, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return a weight as (G, O, I) with its bias as last column, or as it is if it does not fit."""
    groups, rows, columns = shape
    v = tensors[0]
    if v.numel() != groups * rows * (columns - key.is_joint):
        return v
    if key.is_transposed:
        v = v.reshape(groups, -1, rows).mT
    else:
        v = v.reshape(groups, rows, -1)
    if key.is_joint:
        v = torch.cat([v, tensors[1].reshape(groups, -1, 1)], 2)
    return v


def from_block(
    key: BlockKey, v: Tensor, templates: Sequence[Tensor], shape: tuple[int, ...]
) -> list[Tensor]:
    """Return a block's coordinates in the shapes of the parameters, which `templates` have."""
    v = v.reshape(shape)
    if not key.is_kronecker:
        pairs = zip(v.unbind(1), templates, strict=True)
        return [column.reshape(template.shape) for column, template in pairs]
    if key.is_joint:
        weight = v[..., :-1]
    else:
        weight = v
    if key.is_transposed:
        weight = weight.mT
    out = [weight.reshape(templates[0].shape)]
    if key.is_joint:
        out.append(v[..., -1].reshape(templates[1].shape))
    return out


def describe(key: BlockKey, factors: Factors) -> str:
    """Return a block in words, for `coverage`."""
    if key.kind == BlockKind.DIAGONAL:
        return "diagonal"
    if key.kind == BlockKind.UNITS:
        if len(key.names) == 2:
            return "units, gain and shift"
        return "units"
    groups, rows, columns = block_shape(key, factors)
    if groups > 1:
        several = f"{groups} × "
    else:
        several = ""
    words = [f"kronecker {several}({rows} ⊗ {columns})"]
    if not is_dense(factors, FactorSide.ROWS):
        words.append("output diagonal")
    if not is_dense(factors, FactorSide.COLUMNS):
        words.append("input diagonal")
    return ", ".join(words)
