"""Spectral descent whitened on both sides: of a layer's inputs and of its cotangents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ....grams.kronecker import factor_matrix
from ....grams.kronecker.roots import half_precision, scale_to_half
from ..arguments import check
from .adamw import AdamW
from .base import (
    REFRESHED,
    BlockShape,
    Defaults,
    Estimation,
    FactorAverages,
    Rule,
    Statistics,
)
from .spectral import FILTERS, Filters, Spectral, SpectralState, join, separate


@dataclass(kw_only=True)
class TwoSidedState(SpectralState):
    """The inverse root of the output factor beside the state of `Spectral`.

    Of a weight that holds several matrices there is one root for each, of that part of the factor.
    They lie one below the other, each as wide as the largest.
    """

    #: (R + λ tr(R)/m)^(-½) up to a number, (B, m, m), or (B, m) of a diagonal
    output_root: Tensor = field(metadata=REFRESHED)


class TwoSided(Spectral):
    r"""All singular directions of the momentum alike, whitened on both sides:

        X = (R + λ tr(R)/m)^(-½) M (C + λ tr(C)/n)^(-½),    U = polar(X),    Δ = D U,

    with M, C, D and λ of `Spectral`, and R = mean δδᵀ of the loss's own cotangents δ at the
    layer's outputs. They come from the backward pass of the loss itself, so there is no second
    one, but where samples meet, as in a batch norm in training mode: there statistics take a
    second one, in which each sample's loss has a random sign. Momentum is shorter than that of
    `Spectral`, and AdamW takes the whole rate for the other parameters.

    Relatives: K-FAC's direction is R⁻¹ M C⁻¹; its half powers, and the polar factor of what they
    give, are in between it and Muon (Jordan et al., 2024). Shampoo (Gupta et al., 2018,
    arXiv:1802.09568) has the powers -¼ of GGᵀ and GᵀG, which for one gradient G is polar(G).

    Args:
        momentum, adapt, damping, agreement, head, filters, gentle_start, warmup, cuda_graph: as in
            `Spectral`; λ is of both sides.
        likelihood: of the outputs; it matters where samples are counted or drawn.
        estimation: how R and C are estimated; with the loss's own cotangents unless it says more.
        others: the rule for all other parameters.
    """

    name: ClassVar = "two-sided"
    reads: ClassVar = Statistics.INPUTS_AND_OUTPUTS
    distinguishes_sides: ClassVar = True
    defaults: ClassVar = Defaults(lr=6e-3, statistics_every=10, invert_every=20)
    has_fixed_operations: ClassVar = True
    has_fixed_refresh: ClassVar = True

    def __init__(
        self,
        momentum: float = 0.85,
        adapt: float = 0.95,
        *,
        damping: float = 0.2,
        agreement: bool = True,
        head: bool = False,
        filters: Filters | None = FILTERS,
        gentle_start: bool | None = None,
        warmup: int = 0,
        cuda_graph: bool | None = None,
        likelihood: Any = None,
        estimation: Estimation | None = None,
        others: Rule | None = None,
    ) -> None:
        check(estimation=estimation)
        if estimation is None:
            estimation = Estimation()
        if others is None:
            others = AdamW()
        estimation = estimation.with_defaults(
            None, default_fisher="empirical", default_ema=self.default_ema
        )
        super().__init__(
            momentum, adapt, damping=damping, agreement=agreement, head=head,
            filters=filters, gentle_start=gentle_start, warmup=warmup, cuda_graph=cuda_graph,
            others=others, estimation=estimation.with_metric(likelihood, None),
        )  # fmt: skip

    def init(self, shape: BlockShape) -> TwoSidedState:
        state = super().init(shape)
        blocks, rows, _ = shape.size
        output_root = shape.zeros(blocks, rows)
        if shape.dense_rows:
            widest = max(shape.split, default=rows)
            output_root = shape.zeros(blocks, rows, widest, dtype=half_precision(output_root))
        return TwoSidedState(**vars(state), output_root=output_root)

    def fits(self, shape: BlockShape) -> bool:
        return shape.dense_columns

    def list_factors(self, averages: FactorAverages, state: SpectralState) -> list[Tensor]:
        input_factors = super().list_factors(averages, state)
        return input_factors + _separate_factor(averages.pair.output_factor, state.split)

    def set_roots(self, state: SpectralState, roots: Sequence[Tensor]) -> None:
        assert isinstance(state, TwoSidedState)
        super().set_roots(state, roots)
        _, *output_roots = roots
        if not factor_matrix.is_diagonal(state.output_root):
            widest = state.output_root.shape[2]
            output_roots = [F.pad(root, (0, widest - root.shape[2])) for root in output_roots]
        state.output_root = torch.cat(output_roots, dim=1).to(state.output_root.dtype)

    def whiten(self, momentum: Tensor, squares: Tensor, state: SpectralState) -> Tensor:
        """Return (R + λ tr(R)/m)^(-½) M (C + λ tr(C)/n)^(-½), each matrix up to a number."""
        assert isinstance(state, TwoSidedState)
        half_whitened = super().whiten(momentum, squares, state)
        if factor_matrix.is_diagonal(state.output_root):
            return state.output_root[:, :, None].to(half_whitened.dtype) * half_whitened
        matrices = separate(half_whitened, state.split)
        roots = separate(state.output_root, state.split)
        whitened = [_multiply(*pair) for pair in zip(roots, matrices, strict=True)]
        return join(whitened, half_whitened.shape)


def _separate_factor(factor: Tensor, split: Sequence[int]) -> list[Tensor]:
    """Return the factors of the matrices that lie one below the other in a weight."""
    if not split:
        return [factor]
    if factor_matrix.is_diagonal(factor):
        return list(factor.split(list(split), dim=1))
    stops = list(accumulate(split))
    parts = [slice(stop - rows, stop) for rows, stop in zip(split, stops, strict=True)]
    return [factor[:, part, part] for part in parts]


def _multiply(root: Tensor, matrix: Tensor) -> Tensor:
    """Return RX up to a number, of the columns of the root that count."""
    root = root[:, :, : matrix.shape[1]]
    if matrix.dtype != root.dtype:
        matrix = scale_to_half(matrix, torch.linalg.matrix_norm(matrix, keepdim=True))
    return torch.bmm(root, matrix)
