r"""Blocks of a Kronecker Gram: F = R ⊗ C on weights V of shape (G, O, I), and small dense ones.

In the coordinates of a weight, F v = R V C with the left side R, (G, O, O), and the right side C,
(G, I, I). For a layer R = Σ δδᵀ/N and C = mean āāᵀ.
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
from . import sides


class GramBlock(ABC):
    """The Gram of some coordinates, without coupling to others."""

    #: shape of the coordinates
    shape: tuple[int, ...]

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """F v for v of the block's shape."""

    @abstractmethod
    def dense(self) -> Tensor:
        """F as a matrix, (size, size)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of F, in the block's shape."""

    @abstractmethod
    def solve(self, v: Tensor, damping: float | Tensor = 0.0) -> Tensor:
        """(F + damping)⁺v, exactly."""


@dataclass(frozen=True)
class Pair(GramBlock):
    """R ⊗ C: a left side (G, O, O) and a right side (G, I, I), either one perhaps a diagonal."""

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        square = all(s.ndim == 2 or s.shape[-1] == s.shape[-2] for s in (self.left, self.right))
        got = f"got {tuple(self.left.shape)} and {tuple(self.right.shape)}"
        if {self.left.ndim, self.right.ndim} - {2, 3} or len(self.left) != len(self.right):
            remedy = "Give (G, O, O) and (G, I, I), or (G, n) for a diagonal"
            raise PullbackError("The sides do not fit together", got, remedy)
        if not square:
            remedy = "Give symmetric matrices, or vectors for diagonals"
            raise PullbackError("A side is not square", got, remedy)

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.left), self.left.shape[-1], self.right.shape[-1]

    def matvec(self, v: Tensor) -> Tensor:
        return sides.multiply(self.left, v, self.right)

    def dense(self) -> Tensor:
        left, right = sides.matrix(self.left), sides.matrix(self.right)
        return torch.block_diag(*[torch.kron(x, y) for x, y in zip(left, right, strict=True)])

    def diagonal(self) -> Tensor:
        return sides.diagonal(self.left)[..., None] * sides.diagonal(self.right)[:, None]

    def solve(self, v: Tensor, damping: float | Tensor = 0.0) -> Tensor:
        (rows, u), (columns, w) = sides.eigen(self.left), sides.eigen(self.right)
        return Rotated(u, w, rows[..., None] * columns[:, None]).solve(v, damping)


def rotated(u: Tensor | None, v: Tensor, w: Tensor | None, *, back: bool = False) -> Tensor:
    """UᵀVW, or back U V Wᵀ; None stands for the identity."""
    if u is not None:
        v = (u if back else u.mT) @ v
    return v if w is None else v @ (w.mT if back else w)


@dataclass(frozen=True)
class Rotated(GramBlock):
    """(U ⊗ W) diag(values) (U ⊗ W)ᵀ: eigenbases of two sides with values (G, O, I) of their own."""

    u: Tensor | None
    w: Tensor | None
    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self.values.shape)

    def matvec(self, v: Tensor) -> Tensor:
        return rotated(self.u, self.values * rotated(self.u, v, self.w), self.w, back=True)

    def dense(self) -> Tensor:
        size = self.values.numel()
        eye = torch.eye(size, dtype=self.values.dtype, device=self.values.device)
        return torch.stack([self.matvec(e.view(self.shape)).flatten() for e in eye])

    def diagonal(self) -> Tensor:
        u, w = (None if basis is None else basis.square() for basis in (self.u, self.w))
        return rotated(u, self.values, w, back=True)

    def solve(self, v: Tensor, damping: float | Tensor = 0.0) -> Tensor:
        values = self.values
        keep = sides.cut(values.flatten(1)).view_as(values)  # undamped, on the range only
        keep = keep | (torch.as_tensor(damping, device=values.device) > 0)
        v = torch.where(keep, rotated(self.u, v, self.w) / (values + damping), 0.0)
        return rotated(self.u, v, self.w, back=True)


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
        """(F + damping)⁺, (U, k, k)."""
        m = self.matrices
        if m.shape[-1] == 1:
            shifted = m + damping
            good = shifted > torch.finfo(m.dtype).tiny
            return torch.where(good, 1 / shifted, 0.0)
        if m.shape[-1] == 2 and not isinstance(damping, Tensor) and damping > 0:
            return _two(m, damping)
        values, vectors = torch.linalg.eigh(m)
        keep = sides.cut(values) | (torch.as_tensor(damping, device=m.device) > 0)
        weights = torch.where(keep, 1 / (values.clamp(min=0) + damping), 0.0)
        return (vectors * weights[..., None, :]) @ vectors.mT


