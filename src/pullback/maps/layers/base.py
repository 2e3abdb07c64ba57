r"""The share of one layer's parameters in A = SᵀJ, kept in factored form.

A *block* holds, for N samples and R covectors per sample, what the chain rule gives at one
layer: its input a and the cotangents δ at its output. For a linear layer the row of J is
Σ_t δ_t ā_tᵀ, so rows, Gram, products and Kronecker factors all follow from (a, δ), where t
runs over the places that share the weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._core.products import add_cross, mirrored


class Block(ABC):
    """One group of parameters: `rows`, `gram`, and products with A and Aᵀ."""

    #: names of the parameters, in the map's parameter space
    names: tuple[str, ...]
    #: shapes that cotangents may have, and whether they had them when last looked at: what they
    #: did not have is not looked for again, what they had is proved anew
    looks: dict[str, bool]

    @property
    def route(self) -> str:
        """How `gram` will be computed, for reports."""
        return "rows"

    @abstractmethod
    def rows(self) -> dict[str, Tensor]:
        """Per name, the rows (N, R, numel) of J."""

    @abstractmethod
    def narrow(self, start: int, stop: int) -> Block:
        """The same block for the samples in [start, stop)."""

    def traced(self) -> Block:
        """For `gram` alone, one covector whose products are Σ_r of the products of all R."""
        return RowsBlock({n: rows.flatten(1)[:, None] for n, rows in self.rows().items()})

    def gram(self, other: Block, budget: int) -> Tensor:
        """A Aᵀ of this block against `other` of the same parameters: (N·R, N'·R')."""
        mine, name = self.rows(), self.names[0]
        theirs = mine if other is self else other.rows()
        sides = (rows[name].shape[0] * rows[name].shape[1] for rows in (mine, theirs))
        out = mine[name].new_zeros(*sides)
        for name in self.names:
            x = mine[name].flatten(0, 1)
            add_cross(out, x, x if other is self else theirs[name].flatten(0, 1))
        return mirrored(out) if other is self else out

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        """The same added to `out`; where `other` is this block, on and below the diagonal."""
        out += self.gram(other, budget)

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """A v: (N, R)."""
        rows = self.rows()
        return torch.stack([rows[n] @ v[n].flatten() for n in self.names]).sum(0)

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        """Aᵀ c for c of shape (N, R), flat per name."""
        return {n: torch.einsum("nrp,nr->p", rows, c) for n, rows in self.rows().items()}


class RowsBlock(Block):
    """Rows held as they are: small layers, tied weights, layers without known structure."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self.names = tuple(rows)
        self._rows = dict(rows)

    def rows(self) -> dict[str, Tensor]:
        return self._rows

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        theirs = other.rows()
        for name, rows in self._rows.items():
            x = rows.flatten(0, 1)
            add_cross(out, x, x if other is self else theirs[name].flatten(0, 1))

    def narrow(self, start: int, stop: int) -> Block:
        return RowsBlock({n: r[start:stop] for n, r in self._rows.items()})


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The uses of one layer along their sharing axis; a single use is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
