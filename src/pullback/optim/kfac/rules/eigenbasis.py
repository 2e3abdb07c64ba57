"""Adam in the eigenbases of K-FAC's factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....grams.kronecker.roots import (
    BasisTurn,
    eigenbasis,
    half_precision,
    rotate,
    turn_bases,
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

    def turn(self, left: BasisTurn | None, right: BasisTurn | None) -> None:
        """Take turned bases, and bring the first moment to their coordinates.

        None stands for a diagonal factor, whose basis is the identity.
        """
        row_rotation: Tensor | None = None
        column_rotation: Tensor | None = None
        if left is not None:
            self.left = left.basis
            row_rotation = left.rotation
        if right is not None:
            self.right = right.basis
            column_rotation = right.rotation
        self.first = rotate(self.first, row_rotation, column_rotation)


class Eigenbasis(Rule):
    r"""Adam's step for the coordinates in which K-FAC's factors R and C are diagonal:

        g = Uᵀ G W,   m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   Δ = U (m̂/√v̂) Wᵀ,

    with U, W the eigenbases of R = mean δδᵀ, of the loss's own cotangents, and C = mean aaᵀ. When
    they turn, m turns with them; v, which varies less from coordinate to coordinate, stays. The
    step does not depend on rotations of a layer's inputs and outputs. To √v̂ the round-off of a
    coordinate is added, so that directions without a gradient stay at rest. First bases of large
    sides are divided over the first steps; until then AdamW moves a matrix.

    Relatives: SOAP (Vyas et al., 2024, arXiv:2409.11321) does the same in the eigenbases of
    Shampoo's factors GGᵀ and GᵀG (Gupta et al., 2018, arXiv:1802.09568) instead of K-FAC's. EKFAC
    (George et al., 2018, arXiv:1806.03884) divides by second moments of the samples' gradients,
    not by their root.

    Args:
        betas: the weights of the past in m and v. A short memory of the gradient lets two networks
            train against each other, and costs little elsewhere.
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
    refreshes_together: ClassVar = True

    def __init__(
        self,
        betas: tuple[float, float] = (0.5, 0.99),
        eps: float = 1e-8,
        *,
        head: bool = True,
        cuda_graph: bool = False,
        likelihood: Any = None,
        metric: Any = None,
        fisher: str | None = None,
        estimation: Estimation | None = None,
        others: Rule | None = None,
    ) -> None:
        check(betas=betas, eps=eps, head=head, cuda_graph=cuda_graph, estimation=estimation)
        self.betas = betas
        self.eps = eps
        self.takes_head = head
        self.cuda_graph = cuda_graph
        if estimation is None:
            estimation = Estimation()
        estimation = estimation.with_defaults(
            fisher, default_fisher="empirical", default_ema=self.default_ema
        )
        self.estimation = estimation.with_metric(likelihood, metric)
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
        (report,) = self.refresh_stacks([averages], [state])
        return report

    def refresh_stacks(
        self, averages: Sequence[FactorAverages], states: Sequence[RuleState]
    ) -> Iterator[RefreshReport]:
        """Refresh all stacks; their bases are turned together."""
        turns = iter(_turn_all(averages, states))
        for stack, state in zip(averages, states, strict=True):
            assert isinstance(state, EigenbasisState)
            if stack.is_first:
                state.left = _find_basis(stack.pair.output_factor, state.left)
                state.right = _find_basis(stack.pair.input_factor, state.right)
            else:
                state.turn(next(turns), next(turns))
            report = RefreshReport()
            for block in _find_broken_blocks(state.left, state.right):
                report.fail(block, "its eigenbases were not found")
            yield report

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        (direction,) = self.directions([gradient], [state], step)
        return direction

    def directions(
        self, gradients: Sequence[Tensor], states: Sequence[RuleState], step: StepContext
    ) -> list[Tensor]:
        """Return the directions of stacks; a call on all of them replaces one on each."""
        stacks = [state for state in states if isinstance(state, EigenbasisState)]
        beta1, beta2 = self.betas
        coordinates = [rotate(g, s.left, s.right) for g, s in zip(gradients, stacks, strict=True)]
        first = [s.first for s in stacks]
        second = [s.second for s in stacks]
        for state in stacks:
            step.add_one(state.steps)
        step.average_all(first, coordinates, 1 - beta1)
        step.average_all(second, list(torch._foreach_mul(coordinates, coordinates)), 1 - beta2)

        # one number for each block: blocks of all stacks are side by side
        steps = torch.cat([s.steps for s in stacks])
        unbias1 = 1 - beta1**steps
        root_unbias2 = (1 - beta2**steps).sqrt_()
        sizes = list(torch._foreach_sqrt(second))
        offsets = _find_round_off(stacks).add_(root_unbias2, alpha=self.eps)
        torch._foreach_add_(sizes, _split_by_stack(offsets, stacks))
        ratios = list(torch._foreach_div(first, sizes))
        torch._foreach_mul_(ratios, _split_by_stack(root_unbias2.div_(unbias1), stacks))
        return [
            rotate(ratio, s.left, s.right, back=True)
            for ratio, s in zip(ratios, stacks, strict=True)
        ]


def _find_basis(factor: Tensor, basis: Tensor | None) -> Tensor | None:
    """Return the eigenbasis of a factor in the dtype of `basis`; None for a diagonal one."""
    if basis is None:
        return None
    return eigenbasis(factor).to(basis.dtype)


def _turn_all(
    averages: Sequence[FactorAverages], states: Sequence[RuleState]
) -> list[BasisTurn | None]:
    """Return two turns for each stack that has bases already: of its rows and of its columns."""
    factors: list[Tensor] = []
    bases: list[Tensor | None] = []
    for stack, state in zip(averages, states, strict=True):
        assert isinstance(state, EigenbasisState)
        if not stack.is_first:
            factors += [stack.pair.output_factor, stack.pair.input_factor]
            bases += [state.left, state.right]
    return turn_bases(factors, bases)


def _find_broken_blocks(left: Tensor | None, right: Tensor | None) -> list[int]:
    """Return the blocks one of whose bases is not finite."""
    bases = [basis for basis in (left, right) if basis is not None]
    # entries are at most 1, so that sums are finite if all of them are
    sums = torch.stack([basis.sum((1, 2), dtype=torch.float32) for basis in bases]).sum(0)
    return [block for block, total in enumerate(sums.tolist()) if not isfinite(total)]


def _find_round_off(stacks: Sequence[EigenbasisState]) -> Tensor:
    """Return the round-off of the coordinates of every block of all stacks."""
    mean_squares = torch.cat([state.second.mean((1, 2)) for state in stacks])
    return mean_squares.sqrt_().mul_(max(map(_find_relative_round_off, stacks)))


def _split_by_stack(numbers: Tensor, stacks: Sequence[EigenbasisState]) -> list[Tensor]:
    """Return numbers of all blocks as those of each stack, (B, 1, 1)."""
    return list(numbers.view(-1, 1, 1).split([len(state.steps) for state in stacks]))


def _find_relative_round_off(state: EigenbasisState) -> float:
    """Return the round-off of a coordinate over the root mean square of all."""
    dtypes = {basis.dtype for basis in (state.left, state.right) if basis is not None}
    return _ROUND_OFF * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