def _two(m: Tensor, damping: float) -> Tensor:
    """(F + damping)⁻¹ of 2×2 matrices, the larger entry eliminated: what is left is ≥ damping."""
    entries = m.diagonal(dim1=1, dim2=2).clamp(min=0) + damping
    swap = entries[:, 0] < entries[:, 1]
    large, small = entries.amax(1), entries.amin(1)
    slope = m[:, 0, 1] / large
    rest = (small - m[:, 0, 1] * slope).clamp(min=damping)
    cross = -slope / rest
    one, two = 1 / large - slope * cross, 1 / rest
    first, last = torch.where(swap, two, one), torch.where(swap, one, two)
    return torch.stack([first, cross, cross, last], -1).view_as(m)


def merged(pairs: Sequence[Pair]) -> Pair:
    r"""The Kronecker product with the partial traces of Σ_u R_u ⊗ C_u.

    A parameter used in several roles has a sum of Kronecker products, which is none itself. With
    T = Σ tr R_u tr C_u, the sides R = Σ R_u tr C_u and C = Σ C_u tr R_u / T leave both partial
    traces (hence the trace) of the sum as they are, and one term is left unchanged up to a factor
    between its sides.
    """
    if len(pairs) == 1:
        return pairs[0]
    traces = [(sides.trace(p.left), sides.trace(p.right)) for p in pairs]
    tiny = torch.finfo(pairs[0].left.dtype).tiny
    total = sum((x * y for x, y in traces), torch.zeros_like(traces[0][0])).clamp(min=tiny)
    left = reduce(sides.add, [_scaled(p.left, y) for p, (_, y) in zip(pairs, traces, strict=True)])
    right = reduce(
        sides.add, [_scaled(p.right, x) for p, (x, _) in zip(pairs, traces, strict=True)]
    )
    return Pair(left, _scaled(right, 1 / total))  # in this order: T may be 0 though no trace is


def _scaled(side: Tensor, by: Tensor) -> Tensor:
    return side * by.view(-1, *[1] * (side.ndim - 1))


def as_block(given: Any) -> GramBlock:
    """A block, from a block or a pair (R, C) of matrices or vectors."""
    if isinstance(given, GramBlock):
        return given
    try:
        left, right = given
        grouped = [s if s.ndim == 3 else s[None] for s in (left, right)]
    except (TypeError, ValueError, AttributeError) as error:
        raise PullbackError(
            "A block is not usable",
            f"got {type(given).__name__}",
            "Give pairs (R, C) of the output's and the input's side, or blocks",
        ) from error
    return Pair(*grouped)


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
        order = torch.arange(self.size, device=self.device) if index is None else index
        self._order, self._place = order, order.argsort()

    def matvec(self, v: Tensor) -> Tensor:
        return self._joined([b.matvec(x) for b, x in self._pieces(v)])

    def solve(self, v: Tensor, damping: float = 0.0) -> Tensor:
        """(G + damping)⁺v, exactly, in the eigenbases of the sides."""
        return self._joined([b.solve(x, damping) for b, x in self._pieces(v)])

    def dense(self) -> Tensor:
        matrix = torch.block_diag(*[b.dense() for b in self.blocks])
        return matrix[self._place[:, None], self._place]

    def diagonal(self) -> Tensor:
        return self._joined([b.diagonal() for b in self.blocks])

    def _pieces(self, v: Tensor):
        pieces = v[self._order].split(self._sizes)
        return [(b, x.view(b.shape)) for b, x in zip(self.blocks, pieces, strict=True)]

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.flatten() for x in pieces])[self._place]
