r"""Blocks of a Kronecker Gram: F = R ⊗ C on weights V of shape (G, O, I), and small dense ones.

In the coordinates of a weight, F v = R V C with the output factor R, (G, O, O), and the input
factor C, (G, I, I). For a layer R = Σ δδᵀ/N and C = mean āāᵀ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..forms import Gram, Structure
from . import factor_matrix


class GramBlock(ABC):
    """The Gram of some coordinates, without coupling to others."""

    #: shape of the coordinates
    shape: tuple[int, ...]

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """Return F v for v of the block's shape."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return F as a matrix, (size, size)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonal of F, in the block's shape."""

    @abstractmethod
    def solve(self, v: Tensor, damping: float | Tensor = 0.0) -> Tensor:
        """Return (F + damping)⁺v, exactly."""


@dataclass(frozen=True)
class Pair(GramBlock):
    """R ⊗ C: an output factor (G, O, O) and an input factor (G, I, I); (G, n) is a diagonal."""

    output_factor: Tensor
    input_factor: Tensor

    def __post_init__(self) -> None:
        """Raise if the factors are not square, or not of one number of groups."""
        factors = (self.output_factor, self.input_factor)
        shapes = f"got {tuple(self.output_factor.shape)} and {tuple(self.input_factor.shape)}"
        if any(factor.ndim not in (2, 3) for factor in factors) or len(factors[0]) != len(
            factors[1]
        ):
            raise PullbackError(
                "The Kronecker factors do not fit together",
                shapes,
                "Give (G, O, O) and (G, I, I), or (G, n) for a diagonal",
            )
        if any(factor.ndim == 3 and factor.shape[1] != factor.shape[2] for factor in factors):
            raise PullbackError(
                "A Kronecker factor is not square",
                shapes,
                "Give symmetric matrices, or vectors for diagonals",
            )

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.output_factor), self.output_factor.shape[-1], self.input_factor.shape[-1]

    def matvec(self, v: Tensor) -> Tensor:
        return factor_matrix.multiply(self.output_factor, v, self.input_factor)

    def dense(self) -> Tensor:
        output_matrices = factor_matrix.to_matrix(self.output_factor)
        input_matrices = factor_matrix.to_matrix(self.input_factor)
        groups = zip(output_matrices, input_matrices, strict=True)
        return torch.block_diag(*[torch.kron(r, c) for r, c in groups])

    def diagonal(self) -> Tensor:
        output_diagonal = factor_matrix.diagonal(self.output_factor)
        input_diagonal = factor_matrix.diagonal(self.input_factor)
        return output_diagonal[..., None] * input_diagonal[:, None]

    def solve(self, v: Tensor, damping: float | Tensor = 0.0) -> Tensor:
        return self.eigen_block().solve(v, damping)

    def eigen_block(self) -> EigenBlock:
        """Return the same block in the eigenbases of its factors."""
        output_values, output_basis = factor_matrix.eigendecompose(self.output_factor)
        input_values, input_basis = factor_matrix.eigendecompose(self.input_factor)
        eigenvalues = output_values[..., None] * input_values[:, None]
        return EigenBlock(output_basis, input_basis, eigenvalues)


def to_bases(output_basis: Tensor | None, v: Tensor, input_basis: Tensor | None) -> Tensor:
    """Return UᵀVW, the coordinates of V in two bases; None stands for the identity."""
    if output_basis is not None:
        v = output_basis.mT @ v
    if input_basis is not None:
        v = v @ input_basis
    return v


def from_bases(output_basis: Tensor | None, v: Tensor, input_basis: Tensor | None) -> Tensor:
    """Return U V Wᵀ, from coordinates in two bases; None stands for the identity."""
    if output_basis is not None:
        v = output_basis @ v
    if input_basis is not None:
        v = v @ input_basis.mT
    return v


@dataclass(frozen=True)
class EigenBlock(GramBlock):
    """(U ⊗ W) diag(eigenvalues) (U ⊗ W)ᵀ: two orthonormal bases, and eigenvalues (G, O, I)."""

    output_basis: Tensor | None
    input_basis: Tensor | None
    eigenvalues: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self.eigenvalues.shape)

    def matvec(self, v: Tensor) -> Tensor:
        coordinates = to_bases(self.output_basis, v, self.input_basis)
        return from_bases(self.output_basis, self.eigenvalues * coordinates, self.input_basis)

    def dense(self) -> Tensor:
        size = self.eigenvalues.numel()
        eye = torch.eye(size, dtype=self.eigenvalues.dtype, device=self.eigenvalues.device)
        return torch.stack([self.matvec(e.view(self.shape)).flatten() for e in eye])

    def diagonal(self) -> Tensor:
        squares = self.eigenvalues
        if self.output_basis is not None:
            squares = self.output_basis.square() @ squares
        if self.input_basis is not None:
            squares = squares @ self.input_basis.square().mT
        return squares

    def solve(self, v: Tensor, damping: float | Tensor = 0.0) -> Tensor:
        eigenvalues = self.eigenvalues
        is_used = factor_matrix.is_above_round_off(eigenvalues.flatten(1)).view_as(eigenvalues)
        # without damping the inverse is one on the range only
        is_used = is_used | (torch.as_tensor(damping, device=eigenvalues.device) > 0)
        coordinates = to_bases(self.output_basis, v, self.input_basis)
        solved = torch.where(is_used, coordinates / (eigenvalues + damping), 0.0)
        return from_bases(self.output_basis, solved, self.input_basis)


@dataclass(frozen=True)
class Units(GramBlock):
    """One small matrix per unit, (U, k, k): gain and shift of a channel, or single entries."""

    matrices: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self.matrices.shape[:2])

    def matvec(self, v: Tensor) -> Tensor:
        return (self.matrices @ v[..., None])[..., 0]

    def dense(self) -> Tensor:
        return torch.block_diag(*self.matrices)

    def diagonal(self) -> Tensor:
        return self.matrices.diagonal(dim1=-2, dim2=-1)

    def solve(self, v: Tensor, damping: float | Tensor = 0.0) -> Tensor:
        return (self.inverse(damping) @ v[..., None])[..., 0]

    def inverse(self, damping: float | Tensor = 0.0) -> Tensor:
        """Return (F + damping)⁺, (U, k, k)."""
        matrices = self.matrices
        k = matrices.shape[-1]
        if k == 1:
            damped = matrices + damping
            return torch.where(damped > torch.finfo(matrices.dtype).tiny, 1 / damped, 0.0)
        if k == 2 and not isinstance(damping, Tensor) and damping > 0:
            return _invert_two_by_two(matrices, damping)
        eigenvalues, eigenvectors = torch.linalg.eigh(matrices)
        is_used = factor_matrix.is_above_round_off(eigenvalues)
        is_used = is_used | (torch.as_tensor(damping, device=matrices.device) > 0)
        reciprocals = torch.where(is_used, 1 / (eigenvalues.clamp(min=0) + damping), 0.0)
        return (eigenvectors * reciprocals[..., None, :]) @ eigenvectors.mT


def _invert_two_by_two(matrices: Tensor, damping: float) -> Tensor:
    """Return (F + damping)⁻¹ of 2×2 matrices ⪰ 0.

    The larger diagonal entry is the pivot. The Schur complement is then at least the damping,
    whatever round-off does.
    """
    entries = matrices.diagonal(dim1=1, dim2=2).clamp(min=0) + damping
    pivot = entries.amax(1)
    slope = matrices[:, 0, 1] / pivot
    schur_complement = (entries.amin(1) - matrices[:, 0, 1] * slope).clamp(min=damping)
    off_diagonal = -slope / schur_complement
    at_pivot = 1 / pivot - slope * off_diagonal
    beside_pivot = 1 / schur_complement
    pivot_is_second = entries[:, 0] < entries[:, 1]
    first = torch.where(pivot_is_second, beside_pivot, at_pivot)
    second = torch.where(pivot_is_second, at_pivot, beside_pivot)
    return torch.stack([first, off_diagonal, off_diagonal, second], -1).view_as(matrices)


def merge_pairs(pairs: Sequence[Pair]) -> Pair:
    r"""Return the Kronecker product with the partial traces of Σ_u R_u ⊗ C_u.

    A parameter used in several roles has a sum of Kronecker products, which is none itself. With
    T = Σ tr R_u tr C_u, the factors R = Σ R_u tr C_u and C = Σ C_u tr R_u / T leave both partial
    traces (hence the trace) of the sum as they are, and one term is left unchanged up to a number
    that moves from one factor to the other.
    """
    if len(pairs) == 1:
        return pairs[0]
    total_trace = torch.zeros_like(factor_matrix.trace(pairs[0].output_factor))
    output_terms = []
    input_terms = []
    for pair in pairs:
        output_trace = factor_matrix.trace(pair.output_factor)
        input_trace = factor_matrix.trace(pair.input_factor)
        total_trace = total_trace + output_trace * input_trace
        output_terms.append(_scale_groups(pair.output_factor, input_trace))
        input_terms.append(_scale_groups(pair.input_factor, output_trace))
    output_factor = reduce(factor_matrix.add, output_terms)
    input_factor = reduce(factor_matrix.add, input_terms)
    # divided at last: T may be 0 though no trace is
    inverse_trace = 1 / total_trace.clamp(min=torch.finfo(total_trace.dtype).tiny)
    return Pair(output_factor, _scale_groups(input_factor, inverse_trace))


def _scale_groups(factor: Tensor, numbers: Tensor) -> Tensor:
    return factor * factor_matrix.per_group(numbers, factor)


def as_block(block: Any) -> GramBlock:
    """Return a block, from a block or a pair (R, C) of matrices or vectors."""
    if isinstance(block, GramBlock):
        return block
    try:
        output_factor, input_factor = block
        return Pair(_add_group_axis(output_factor), _add_group_axis(input_factor))
    except (TypeError, ValueError, AttributeError) as error:
        raise PullbackError(
            "A block is not usable",
            f"got {type(block).__name__}",
            "Give pairs (R, C) of the output's and the input's factor, or blocks",
        ) from error


def _add_group_axis(factor: Tensor) -> Tensor:
    if factor.ndim == 3:
        return factor
    return factor[None]


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
        self.blocks = [as_block(block) for block in blocks]
        if not self.blocks:
            raise PullbackError("The Gram has no blocks", "nothing was given", "Pass some")
        self._sizes = [prod(block.shape) for block in self.blocks]
        self.size = sum(self._sizes)
        self.count = self.size
        diagonal = self.blocks[0].diagonal()
        self.dtype = diagonal.dtype
        self.device = diagonal.device
        if index is None:
            index = torch.arange(self.size, device=self.device)
        self._gram_position = index
        self._block_position = index.argsort()

    def matvec(self, v: Tensor) -> Tensor:
        pieces = self._split(v)
        return self._join([b.matvec(x) for b, x in zip(self.blocks, pieces, strict=True)])

    def solve(self, v: Tensor, damping: float = 0.0) -> Tensor:
        """Return (G + damping)⁺v, exactly, in the eigenbases of the factors."""
        pieces = self._split(v)
        return self._join([b.solve(x, damping) for b, x in zip(self.blocks, pieces, strict=True)])

    def dense(self) -> Tensor:
        matrix = torch.block_diag(*[block.dense() for block in self.blocks])
        return matrix[self._block_position[:, None], self._block_position]

    def diagonal(self) -> Tensor:
        return self._join([block.diagonal() for block in self.blocks])

    def _split(self, v: Tensor) -> list[Tensor]:
        """Return the coordinates of each block, in its shape."""
        pieces = v[self._gram_position].split(self._sizes)
        return [x.view(block.shape) for block, x in zip(self.blocks, pieces, strict=True)]

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the vector of the Gram from the coordinates of each block."""
        return torch.cat([x.flatten() for x in pieces])[self._block_position]
