"""What K-FAC can tell: a step's outcome, every parameter's block, and where F̂ is degenerate."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...grams.kronecker import Block, Pair, Units, sides
from .factors.factor import BlockKey


@dataclass(frozen=True)
class KFACInfo:
    """What a step did.

    Attributes:
        accepted: whether the parameters moved.
        reason: why not, or empty.
        damping: λ in use.
        taken: whether statistics were taken up.
        notes: what went wrong or was left out when blocks were inverted, by parameters.
        ratio: actual over predicted reduction, where it was measured.
        step_size, momentum: the model's best factors, where they were computed.
    """

    accepted: bool = True
    reason: str = ""
    damping: float = 0.0
    taken: bool = False
    notes: dict[str, str] = field(default_factory=dict)
    ratio: float | None = None
    step_size: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class Row:
    """One parameter: its block and the reason for it, and the rule that it follows."""

    name: str
    shape: tuple[int, ...]
    block: str
    reason: str
    rule: str = "natural"


class Coverage(tuple[Row, ...]):
    """One row per parameter; prints as a table.

    `forecast` says that no statistics were taken yet: blocks are what the kinds of modules suggest.
    """

    forecast: bool = False

    def __str__(self) -> str:
        table = [("parameter", "shape", "rule", "block", "reason")]
        table += [(r.name, "×".join(map(str, r.shape)), r.rule, r.block, r.reason) for r in self]
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line[:4], widths, strict=True)), line[4]])
            for line in table
        ]
        if self.forecast:
            lines.append("forecast: blocks are established by the first statistics")
        return "\n".join(lines)


@dataclass(frozen=True)
class Degenerate:
    """One singular side of one block: its rank, its size, and the reason."""

    names: tuple[str, ...]
    side: str
    rank: int
    size: int
    reason: str


def degenerate_sides(key: BlockKey, block: Block) -> list[Degenerate]:
    """Return the singular sides of a block: directions of length zero, which change nothing.

    If the expected pullback metric of a layer is nondegenerate, so is its Kronecker block.
    """
    if isinstance(block, Units):
        diagonal = block.diagonal()
        dead, units = int((diagonal <= 0).any(1).sum()), len(diagonal)
        reason = f"{dead} units never matter"
        return [Degenerate(key.names, "units", units - dead, units, reason)] if dead else []
    assert isinstance(block, Pair)
    found = []
    for name, side in (("output", block.left), ("input", block.right)):
        values = side if sides.is_diagonal(side) else torch.linalg.eigvalsh(side)
        for rank, matrix in zip(sides.cut(values).sum(-1).tolist(), side, strict=True):
            if rank < len(matrix):
                reason = _reason(name, matrix, rank)
                found.append(Degenerate(key.names, name, rank, len(matrix), reason))
    return found


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
