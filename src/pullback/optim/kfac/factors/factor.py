"""Names of blocks and of their factors, and gradients in a block's own coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ....grams.kronecker.packed import Side


class Factor(NamedTuple):
    """One factor of a block: the kind of layer that used the parameter, and the side.

    In the coordinates of a weight (O, I), "left" acts on its rows and "right" on its columns; where
    the bias shares the block, "mean" is the mean input. Units and diagonals have a "left" alone.
    """

    role: str
    side: str


UNITS = Factor("units", "left")
DIAGONAL = Factor("diagonal", "left")
#: second moments of the gradient in a block's eigenbases (EKFAC)
SPECTRUM = Factor("spectrum", "values")
#: means of one statistics step, or averages of many
Factors = Mapping[Factor, Side]


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
        """Whether it is a Kronecker product."""
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
