r"""How the parameters of one block stand in matrices V of shape (G, O, I).

A weight with its bias is one matrix [W b] per group. A parameter without a known layer is a matrix
by its first axis, and a vector is a matrix of one row, whose Kronecker factor is the whole block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockForm:
    """The matrices (G, O, I) that a block's parameters form.

    Attributes:
        names: the parameters; with `has_bias` a weight and its bias, else they are concatenated.
        sizes: entries of each parameter.
        groups, rows, columns: G, O and I, where I counts the bias as one more column.
        has_bias: whether the last column is the second parameter.
        is_transposed: whether the weight is stored as (G, I, O).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int
    rows: int
    columns: int
    has_bias: bool = False
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """G, O and I."""
        return self.groups, self.rows, self.columns

    @property
    def size(self) -> int:
        """Entries of all parameters."""
        return sum(self.sizes)

    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the matrices (..., G, O, I) of tensors (..., numel) by name."""
        if not self.has_bias:
            return self._to_matrices(torch.cat([tensors[name] for name in self.names], -1))
        weight, bias = self.names
        matrices = self._to_matrices(tensors[weight])
        column = tensors[bias].unflatten(-1, (self.groups, self.rows, 1))
        return torch.cat([matrices, column], -1)

    def scatter(self, matrices: Tensor) -> dict[str, Tensor]:
        """Return tensors (..., numel) by name from matrices (..., G, O, I)."""
        if not self.has_bias:
            flat = self._to_flat(matrices)
            return dict(zip(self.names, flat.split(self.sizes, -1), strict=True))
        weight, bias = self.names
        return {weight: self._to_flat(matrices[..., :-1]), bias: matrices[..., -1].flatten(-2)}

    def _to_matrices(self, flat: Tensor) -> Tensor:
        columns = self.columns - int(self.has_bias)
        if self.is_transposed:
            return flat.unflatten(-1, (self.groups, columns, self.rows)).mT
        return flat.unflatten(-1, (self.groups, self.rows, columns))

    def _to_flat(self, matrices: Tensor) -> Tensor:
        if self.is_transposed:
            matrices = matrices.mT
        return matrices.flatten(-3)


def make_parameter_form(name: str, shape: tuple[int, ...]) -> BlockForm:
    """Return the form of one parameter by itself: a matrix by its first axis, or one row."""
    size = prod(shape)
    rows = 1
    if len(shape) > 1:
        rows = shape[0]
    return BlockForm((name,), (size,), 1, rows, size // max(rows, 1))


def make_vector_form(sizes: Mapping[str, int]) -> BlockForm:
    """Return the form of all parameters as one long vector."""
    return BlockForm(tuple(sizes), tuple(sizes.values()), 1, 1, sum(sizes.values()))
