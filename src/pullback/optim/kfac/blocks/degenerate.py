r"""Where the K-FAC metric is no metric: directions of a block that have length zero, and why.

If the expected pullback metric of a layer is nondegenerate, so is its Kronecker block; a block is
singular exactly if one of its sides is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....grams.kronecker import Block, Pair, Units, sides
from ..statistics.sums import Key


@dataclass(frozen=True)
class Degenerate:
    """One singular side of one block: its rank, its size, and the reason."""

    names: tuple[str, ...]
    side: str
    rank: int
    size: int
    reason: str


def degenerate(key: Key, block: Block) -> list[Degenerate]:
    """The singular sides of a block."""
    if isinstance(block, Units):
        diagonal = block.diagonal()
        dead = int((diagonal <= 0).any(1).sum())
        if not dead:
            return []
        units = len(diagonal)
        return [Degenerate(key.names, "units", units - dead, units, f"{dead} units never matter")]
    assert isinstance(block, Pair)
    found = []
    for name, side in (("output", block.left), ("input", block.right)):
        for rank, matrix in zip(_ranks(side), side, strict=True):
            size = matrix.shape[-1]
            if rank < size:
                reason = _reason(name, matrix, rank)
                found.append(Degenerate(key.names, name, rank, size, reason))
    return found


def _ranks(side: Tensor) -> list[int]:
    values = side if sides.is_diagonal(side) else torch.linalg.eigvalsh(side)
    return sides.cut(values).sum(-1).tolist()


def _reason(name: str, matrix: Tensor, rank: int) -> str:
    diagonal = matrix if matrix.ndim == 1 else matrix.diagonal()
    size, dead = len(diagonal), int((diagonal <= 0).sum())
    parts = []
    if dead:
        what = "inputs are always zero" if name == "input" else "outputs receive no gradient"
        parts.append(f"{dead} {what}")
    if matrix.ndim == 2 and name == "output":
        floor = size * torch.finfo(matrix.dtype).eps ** 0.5
        if float(matrix.sum(0).abs().max()) <= floor * float(diagonal.max()):
            parts.append("moving all outputs alike changes nothing, as with softmax logits")
    if size - rank > dead and not parts[bool(dead) :]:
        parts.append(f"{size - rank - dead} directions did not occur in the statistics")
    return "; ".join(parts)
