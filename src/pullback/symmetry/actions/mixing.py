"""Invertible matrices between two linear maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .action import Action, Parameters

Index = Tensor


@dataclass(frozen=True)
class Mixing(Action):
    r"""A ← M A and B ← B M⁻¹ for an invertible M: what lies between two linear maps.

    A head's values against the output projection, or its queries against its keys
    (q ← M q, k ← M⁻ᵀ k). A recurrent layer that reads itself has both: W ← M W M⁻¹.

    Attributes:
        size: of M, (size, size).
        into: (name, rows): the rows of these parameters are mixed by M; vectors are biases.
        out: (name, columns, transposed): the columns are mixed by M⁻¹; transposed: they are rows
            of the parameter, mixed by M⁻ᵀ (the key against the query).
        about: what it is, for people.
        tables: (name, columns): tables whose rows are vectors, E ← E Mᵀ.
        inner: (name, places, axis): weights with several inputs, mixed by M⁻¹ along an axis.
    """

    size: int
    into: Sequence[tuple[str, Index]]
    out: Sequence[tuple[str, Index, bool]]
    about: str = "mixing"
    tables: Sequence[tuple[str, Index]] = ()
    inner: Sequence[tuple[str, Index, int]] = ()

    @property
    def dimension(self) -> int:
        return self.size**2

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _, _, _ in self.sides()))

    def sides(self) -> Iterator[tuple[str, Index, int, bool]]:
        """(name, places, axis, inverse): M, or inverse M⁻ᵀ, acts along the axis."""
        yield from ((name, rows, 0, False) for name, rows in self.into)
        yield from ((name, columns, 1, False) for name, columns in self.tables)
        yield from ((name, at, 0 if turned else 1, True) for name, at, turned in self.out)
        yield from ((name, at, axis, True) for name, at, axis in self.inner)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        x = element.view(self.size, self.size)
        moved = {n: torch.zeros_like(params[n]) for n in self.names}
        for name, places, axis, inverse in self.sides():
            w = params[name].detach()
            change = _along((-x.mT if inverse else x).to(w), w, places, axis)
            moved[name] = moved[name].index_add(axis, places.to(w.device), change)
        return moved

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        x = element.view(self.size, self.size)
        matrix, inverse = torch.linalg.matrix_exp(x), torch.linalg.matrix_exp(-x).mT
        moved = {n: params[n].detach() for n in self.names}
        for name, places, axis, back in self.sides():
            w = moved[name]
            new = _along((inverse if back else matrix).to(w), w, places, axis)
            moved[name] = w.index_copy(axis, places.to(w.device), new)
        return moved


def _along(matrix: Tensor, w: Tensor, places: Tensor, axis: int) -> Tensor:
    """Σ_j M_ij w_j over the chosen places of an axis."""
    chosen = w.index_select(axis, places.to(w.device)).movedim(axis, 0)
    return torch.einsum("ij,j...->i...", matrix, chosen).movedim(0, axis)
