r"""Adam in the eigenbases of a layer's two factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ....grams.kronecker.inverse import Inverse, rotate
from .rule import Rule, advance

_ROUND_OFF = 2  # of a coordinate, in units of the precision of the bases


class Eigenbasis(Rule):
    r"""Adam's step for the coordinates in which K-FAC's factors R and C are diagonal:

        g = Uᵀ G W,   m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   Δ = U (m̂/√v̂) Wᵀ,

    with U, W the eigenbases of R = mean δδᵀ, of the loss's own cotangents, and C = mean aaᵀ. When
    they turn, m turns with them, and v by the squares of the turns, as if coordinates were
    uncorrelated. Rotations of a layer's inputs and outputs are not noticed. To √v̂
    the round-off of a coordinate is added, so that directions without a gradient stay at rest.
    First bases of large sides are divided over the first steps; until then AdamW moves a matrix.

    Args:
        betas: the weights of the past in m and v.
        eps: what is added to √v̂.
        head: whether the output layer follows too.
    """

    needs = "basis"
    moments: ClassVar = {"first": "entries", "second": "entries"}
    defaults: ClassVar = {
        "lr": 3e-3,
        "fisher": "empirical",
        "ema": 0.95,
        "statistics_every": 10,
        "invert_every": 10,
    }

    def __init__(
        self, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, *, head: bool = True
    ) -> None:
        self.betas, self.eps, self.head = betas, eps, head

    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        first, second, steps = prepared.first, prepared.second, prepared.steps
        assert first is not None
        assert second is not None
        assert steps is not None
        basis, (past, longer) = (prepared.left, prepared.right), self.betas
        g = rotate(given[0], *basis)
        steps += 1 if good is None else good
        advance(first, g, 1 - past, good)
        advance(second, g.square(), 1 - longer, good)
        c1, c2 = ((1 - beta**steps)[:, None, None] for beta in self.betas)
        bases = [side.dtype for side in basis if side is not None]
        precision = max((torch.finfo(dtype).eps for dtype in bases), default=0.0)
        noise = _ROUND_OFF * precision * second.mean((1, 2), keepdim=True).sqrt()
        d = first / second.sqrt().add_(self.eps * c2.sqrt() + noise)
        return [rotate(d, *basis, back=True, by=c2.sqrt() / c1)]
