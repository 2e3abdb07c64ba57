r"""Preconditioned gradients P = (G + λ)⁻¹∇f of queries, as they are stored for scoring.

One query takes as many numbers as the model has parameters. Compressed, its matrix of a block is
P ≈ Σ_r l_r r_rᵀ with as many terms as an error that the user states allows. Scores with a training
gradient V = Σ_t δ_t ā_tᵀ are then Σ_r Σ_t (l_rᵀδ_t)(r_rᵀā_t), products of two small Grams, or P is
formed again, one block of parameters at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .capture import LIMITS, GradientBlock, PositionFactors


class StoredQueries(ABC):
    """P of some queries, for one block of the curvature."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Return the number of queries."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Return the memory that they take."""

    @abstractmethod
    def score(self, gradient: GradientBlock, panel: slice) -> Tensor:
        """Return ⟨P_q, V_n⟩ for the training samples in a slice, (queries, n)."""


@dataclass(frozen=True)
class DenseQueries(StoredQueries):
    """P as it is, (queries, size)."""

    gradients: Tensor

    @property
    def count(self) -> int:
        return len(self.gradients)

    @property
    def bytes(self) -> int:
        return self.gradients.nbytes

    def score(self, gradient: GradientBlock, panel: slice) -> Tensor:
        matrices = gradient.matrices(panel)[:, 0].flatten(1)
        return self.gradients @ matrices.to(self.gradients.dtype).T


@dataclass(frozen=True)
class LowRankQueries(StoredQueries):
    """P ≈ Σ_r left_r right_rᵀ.

    Attributes:
        left: (queries, rank, G, O).
        right: (queries, rank, G, I).
    """

    left: Tensor
    right: Tensor

    @property
    def count(self) -> int:
        return len(self.left)

    @property
    def bytes(self) -> int:
        return self.left.nbytes + self.right.nbytes

    @property
    def rank(self) -> int:
        """Return the number of rank-one terms of each query."""
        return self.left.shape[1]

    def score(self, gradient: GradientBlock, panel: slice) -> Tensor:
        factors = gradient.position_factors(panel)
        if factors is not None and self._should_score_by_grams(factors):
            return self._score_by_grams(factors)
        matrices = gradient.matrices(panel)[:, 0].flatten(1).to(self.left.dtype)
        expanded = torch.einsum("qrgo,qrgi->qgoi", self.left, self.right)
        return expanded.flatten(1) @ matrices.T

    def _should_score_by_grams(self, factors: PositionFactors) -> bool:
        """Return True if products with ā and δ at all positions are fewer than those with V."""
        rows = self.left.shape[-1]
        columns = self.right.shape[-1]
        return factors.positions * self.rank * (rows + columns) < rows * columns

    def _score_by_grams(self, factors: PositionFactors) -> Tensor:
        inputs = factors.inputs.to(self.left.dtype)
        cotangents = factors.cotangents[:, 0].to(self.left.dtype)
        entries = self.rank * inputs.shape[0] * inputs.shape[1] * factors.positions
        height = max(1, LIMITS.panel_entries // max(1, entries))
        scores = []
        for left, right in zip(self.left.split(height), self.right.split(height), strict=True):
            output_gram = torch.einsum("qrgo,ngto->qnrgt", left, cotangents)
            input_gram = torch.einsum("qrgi,ngti->qnrgt", right, inputs)
            scores.append((output_gram * input_gram).sum((2, 3, 4)))
        return torch.cat(scores)


def store_queries(matrices: Tensor, dtype: torch.dtype, error: float | None) -> StoredQueries:
    """Return P of shape (queries, G, O, I) as it is held: whole, or up to a relative error.

    A block whose matrices have one row or one column is held whole.
    """
    shorter_side = min(matrices.shape[-2:])
    if error is None or shorter_side == 1:
        return DenseQueries(matrices.flatten(1).to(dtype))
    left, right = compress_matrices(matrices, error)
    return LowRankQueries(left.to(dtype), right.to(dtype))


def compress_matrices(matrices: Tensor, error: float) -> tuple[Tensor, Tensor]:
    r"""Return left (Q, r, G, O) and right (Q, r, G, I) with ‖P − Σ_r l rᵀ‖ ≤ error·‖P‖ per query.

    The directions are the leading eigenvectors of PPᵀ or PᵀP, whichever is smaller. In the sum
    over the groups of a query the largest tail decides, so that all groups have one rank.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    oriented = matrices.mT if is_tall else matrices
    double = oriented.double()
    values, vectors = torch.linalg.eigh(double @ double.mT)
    values = values.clamp(min=0).flip(-1)
    tails = values.sum((1, 2))[:, None] - values.sum(1).cumsum(-1)
    is_enough = tails <= error**2 * values.sum((1, 2))[:, None]
    # the first rank at which the tail is small, for the worst query
    rank = int((~is_enough).sum(-1).amax()) + 1
    basis = vectors.flip(-1)[..., : min(rank, values.shape[-1])]
    coordinates = basis.mT @ double
    short = basis.mT.movedim(1, 2).to(matrices.dtype)
    long = coordinates.movedim(1, 2).to(matrices.dtype)
    if is_tall:
        return long, short
    return short, long


def join_queries(pieces: Sequence[StoredQueries]) -> StoredQueries:
    """Return queries of one block one after another; shorter ranks are filled with zeros."""
    if len(pieces) == 1:
        return pieces[0]
    dense = [piece.gradients for piece in pieces if isinstance(piece, DenseQueries)]
    if dense:
        return DenseQueries(torch.cat(dense))
    compressed = [piece for piece in pieces if isinstance(piece, LowRankQueries)]
    rank = max(piece.rank for piece in compressed)
    left = torch.cat([_pad_rank(piece.left, rank) for piece in compressed])
    right = torch.cat([_pad_rank(piece.right, rank) for piece in compressed])
    return LowRankQueries(left, right)


def _pad_rank(tensor: Tensor, rank: int) -> Tensor:
    """Return (Q, r, G, n) with zeros up to a rank."""
    return F.pad(tensor, (0, 0, 0, 0, 0, rank - tensor.shape[1]))


@dataclass
class QueryBlock:
    """Preconditioned gradients of some queries.

    Attributes:
        start: index of the first query.
        by_block: one entry for each block of the curvature.
    """

    start: int
    by_block: list[StoredQueries]

    @property
    def count(self) -> int:
        """Return the number of queries."""
        return self.by_block[0].count

    @property
    def bytes(self) -> int:
        """Return the memory that they take."""
        return sum(queries.bytes for queries in self.by_block)


def join_blocks(blocks: Sequence[QueryBlock]) -> QueryBlock:
    """Return queries that follow each other as one block."""
    columns = zip(*[block.by_block for block in blocks], strict=True)
    return QueryBlock(blocks[0].start, [join_queries(pieces) for pieces in columns])
