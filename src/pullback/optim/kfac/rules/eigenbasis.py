"""Adam in the eigenbases of K-FAC's factors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....grams.kronecker.roots import (
    eigenbasis,
    half_precision,
    product,
    rotate,
    turn_basis,
)
from ..arguments import check
from .adamw import AdamW
from .base import (
    REFRESHED,
    BlockShape,
    Defaults,
    Estimation,
    FactorAverages,
    RefreshReport,
    Rule,
    RuleState,
    Statistics,
    StepContext,
)

#: round-off of a coordinate of the gradient, in units of the bases' precision
_ROUND_OFF = 2


@dataclass
class EigenbasisState(RuleState):
    """Bases of rows and columns (None for the identity), and moments of g in these coordinates."""

    left: Tensor | None = field(metadata=REFRESHED)
    right: Tensor | None = field(metadata=REFRESHED)
    first: Tensor = field(metadata=REFRESHED)
    second: Tensor = field(metadata=REFRESHED)
    #: steps in the moments, (B,)
    steps: Tensor


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
        likelihood, metric: of the outputs; they matter where samples are counted or drawn.
        fisher: of which cotangents R is, by default the loss's own.
        estimation: how factors are estimated.
        others: the rule for all other parameters.
    """

    name: ClassVar = "eigenbasis"
    reads: ClassVar = Statistics.INPUTS_AND_OUTPUTS
    defaults: ClassVar = Defaults(lr=3e-3, statistics_every=10, invert_every=10)
    first_entries: ClassVar = 2**21

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        head: bool = True,
        likelihood: Any = None,
        metric: Any = None,
        fisher: str = "empirical",
        estimation: Estimation | None = None,
        others: Rule | None = None,
    ) -> None:
        check(betas=betas, eps=eps)
        self.betas = betas
        self.eps = eps
        self.takes_head = head
        own = Estimation() if estimation is None else estimation
        self.estimation = own.with_metric(likelihood, metric, fisher=fisher)
        self.others = AdamW() if others is None else others

    def init(self, shape: BlockShape) -> EigenbasisState:
        blocks, rows, columns = shape.size
        dtype = half_precision(shape.zeros(0))
        return EigenbasisState(
            left=shape.zeros(blocks, rows, rows, dtype=dtype) if shape.dense_rows else None,
            right=shape.zeros(blocks, columns, columns, dtype=dtype)
            if shape.dense_columns
            else None,
            first=shape.zeros(*shape.size),
            second=shape.zeros(*shape.size),
            steps=shape.zeros(blocks),
        )

    def refresh(self, averages: FactorAverages, state: RuleState) -> RefreshReport:
        """Turn the bases after their factors, and the moments with them; the first by `eigh`."""
        assert isinstance(state, EigenbasisState)
        left = _follow(averages.pair.output_factor, state.left, is_first=averages.is_first)
        right = _follow(averages.pair.input_factor, state.right, is_first=averages.is_first)
        if not averages.is_first:
            row_turn = _turn(state.left, left, state.first.dtype)
            column_turn = _turn(state.right, right, state.first.dtype)
            state.first = rotate(state.first, row_turn, column_turn)
            state.second = rotate(state.second, _squares(row_turn), _squares(column_turn))
            state.second.clamp_(min=0)
        state.left = left
        state.right = right
        report = RefreshReport()
        for block in _broken_blocks(left, right):
            report.fail(block, "its eigenbases were not found")
        return report

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        assert isinstance(state, EigenbasisState)
        beta1, beta2 = self.betas
        g = rotate(gradient, state.left, state.right)
        step.add_one(state.steps)
        step.average(state.first, g, 1 - beta1)
        step.average(state.second, g.square(), 1 - beta2)
        unbias1 = (1 - beta1**state.steps)[:, None, None]
        unbias2 = (1 - beta2**state.steps)[:, None, None]
        noise = _round_off(state) * state.second.mean((1, 2), keepdim=True).sqrt()
        size = state.second.sqrt().add_(self.eps * unbias2.sqrt() + noise)
        by = unbias2.sqrt() / unbias1
        return rotate(state.first / size, state.left, state.right, back=True, by=by)


def _follow(factor: Tensor, basis: Tensor | None, *, is_first: bool) -> Tensor | None:
    """Return the basis that follows an average of the factor; None for a diagonal one."""
    if basis is None:
        return None
    if is_first:
        return eigenbasis(factor).to(basis.dtype)
    return turn_basis(factor, basis.to(factor.dtype)).to(basis.dtype)


def _turn(old: Tensor | None, new: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return T = EᵀE' for coordinates g' = Tᵀg; None for the identity."""
    if old is None or new is None:
        return None
    return product(old.to(dtype).mT, new.to(dtype))


def _broken_blocks(left: Tensor | None, right: Tensor | None) -> list[int]:
    """Return the blocks one of whose bases is not finite."""
    bases = [basis for basis in (left, right) if basis is not None]
    flags = torch.stack([torch.isfinite(basis).flatten(1).all(1) for basis in bases]).all(0)
    return [block for block, is_finite in enumerate(flags.tolist()) if not is_finite]


def _squares(turn: Tensor | None) -> Tensor | None:
    return None if turn is None else turn.square()


def _round_off(state: EigenbasisState) -> float:
    """Return the round-off of a coordinate over the root mean square of all."""
    bases = [basis for basis in (state.left, state.right) if basis is not None]
    return _ROUND_OFF * max((torch.finfo(basis.dtype).eps for basis in bases), default=0.0)
