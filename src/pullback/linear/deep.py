r"""Deep matrix factorization β = W₁W₂⋯W_L with exact natural gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.checks import require_finite_tensor, require_number
from .._core.errors import PullbackError, require
from ..grams import FactoredGram
from .grams import FlatFactor, make_tangent_gram
from .minimum_norm import minimum_norm, split_obstacle
from .parameters import FactoredModule, RandomSource, read_whole_numbers
from .tangents import (
    EntryTangent,
    FactorTangent,
    FactorTerm,
    MatrixTangent,
    level_factors,
    products_around,
)


class DeepMatrix(FactoredModule):
    r"""β = W₁W₂⋯W_L, (d₀, d_L), with factors W_i of shape (d_{i−1}, d_i).

    `model()` is β, `model(x)` is xβ for x (..., d₀), and `model(rows, columns)` holds the entries
    β[rows, columns]. In all three `NaturalGradient` finds the Gram in closed form by itself.

    Args:
        dims: d₀, d₁, …, d_L.
        init: the factors themselves, or the gain γ of random ones: entries of W_i are then
            N(0, γ²/d_{i−1}), which for γ = 1 keeps the size of x through the layers.
        generator, seed: where random factors come from.
        dtype, device: of the factors; by default torch's default ones, or those of given factors.

    >>> model = DeepMatrix([4, 6, 5, 3], seed=0)
    >>> [tuple(x.shape) for x in model.natural_gradient(torch.ones(4, 3))]
    [(4, 6), (6, 5), (5, 3)]
    """

    def __init__(
        self,
        dims: Sequence[int],
        init: float | Sequence[Tensor] = 1.0,
        *,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dims = read_whole_numbers("dims", dims)
        if len(self.dims) < 2:
            raise PullbackError(
                "dims names no factor", f"got {self.dims}", "Pass d₀, …, d_L with L ≥ 1"
            )
        source = RandomSource(generator, seed, dtype, device)
        shapes = list(zip(self.dims, self.dims[1:], strict=False))
        if isinstance(init, (int, float)):
            factors = []
            for normal, shape in zip(source.draw(shapes), shapes, strict=True):
                factors.append(float(init) * normal / shape[0] ** 0.5)
            self._set_factors(factors)
        else:
            self._set_factors(source.copy_factors(init, shapes))

    @classmethod
    def of(cls, factors: Sequence[Tensor], **options: Any) -> DeepMatrix:
        """The network with these factors (copied)."""
        factors = [torch.as_tensor(w) for w in factors]
        for i, w in enumerate(factors):
            if i:
                before = factors[i - 1].shape[-1]
            else:
                before = "d"
            require_finite_tensor(f"Factor {i}", w, (before, "d"))
        dims = [w.shape[0] for w in factors] + [w.shape[1] for w in factors[-1:]]
        return cls(dims, factors, **options)

    @property
    def beta(self) -> Tensor:
        """β, (d₀, d_L)."""
        return self.forward()

    def forward(self, x: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        """β, xβ, or the entries β[x, columns] for integer tensors x and columns (n,)."""
        if x is not None and columns is None:
            if x.ndim == 0 or x.shape[-1] != self.dims[0]:
                raise PullbackError(
                    "The input does not fit the model",
                    f"its shape is {tuple(x.shape)}, and the first factor has {self.dims[0]} rows",
                    f"Pass x of shape (..., {self.dims[0]}), or rows and columns of entries",
                )
            z = x
            for w in self.factors:
                z = z @ w
            return z
        beta = self.factors[0]
        for w in list(self.factors)[1:]:
            beta = beta @ w
        if columns is None:
            if self.depth == 1:
                return beta.clone()
            return beta
        return beta[self._read_entries(x, columns)]

    def _read_entries(self, rows: Any, columns: Any) -> tuple[Tensor, Tensor]:
        """Return rows and columns as indices; raise where they are none, or out of range."""
        sizes = self.dims[0], self.dims[-1]
        for name, index, size in zip(("rows", "columns"), (rows, columns), sizes, strict=True):
            remedy = "Pass two integer tensors of shape (n,), such as those of mask.nonzero().T"
            require(_is_index(index), f"The tensor of the entries' {name}", index, remedy)
            if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
                raise PullbackError(
                    f"The {name} of the entries are out of range",
                    f"found {int(index.min())} to {int(index.max())} for a side of {size}",
                    f"Use indices from 0 to {size - 1}",
                )
        if rows.shape != columns.shape:
            raise PullbackError(
                "The entries' rows and columns do not fit each other",
                f"there are {len(rows)} and {len(columns)}",
                "Pass one row and one column per entry",
            )
        return rows.long(), columns.long()

    def natural_gradient(
        self,
        grad: Tensor,
        *,
        entries: tuple[Tensor, Tensor] | None = None,
        damping: float = 0.0,
        rcond: float | None = None,
    ) -> tuple[Tensor, ...]:
        r"""J⁺∇_β: of all moves with J x closest to ∇_β the shortest, one tensor per factor.

        X_i = A_iᵀ Λ B_iᵀ with Σ_i A_iA_iᵀ Λ B_iᵀB_i = ∇_β: for two factors a Sylvester equation.
        Factors may be rank-deficient, and narrow ones give the
        projection of ∇_β onto the tangent space. With damping λ it is Jᵀ(JJᵀ + λ)⁻¹∇_β.

        Args:
            grad: ∇_β, (d₀, d_L); with entries the gradient in these, (n,).
            entries: rows and columns (n,) to which β is restricted: J has only their rows.
            damping: λ ≥ 0.
            rcond: singular values of J below rcond·σ_max count as zero.
        """
        shape: tuple[int, ...] = (self.dims[0], self.dims[-1])
        if entries is not None:
            entries = self._read_entries(*entries)
            shape = entries[0].shape
            if not len(entries[0]):
                raise PullbackError("There are no entries", "rows are empty", "Observe some")
        require_finite_tensor("The gradient", grad, shape)
        if rcond is not None:
            require_number("rcond", rcond, below=1.0)
        dtype = torch.promote_types(self.compute_dtype, grad.dtype)
        factors = self.values(dtype)
        unit = 1.0
        for w in factors:
            require_finite_tensor("A factor", w)
        if damping == 0:
            factors, unit = level_factors(factors)
        tangent = _make_tangent(factors, range(self.depth), entries or ())
        r = grad.detach().to(dtype).flatten() * unit
        move = minimum_norm(tangent, r, damping=damping, rcond=rcond)
        require_finite_tensor("The natural gradient", move)
        return self.like_factors(tangent.split(move))

    def split_natural_gradient(self, grad: Tensor) -> tuple[Tensor, ...]:
        r"""(1/L) A_i⁺ ∇_β B_i⁺ per factor: each factor moves β by ∇_β/L.

        A solution of J x = ∇_β, longer in general than the shortest one (`natural_gradient`); equal
        to it for orthogonal factors. It exists only where every A_i has full row rank and every B_i
        full column rank, so that no inner dimension is below max(d₀, d_L): else it is refused.

        Args:
            grad: ∇_β, (d₀, d_L).
        """
        require_finite_tensor("The gradient", grad, (self.dims[0], self.dims[-1]))
        dtype = torch.promote_types(self.compute_dtype, grad.dtype)
        factors = self.values(dtype)
        target = grad.detach().to(dtype) / self.depth
        if reason := split_obstacle(factors):
            raise PullbackError(
                "The split natural gradient does not exist here",
                reason,
                "Use natural_gradient, which is the shortest solution at any rank, or make every "
                "inner dimension at least max(d₀, d_L)",
            )
        moves = []
        for before, after in zip(*products_around(factors), strict=True):
            moves.append(torch.linalg.pinv(before) @ target @ torch.linalg.pinv(after))
        return self.like_factors(moves)

    def closed_gram(
        self, factors: list[Tensor], chosen: list[int], args: list[Tensor], factor: FlatFactor
    ) -> FactoredGram:
        """By the tangent of β, of xβ or of entries."""
        return make_tangent_gram(_make_tangent(factors, chosen, args), factor)


def _is_index(index: Any) -> bool:
    """Return True if this is a vector of whole numbers."""
    if not isinstance(index, Tensor) or index.ndim != 1:
        return False
    return not index.is_floating_point() and index.dtype != torch.bool


def _make_tangent(
    factors: Sequence[Tensor], chosen: Sequence[int], args: Sequence[Tensor]
) -> FactorTangent:
    """Return the tangent of β, of xβ for args (x,), or of entries for args (rows, columns)."""
    before, after = products_around(factors)
    if len(args) == 1:
        lefts = [args[0].to(a.dtype) @ a for a in before]
    else:
        lefts = before
    terms = [FactorTerm.of(lefts[i], after[i]) for i in chosen]
    if len(args) == 2:
        return EntryTangent(terms, *args)
    return MatrixTangent(terms)
