"""Generalized inverses G⁻ of the Gram, G G⁻ G = G, as solvers: x = G⁻g for g in the range of G.

Whatever the choice, J G⁻g is the same move of the function. They differ in the part of x that
the map does not see. Every one of them is a solver that `NaturalGradient` takes too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._core.checks import require_finite_tensor
from ..._core.errors import PullbackError
from ...grams import FactoredGram, Gram, Rows
from ...solvers import Damping, PseudoInverse, Solution, Solver, resolve


@dataclass(frozen=True)
class Rank:
    """How many directions of Z the parameters can move in; `int(rank)` is the number.

    Attributes:
        rank: the number of singular values above the tolerance.
        spectrum: singular values of A = SᵀJ, decreasing, min(n, p) of them.
        tolerance: the absolute size that counts as zero, rcond·σ_max.
        gap: σ_rank/σ_{rank+1}, infinite where nothing follows: near 1 the rank is a matter of
            taste.
        parameters: p; p − rank directions of Ξ do not move the function.
    """

    rank: int
    spectrum: Tensor
    tolerance: float
    gap: float
    parameters: int

    @classmethod
    def of(cls, gram: Gram, rcond: float) -> Rank:
        """Count the singular values of A above rcond·σ_max."""
        spectrum = _compute_spectrum(gram)
        tolerance = 0.0
        if len(spectrum):
            tolerance = rcond * float(spectrum[0])
        rank = int((spectrum > tolerance).sum())
        return cls(rank, spectrum, tolerance, _measure_gap(spectrum, rank), gram.size)

    def __int__(self) -> int:
        return self.rank

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.parameters} parameters "
            f"(tolerance {self.tolerance:.2g}, gap {self.gap:.2g})"
        )


def _compute_spectrum(gram: Gram) -> Tensor:
    """Return the singular values of A, decreasing; as many as A has rows or columns."""
    sigma = PseudoInverse(rcond=0.0).init(gram).sigma.sort(descending=True).values
    length = min(gram.count, gram.size)
    # the solver leaves out values that are zero, and may return more where it squared A
    missing = max(0, length - len(sigma))
    return torch.cat([sigma[:length], sigma.new_zeros(missing)])


def _measure_gap(spectrum: Tensor, rank: int) -> float:
    """Return σ_rank/σ_{rank+1}, infinite if nothing follows."""
    if rank == len(spectrum) or not float(spectrum[rank]) > 0:
        return float("inf")
    if rank == 0:
        return 0.0
    return float(spectrum[rank - 1]) / float(spectrum[rank])


def choose_rcond(gram: Gram) -> float:
    """Return the default rcond: the round-off of J, and not only of its SVD.

    It is 10·max(n, p, 10)·ε, at most √ε, if A is held; √(10·min(n, p)·ε) if A was squared.
    """
    eps = torch.finfo(gram.dtype).eps
    if gram.structure.holds == "rows":
        return min(10 * max(gram.count, gram.size, 10) * eps, eps**0.5)
    return (10 * min(gram.count, gram.size) * eps) ** 0.5


@dataclass(frozen=True)
class _InverseState:
    """What a solver prepares for one Gram; each solver adds its own fields."""

    gram: Gram


class _UndampedSolver(Solver):
    """A solver with a choice among the solutions of G x = g.

    With damping there is no choice: G + λ has one inverse, and `PseudoInverse` applies it.
    """

    prefers = "rows"

    def solve(
        self,
        state: Any,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        if damping is not None and resolve(damping, state.gram) > 0:
            inverse = PseudoInverse()
            return inverse.solve(inverse.init(state.gram), rhs, damping, whitened=whitened)
        return self._solve_undamped(state, rhs, whitened)

    def _solve_undamped(self, state: Any, rhs: Tensor, whitened: Tensor | None) -> Solution:
        """Return the solver's choice of x with G x = rhs; `whitened` is r with Aᵀr = rhs."""
        raise NotImplementedError


@dataclass(frozen=True)
class _RandomState(_InverseState):
    """G⁺ and the random matrices of `RandomInverse`."""

    #: what `PseudoInverse` prepared
    moore_penrose: Any
    #: an orthonormal basis of the range of G, (rank, p)
    range_basis: Tensor
    #: U and V, (p, p)
    u: Tensor
    v: Tensor

    def project_on_kernel(self, x: Tensor) -> Tensor:
        """Return (I − G⁺G)x, (p,)."""
        if len(self.range_basis) == len(x):
            return torch.zeros_like(x)
        return x - self.range_basis.T @ (self.range_basis @ x)


