"""Invertible matrices between two linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .action import Action, Parameters

Index = Tensor


@dataclass(frozen=True)
class Mixing(Action):
    r"""A ← M A and B ← B M⁻¹ for an invertible M: what lies between two linear maps.

    A head's values against the output projection, or its queries against its keys
    (q ← M q, k ← M⁻ᵀ k).

    Attributes:
        size: of M, (size, size).
        into: (name, rows): the rows of these parameters are mixed by M; vectors are biases.
        out: (name, columns, transposed): the columns are mixed by M⁻¹; transposed: they are rows
            of the parameter, mixed by M⁻ᵀ (the key against the query).
        about: what it is, for people.
    """

    size: int
    into: Sequence[tuple[str, Index]]
    out: Sequence[tuple[str, Index, bool]]
    about: str = "mixing"

    @property
    def dimension(self) -> int:
        return self.size**2

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(n for n, _ in self.into), *(n for n, _, _ in self.out)]))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        x = element.view(self.size, self.size)
        moved = {n: torch.zeros_like(params[n]) for n in self.names}
        for name, rows in self.into:
            w = params[name].detach()
            moved[name] = moved[name].index_add(0, rows.to(w.device), _rows(x.to(w), w, rows))
        for name, place, transposed in self.out:
            w, at = params[name].detach(), place.to(params[name].device)
            if transposed:
                moved[name] = moved[name].index_add(0, at, -_rows(x.mT.to(w), w, place))
            else:
                moved[name] = moved[name].index_add(1, at, -_columns(x.to(w), w, place))
        return moved

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        x = element.view(self.size, self.size)
        matrix, inverse = torch.linalg.matrix_exp(x), torch.linalg.matrix_exp(-x)
        moved = {n: params[n].detach() for n in self.names}
        for name, rows in self.into:
            w = moved[name]
            moved[name] = w.index_copy(0, rows.to(w.device), _rows(matrix.to(w), w, rows))
        for name, place, transposed in self.out:
            w, at = moved[name], place.to(moved[name].device)
            if transposed:
                moved[name] = w.index_copy(0, at, _rows(inverse.mT.to(w), w, place))
            else:
                moved[name] = w.index_copy(1, at, _columns(inverse.to(w), w, place))
        return moved


def _rows(matrix: Tensor, w: Tensor, rows: Tensor) -> Tensor:
    """M w over the chosen rows."""
    chosen = w[rows.to(w.device)]
    return torch.einsum("ij,j...->i...", matrix, chosen)


def _columns(matrix: Tensor, w: Tensor, columns: Tensor) -> Tensor:
    """w M over the chosen columns, axis 1."""
    chosen = w[:, columns.to(w.device)]
    return torch.einsum("oi...,ij->oj...", chosen, matrix)
