"""Layers that look rows of a table up by index: the one-hot input is never formed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..._core.products import mirrored
from ..._core.scatter import add_at
from .base import Block
from .hadamard import add_hadamard


class GatherBlock(Block):
    """Table (V, D) from indices (N, T) and cotangents (N, R, T, D)."""

    def __init__(self, name: str, table: tuple[int, int], index: Tensor, delta: Tensor) -> None:
        self.names = (name,)
        self._name, self._table, self._index, self._delta = name, table, index, delta

    @property
    def route(self) -> str:
        return "hadamard"

    def narrow(self, start: int, stop: int) -> Block:
        index, delta = self._index[start:stop], self._delta[start:stop]
        return GatherBlock(self._name, self._table, index, delta)

    def traced(self) -> Block:
        delta = self._delta.transpose(1, 2).flatten(2).unsqueeze(1)
        return GatherBlock(self._name, self._table, self._index, delta)

    def rows(self) -> dict[str, Tensor]:
        n, r, _, d = self._delta.shape
        size = self._table[0]
        start = size * torch.arange(n, device=self._index.device)
        out = self._delta.new_zeros(n * size, r, d)
        index = (start[:, None] + self._index).flatten()
        add_at(out, index, self._delta.transpose(1, 2).flatten(0, 1))
        return {self._name: out.view(n, size, r, d).transpose(1, 2).flatten(2)}

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        return torch.einsum("nrtd,ntd->nr", self._delta, v[self._name][self._index])

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        delta = torch.einsum("nrtd,nr->ntd", self._delta, c).flatten(0, 1)
        out = add_at(delta.new_zeros(self._table), self._index.flatten(), delta)
        return {self._name: out.flatten()}

    def gram(self, other: Block, budget: int) -> Tensor:
        assert isinstance(other, GatherBlock)
        sides = (b._delta.shape[0] * b._delta.shape[1] for b in (self, other))
        out = self._delta.new_zeros(*sides)
        self.add_gram(out, other, budget)
        return mirrored(out) if other is self else out

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        """Σ_tt' [i_t = i'_t'] (δ_t·δ'_t')."""
        assert isinstance(other, GatherBlock)

        def same(one: slice, two: slice) -> Tensor:
            return self._index[one][:, :, None, None] == other._index[two][None, None]

        add_hadamard(out, self._delta, other._delta, same, budget)
