"""Layers that look rows of a table up by index: the one-hot input is never formed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..._core.products import cross
from .base import Block


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
        """Σ_tt' [i_t = i'_t'] (δ_t·δ'_t'), in panels of samples that fit the budget."""
        assert isinstance(other, GatherBlock)
        n, r, t, _ = self._delta.shape
        n2, r2, t2, _ = other._delta.shape
        out = self._delta.new_zeros(n * r, n2 * r2)
        panel = max(1, budget // (4 * r * t * n2 * r2 * t2 * out.element_size()))
        for a in range(0, n, panel):
            b = min(a + panel, n)
            left = self._delta[a:b].flatten(0, 2)
            whole = other is self and b - a == n
            dd = cross(left, left if whole else other._delta.flatten(0, 2))
            same = self._index[a:b].reshape(-1, 1) == other._index.reshape(1, -1)
            dd = dd.view(b - a, r, t, n2, r2, t2) * same.view(b - a, 1, t, n2, 1, t2)
            out[a * r : b * r] += dd.sum((2, 5)).view((b - a) * r, n2 * r2)
        return out