class RandomInverse(_UndampedSolver):
    r"""G⁻ = G⁺ + (I − G⁺G)U + V(I − GG⁺) with Gaussian U, V: every {1}-inverse is of this form.

    It is not symmetric, and its matrices are drawn in full, (p, p).

    Args:
        seed: of U and V.
        scale: the size of U and V, relative to 1/‖G‖.
        rcond: as in `PseudoInverse`.
    """

    def __init__(self, seed: int = 0, scale: float = 1.0, rcond: float | None = None) -> None:
        self.seed = seed
        self.scale = scale
        self._moore_penrose = PseudoInverse(rcond)

    def init(self, gram: Gram) -> _RandomState:
        state = self._moore_penrose.init(gram)
        eye = torch.eye(state.rank, dtype=gram.dtype, device=gram.device)
        range_basis = state.combine(eye).to(gram.dtype)
        # U and V have the size of 1/‖G‖. With the size of G⁺ the round-off of I − G⁺G in their
        # products would be larger than the solution.
        size = 1.0
        if state.rank:
            size = 1 / float(state.top.double().square())
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, gram.size, gram.size)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, v = (self.scale * size / gram.size**0.5 * normal).to(gram.device, gram.dtype)
        return _RandomState(gram, state, range_basis, u, v)

    def _solve_undamped(
        self, state: _RandomState, rhs: Tensor, whitened: Tensor | None
    ) -> Solution:
        minimum_norm = self._moore_penrose.solve(state.moore_penrose, rhs, whitened=whitened)
        invisible = state.project_on_kernel(state.u @ rhs)
        from_outside_range = state.v @ state.project_on_kernel(rhs)
        x = minimum_norm.x + invisible + from_outside_range
        return Solution(x, 0.0, minimum_norm.rank, status=minimum_norm.status)


@dataclass(frozen=True)
class _DiagonalRoot:
    """L of W = L Lᵀ for a diagonal W."""

    diagonal: Tensor

    def solve(self, columns: Tensor) -> Tensor:
        """Return L⁻¹ times columns (p, k)."""
        return columns / self.diagonal[:, None]

    def solve_transposed(self, columns: Tensor) -> Tensor:
        """Return L⁻ᵀ times columns (p, k)."""
        return self.solve(columns)


@dataclass(frozen=True)
class _CholeskyRoot:
    """L of W = L Lᵀ for a full W."""

    lower: Tensor

    def solve(self, columns: Tensor) -> Tensor:
        """Return L⁻¹ times columns (p, k)."""
        return torch.linalg.solve_triangular(self.lower, columns, upper=False)

    def solve_transposed(self, columns: Tensor) -> Tensor:
        """Return L⁻ᵀ times columns (p, k)."""
        return torch.linalg.solve_triangular(self.lower.T, columns, upper=True)


@dataclass(frozen=True)
class _WeightedState(_InverseState):
    """L of the weight, and (A L⁻ᵀ)⁺."""

    root: _DiagonalRoot | _CholeskyRoot
    #: what `PseudoInverse` prepared for the rows A L⁻ᵀ
    moore_penrose: Any


class WeightedNorm(_UndampedSolver):
    r"""Of all x with G x = g, the one of smallest xᵀWx, for a positive definite W.

    With W = L Lᵀ it is x = L⁻ᵀ(A L⁻ᵀ)⁺r. Pulled back through a reparametrization ξ = f(θ),
    W = (df dfᵀ)⁻¹ gives the Moore–Penrose solution of the other chart.

    Args:
        weight: W as a matrix (p, p), or its diagonal (p,).
        rcond: as in `PseudoInverse`, for A L⁻ᵀ.
    """

    def __init__(self, weight: Tensor, rcond: float | None = None) -> None:
        require_finite_tensor("The weight", weight)
        self.weight = weight
        self._moore_penrose = PseudoInverse(rcond)

    def init(self, gram: Gram) -> _WeightedState:
        root = self._find_root(gram)
        if not isinstance(gram, FactoredGram):
            raise PullbackError(
                "The weighted inverse needs A", "only G is held", 'Use gram="rows" or "auto"'
            )
        weighted_rows = root.solve(gram.rows().T).T
        return _WeightedState(gram, root, self._moore_penrose.init(Rows(weighted_rows)))

    def _solve_undamped(
        self, state: _WeightedState, rhs: Tensor, whitened: Tensor | None
    ) -> Solution:
        weighted_rhs = state.root.solve(rhs[:, None])[:, 0]
        solution = self._moore_penrose.solve(state.moore_penrose, weighted_rhs, whitened=whitened)
        x = state.root.solve_transposed(solution.x[:, None])[:, 0]
        return Solution(x, 0.0, solution.rank, status=solution.status)

    def _find_root(self, gram: Gram) -> _DiagonalRoot | _CholeskyRoot:
        """Return L with W = L Lᵀ; raise unless W fits and is positive definite."""
        weight = self.weight.detach().to(gram.device, gram.dtype)
        if tuple(weight.shape) not in ((gram.size,), (gram.size, gram.size)):
            raise PullbackError(
                "The weight does not fit the parameters",
                f"got {tuple(weight.shape)} for {gram.size} parameters",
                "Pass a positive definite matrix (p, p), or its diagonal (p,)",
            )
        if weight.ndim == 1:
            is_definite = bool((weight > 0).all())
            root = _DiagonalRoot(weight.clamp(min=0).sqrt())
        else:
            lower, info = torch.linalg.cholesky_ex(weight)
            is_definite = bool(info == 0) and bool(torch.allclose(weight, weight.T))
            root = _CholeskyRoot(lower)
        if not is_definite:
            raise PullbackError(
                "The weight is not positive definite",
                "xᵀWx would be no norm, and its smallest solution not unique",
                "Use a symmetric positive definite W",
            )
        return root
