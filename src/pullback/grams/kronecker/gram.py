"""The Kronecker Gram: blocks per layer, usable by itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..base import Gram, Structure
from .blocks import as_block


class Kronecker(Gram):
    """G = blockdiag(R_l ⊗ C_l): the K-FAC metric of layers with weights (O, I).

    Args:
        blocks: pairs (R, C) with R (O, O) and C (I, I), or (n,) for a diagonal; or blocks.
        index: where each coordinate of the blocks, one block after the other and each row by row,
            stands in the vectors of the Gram; by default in that order.

    >>> import torch
    >>> gram = Kronecker([(2 * torch.eye(2), torch.eye(3))])
    >>> gram.matvec(torch.ones(6))
    tensor([2., 2., 2., 2., 2., 2.])
    >>> gram.solve(torch.ones(6), damping=2.0)
    tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500])
    """

    structure = Structure("kronecker", factored=False, exact=False, kronecker=True)

    def __init__(self, blocks: Sequence[Any], index: Tensor | None = None) -> None:
        self.blocks = [as_block(b) for b in blocks]
        if not self.blocks:
            raise PullbackError("The Gram has no blocks", "nothing was given", "Pass some")
        self._sizes = [prod(b.shape) for b in self.blocks]
        self.size = self.count = sum(self._sizes)
        like = self.blocks[0].diagonal()
        self.dtype, self.device = like.dtype, like.device
        self._index = index

    def matvec(self, v: Tensor) -> Tensor:
        return self._joined([b.matvec(x) for b, x in self._pieces(v)])

    def solve(self, v: Tensor, damping: float = 0.0) -> Tensor:
        """(G + damping)⁺v, exactly, in the eigenbases of the sides."""
        return self._joined([b.solve(x, damping) for b, x in self._pieces(v)])

    def dense(self) -> Tensor:
        matrix = torch.block_diag(*[b.dense() for b in self.blocks])
        if self._index is None:
            return matrix
        out = torch.empty_like(matrix)
        out[self._index[:, None], self._index] = matrix
        return out

    def diagonal(self) -> Tensor:
        return self._joined([b.diagonal() for b in self.blocks])

    def _pieces(self, v: Tensor):
        v = v if self._index is None else v[self._index]
        return [
            (b, x.view(b.shape)) for b, x in zip(self.blocks, v.split(self._sizes), strict=True)
        ]

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([x.flatten() for x in pieces])
        if self._index is None:
            return flat
        out = torch.empty_like(flat)
        out[self._index] = flat
        return out
