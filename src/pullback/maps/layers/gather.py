"""Layers that look rows of a table up by index: the one-hot input is never formed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .base import Block
from .hadamard import hadamard


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

    def rows(self) -> dict[str, Tensor]:
        n, r, t, d = self._delta.shape
        out = self._delta.new_zeros(n, r, self._table[0], d)
        index = self._index[:, None, :, None].expand(n, r, t, d)
        return {self._name: out.scatter_add_(2, index, self._delta).flatten(2)}

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        return torch.einsum("nrtd,ntd->nr", self._delta, v[self._name][self._index])

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        delta = torch.einsum("nrtd,nr->ntd", self._delta, c).flatten(0, 1)
        out = delta.new_zeros(self._table)
        return {self._name: out.index_add_(0, self._index.flatten(), delta).flatten()}

    def gram(self, other: Block, budget: int) -> Tensor:
        """Σ_tt' [i_t = i'_t'] (δ_t·δ'_t')."""
        assert isinstance(other, GatherBlock)

        def same(one: slice, two: slice) -> Tensor:
            return self._index[one][:, :, None, None] == other._index[two][None, None]

        return hadamard(self._delta, other._delta, same, budget)
