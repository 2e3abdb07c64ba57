"""Mixings: an invertible matrix between two linear maps with nothing nonlinear between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .action import Action, Parameters

Index = Tensor


@dataclass(frozen=True)
class MixedAxis:
    """Slices of a parameter along one axis that are replaced by linear combinations.

    Attributes:
        name: the parameter.
        positions: of the slices along the axis, in the order of the rows of M.
        axis: of the parameter.
        is_inverse: whether M⁻ᵀ acts in place of M.
    """

    name: str
    positions: Index
    axis: int
    is_inverse: bool

    def combine(self, matrix: Tensor, w: Tensor) -> Tensor:
        """Σ_j matrix_ij w_j over the slices, with the axis where it was."""
        slices = w.index_select(self.axis, self.positions.to(w.device)).movedim(self.axis, 0)
        combined = torch.einsum("ij,j...->i...", matrix.to(w), slices)
        return combined.movedim(0, self.axis)


@dataclass(frozen=True)
class Mixing(Action):
    r"""A ← M A and B ← B M⁻¹ for an invertible M: what lies between two linear maps.

    A head's values against the output projection, or its queries against its keys
    (q ← M q, k ← M⁻ᵀ k).

    Attributes:
        size: of M, (size, size).
        into: (name, rows): the rows of these parameters are mixed by M; vectors are biases.
        out: (name, columns, transposed): the columns are mixed by M⁻¹; transposed: they are rows
            of the parameter, mixed by M⁻ᵀ (the key against the query; a transposed convolution).
        about: what it is, for people.
        tables: (name, columns): tables whose rows are vectors, E ← E Mᵀ, and weights of
            transposed convolutions, whose outputs are columns, too.
    """

    size: int
    into: Sequence[tuple[str, Index]]
    out: Sequence[tuple[str, Index, bool]]
    about: str = "mixing"
    tables: Sequence[tuple[str, Index]] = ()

    @property
    def dimension(self) -> int:
        return self.size**2

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(mixed.name for mixed in self.mixed_axes()))

    def mixed_axes(self) -> Iterator[MixedAxis]:
        """Yield everything that M or M⁻ᵀ acts on."""
        for name, rows in self.into:
            yield MixedAxis(name, rows, 0, is_inverse=False)
        for name, columns in self.tables:
            yield MixedAxis(name, columns, 1, is_inverse=False)
        for name, positions, is_transposed in self.out:
            yield MixedAxis(name, positions, int(not is_transposed), is_inverse=True)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        x = element.view(self.size, self.size)
        tangents = {name: torch.zeros_like(params[name]) for name in self.names}
        for mixed in self.mixed_axes():
            w = params[mixed.name].detach()
            matrix = x
            if mixed.is_inverse:
                matrix = -x.mT
            change = mixed.combine(matrix, w)
            positions = mixed.positions.to(w.device)
            tangents[mixed.name] = tangents[mixed.name].index_add(mixed.axis, positions, change)
        return tangents

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        x = element.view(self.size, self.size)
        forward = torch.linalg.matrix_exp(x)
        inverse_transposed = torch.linalg.matrix_exp(-x).mT
        moved = {name: params[name].detach() for name in self.names}
        for mixed in self.mixed_axes():
            w = moved[mixed.name]
            matrix = forward
            if mixed.is_inverse:
                matrix = inverse_transposed
            combined = mixed.combine(matrix, w)
            moved[mixed.name] = w.index_copy(mixed.axis, mixed.positions.to(w.device), combined)
        return moved
