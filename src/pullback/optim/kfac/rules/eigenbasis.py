"""Adam in the eigenbases of K-FAC's factors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....grams.kronecker.roots import (
    eigenbasis,
    half_precision,
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
    they turn, m turns with them; v, which varies less from coordinate to coordinate, stays.
    Rotations of a layer's inputs and outputs are not noticed. To √v̂
    the round-off of a coordinate is added, so that directions without a gradient stay at rest.
    First bases of large sides are divided over the first steps; until then AdamW moves a matrix.

    Relatives: SOAP (Vyas et al., 2024, arXiv:2409.11321) does the same in the eigenbases of
    Shampoo's factors GGᵀ and GᵀG (Gupta et al., 2018, arXiv:1802.09568) instead of K-FAC's. EKFAC
    (George et al., 2018, arXiv:1806.03884) divides by second moments of the samples' gradients,
    not by their root.

    Args:
        betas: the weights of the past in m and v. A short memory of the gradient lets two networks
            train against each other; on small tasks it costs nothing.
        eps: what is added to √v̂.
        head: whether the output layer follows too.
        cuda_graph: whether directions of weights below 4M entries are replayed from a CUDA graph.
        likelihood, metric: of the outputs; they matter where samples are counted or drawn.
        fisher: of which cotangents R is, by default the loss's own.
        estimation: how factors are estimated.
        others: the rule for all other parameters, by default AdamW with these betas.
    """

    name: ClassVar = "eigenbasis"
    reads: ClassVar = Statistics.INPUTS_AND_OUTPUTS
    defaults: ClassVar = Defaults(lr=9e-3, statistics_every=10, invert_every=10)
    first_entries: ClassVar = 2**21

    def __init__(
        self,
        betas: tuple[float, float] = (0.7, 0.99),
        eps: float = 1e-8,
        *,
        head: bool = True,
        cuda_graph: bool = False,
        likelihood: Any = None,
        metric: Any = None,
        fisher: str = "empirical",
        estimation: Estimation | None = None,
        others: Rule | None = None,
    ) -> None:
        check(betas=betas, eps=eps, cuda_graph=cuda_graph)
        self.betas = betas
        self.eps = eps
        self.takes_head = head
        self.cuda_graph = cuda_graph
        if estimation is None:
            estimation = Estimation()
        self.estimation = estimation.with_metric(likelihood, metric, fisher=fisher)
        if others is None:
            others = AdamW(betas)
        self.others = others

    def init(self, shape: BlockShape) -> EigenbasisState:
        blocks, rows, columns = shape.size
        dtype = half_precision(shape.zeros(0))
        left = None
        right = None
        if shape.dense_rows:
            left = shape.zeros(blocks, rows, rows, dtype=dtype)
        if shape.dense_columns:
            right = shape.zeros(blocks, columns, columns, dtype=dtype)
        return EigenbasisState(
            left=left,
            right=right,
            first=shape.zeros(*shape.size),
            second=shape.zeros(*shape.size),
            steps=shape.zeros(blocks),
        )

    def refresh(self, averages: FactorAverages, state: RuleState) -> RefreshReport:
        """Turn the bases after their factors, and the moments with them; the first by `eigh`."""
        assert isinstance(state, EigenbasisState)
        pair = averages.pair
        if averages.is_first:
            state.left = _find_basis(pair.output_factor, state.left)
            state.right = _find_basis(pair.input_factor, state.right)
        else:
            state.left, row_rotation = _turn(pair.output_factor, state.left)
            state.right, column_rotation = _turn(pair.input_factor, state.right)
            state.first = rotate(state.first, row_rotation, column_rotation)
        report = RefreshReport()
        for block in _broken_blocks(state.left, state.right):
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
        factors = unbias2.sqrt() / unbias1
        return rotate(state.first / size, state.left, state.right, back=True, factors=factors)


def _find_basis(factor: Tensor, basis: Tensor | None) -> Tensor | None:
    """Return the eigenbasis of a factor in the dtype of `basis`; None for a diagonal one."""
    if basis is None:
        return None
    return eigenbasis(factor).to(basis.dtype)


def _turn(factor: Tensor, basis: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the basis E' = EQ that follows a factor, and Q; None for a diagonal one."""
    if basis is None:
        return None, None
    turn = turn_basis(factor, basis.to(factor.dtype))
    return turn.basis.to(basis.dtype), turn.rotation


def _broken_blocks(left: Tensor | None, right: Tensor | None) -> list[int]:
    """Return the blocks one of whose bases is not finite."""
    bases = [basis for basis in (left, right) if basis is not None]
    flags = torch.stack([torch.isfinite(basis).flatten(1).all(1) for basis in bases]).all(0)
    return [block for block, is_finite in enumerate(flags.tolist()) if not is_finite]


def _round_off(state: EigenbasisState) -> float:
    """Return the round-off of a coordinate over the root mean square of all."""
    bases = [basis for basis in (state.left, state.right) if basis is not None]
    return _ROUND_OFF * max((torch.finfo(basis.dtype).eps for basis in bases), default=0.0)
