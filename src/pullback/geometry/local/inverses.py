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
        """Compute the rank from the singular values of A."""
        sigma = PseudoInverse(rcond=0.0).init(gram).sigma.sort(descending=True).values
        full = min(gram.count, gram.size)
        spectrum = sigma.new_zeros(max(full, len(sigma)))
        spectrum[: len(sigma)] = sigma
        spectrum = spectrum[:full]
        tolerance = rcond * float(spectrum[0]) if full else 0.0
        rank = int((spectrum > tolerance).sum())
        last = float(spectrum[rank - 1]) if rank else 0.0
        following = float(spectrum[rank]) if rank < full else 0.0
        gap = last / following if following > 0 else float("inf")
        return cls(rank, spectrum, tolerance, gap, gram.size)

    def __int__(self) -> int:
        return self.rank

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.parameters} parameters "
            f"(tolerance {self.tolerance:.2g}, gap {self.gap:.2g})"
        )


def default_rcond(gram: Gram) -> float:
    """10·max(n, p, 10)·ε, at most √ε, where A is held; √(10·side·ε) where it was squared."""
    eps = torch.finfo(gram.dtype).eps
    if gram.structure.holds == "rows":
        return min(10 * max(gram.count, gram.size, 10) * eps, eps**0.5)
    return (10 * min(gram.count, gram.size) * eps) ** 0.5


class _Undamped(Solver):
    """A solver of G x = g alone: G + λ has one inverse only, and `PseudoInverse` finds it."""

    prefers = "rows"

    def solve(
        self,
        state: Any,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        gram, own = state
        if damping is not None and resolve(damping, gram) > 0:
            inverse = PseudoInverse()
            return inverse.solve(inverse.init(gram), rhs, damping, whitened=whitened)
        return self._apply_inverse(own, rhs, whitened)

    def _apply_inverse(self, own: Any, rhs: Tensor, whitened: Tensor | None) -> Solution:
        raise NotImplementedError


class RandomInverse(_Undamped):
    r"""G⁻ = G⁺ + (I − G⁺G)U + V(I − GG⁺) with Gaussian U, V: every {1}-inverse is of this form.

    It is not symmetric, and its matrices are drawn in full, (p, p).

    Args:
        seed: of U and V.
        scale: the size of U and V, relative to 1/‖G‖.
        rcond: as in `PseudoInverse`.
    """

    def __init__(self, seed: int = 0, scale: float = 1.0, rcond: float | None = None) -> None:
        self.seed, self.scale, self._inverse = seed, scale, PseudoInverse(rcond)

    def init(self, gram: Gram) -> tuple[Gram, Any]:
        state = self._inverse.init(gram)
        eye = torch.eye(state.rank, dtype=gram.dtype, device=gram.device)
        basis = state.combine(eye).to(gram.dtype)  # (rank, p)
        # of the size of G⁺ the round-off of I − G⁺G in them would drown the solution
        size = 1 / float(state.top.double().square()) if state.rank else 1.0
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, gram.size, gram.size)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, v = (self.scale * size / gram.size**0.5 * drawn).to(gram.device, gram.dtype)
        return gram, (state, basis, u, v)

    def _apply_inverse(self, own: Any, rhs: Tensor, whitened: Tensor | None) -> Solution:
        state, basis, u, v = own

        def unseen(x: Tensor) -> Tensor:
            return torch.zeros_like(x) if len(basis) == len(x) else x - basis.T @ (basis @ x)

        found = self._inverse.solve(state, rhs, whitened=whitened)
        x = found.x + unseen(u @ rhs) + v @ unseen(rhs)
        return Solution(x, 0.0, found.rank, status=found.status)


class WeightedNorm(_Undamped):
    r"""Of all x with G x = g, the one of smallest xᵀWx, for a positive definite W.

    With W = L Lᵀ it is x = L⁻ᵀ(A L⁻ᵀ)⁺r. Pulled back through a reparametrization ξ = f(θ),
    W = (df dfᵀ)⁻¹ gives the Moore–Penrose solution of the other chart.

    Args:
        weight: W as a matrix (p, p), or its diagonal (p,).
        rcond: as in `PseudoInverse`, for A L⁻ᵀ.
    """

    def __init__(self, weight: Tensor, rcond: float | None = None) -> None:
        require_finite_tensor("The weight", weight)
        self.weight, self._inverse = weight, PseudoInverse(rcond)

    def init(self, gram: Gram) -> tuple[Gram, Any]:
        root = self._root(gram)
        if not isinstance(gram, FactoredGram):
            raise PullbackError(
                "The weighted inverse needs A", "only G is held", 'Use gram="rows" or "auto"'
            )
        rows = gram.rows()
        weighted = rows / root if root.ndim == 1 else _solve(root, rows.T).T
        return gram, (root, self._inverse.init(Rows(weighted)))

    def _apply_inverse(self, own: Any, rhs: Tensor, whitened: Tensor | None) -> Solution:
        root, state = own
        g = rhs / root if root.ndim == 1 else _solve(root, rhs[:, None])[:, 0]
        found = self._inverse.solve(state, g, whitened=whitened)
        y = found.x
        x = y / root if root.ndim == 1 else _solve(root.T, y[:, None], upper=True)[:, 0]
        return Solution(x, 0.0, found.rank, status=found.status)

    def _root(self, gram: Gram) -> Tensor:
        """L with W = L Lᵀ, as a matrix or its diagonal."""
        w = self.weight.detach().to(gram.device, gram.dtype)
        if tuple(w.shape) not in ((gram.size,), (gram.size, gram.size)):
            raise PullbackError(
                "The weight does not fit the parameters",
                f"got {tuple(w.shape)} for {gram.size} parameters",
                "Pass a positive definite matrix (p, p), or its diagonal (p,)",
            )
        if w.ndim == 1:
            good, root = bool((w > 0).all()), w.clamp(min=0).sqrt()
        else:
            root, info = torch.linalg.cholesky_ex(w)
            good = bool(info == 0) and bool(torch.allclose(w, w.T))
        if not good:
            raise PullbackError(
                "The weight is not positive definite",
                "xᵀWx would be no norm, and its smallest solution not unique",
                "Use a symmetric positive definite W",
            )
        return root


def _solve(triangle: Tensor, rhs: Tensor, *, upper: bool = False) -> Tensor:
    return torch.linalg.solve_triangular(triangle, rhs, upper=upper)
