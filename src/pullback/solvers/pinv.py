"""The Moore–Penrose inverse, and the whole damping path, from one spectral factorization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import Status, require
from .._core.svd import svd
from ..grams import FactoredGram, Gram
from .base import Damping, Path, Solution, Solver, loses_digits, measure_residual, resolve


@dataclass(frozen=True)
class RoundOff:
    """Sizes, in units of ε, below which a quantity is taken for round-off."""

    #: of g⊥ relative to g: what the singular vectors miss is otherwise a direction. Projections
    #: of thousands of entries err by √n·ε or a few times more.
    outside_range: float = 1e3
    #: of Uᵀr relative to r: where it exceeds the weighted r, its digits are lost. Ten times the
    #: bound above, since the weights are rounded too.
    whitened: float = 1e4


_ROUND_OFF = RoundOff()


@dataclass(frozen=True)
class Spectrum:
    """A = U Σ Vᵀ without its null directions; `left` and `right` multiply by Uᵀ and Vᵀ."""

    gram: Gram
    sigma: Tensor
    left: Callable[[Tensor], Tensor] | None
    right: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor], Tensor]

    @property
    def top(self) -> Tensor:
        """The largest singular value, zero where there is none."""
        if len(self.sigma):
            return self.sigma.max()
        return self.sigma.new_zeros(())

    @property
    def rank(self) -> int:
        """The number of singular values above the cut-off."""
        return len(self.sigma)

    @property
    def finite(self) -> bool:
        """Return True if the matrix was finite, so that it could be factorized."""
        return bool(torch.isfinite(self.sigma).all())


class PseudoInverse(Solver):
    r"""x = G⁺g: of all solutions of minimal ‖A x − r‖ the shortest, A⁺r.

    From rows A it is the SVD of A; from the kernel or the dense Gram an eigendecomposition,
    which sees singular values only down to √ε of the largest.

    Args:
        rcond: singular values of A below rcond·σ_max count as zero; by default max(n, p)·ε
            from rows (at most √ε), and √(side·ε) from the kernel or dense matrix of that side.
        double: factorize rows of lower precision in float64, and by default keep every singular
            value above their own ε: those between ε and max(n, p)·ε are known to a few digits,
            which is enough for a direction.

    >>> from pullback.grams import Rows
    >>> solver = PseudoInverse()
    >>> state = solver.init(Rows(torch.tensor([[1.0, 1.0]])))
    >>> solver.solve(state, torch.tensor([2.0, 2.0])).x.round(decimals=3)
    tensor([1., 1.])
    """

    prefers = "rows"

    def __init__(self, rcond: float | None = None, *, double: bool = False) -> None:
        usable = rcond is None or 0 <= rcond < 1
        require(usable, "The cut-off rcond", rcond, "Use 0 ≤ rcond < 1, or None")
        self.rcond = rcond
        self.double = double

    def init(self, gram: Gram) -> Spectrum:
        holds = gram.structure.holds
        if isinstance(gram, FactoredGram) and holds != "dense":
            triples = gram.spectrum()
            if triples is not None or holds == "rows":
                return self._from_rows(gram, triples)
            if gram.count <= gram.size:
                return self._from_kernel(gram)
        return self._from_dense(gram)

    def solve(
        self,
        state: Spectrum,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        value = 0.0
        if damping is not None:
            value = resolve(damping, state.gram)
        if not state.finite or (state.rank == 0 and value == 0):
            return Solution(torch.zeros_like(rhs), value, 0, status=Status.SINGULAR)
        x = self.path(state, rhs, whitened).solution(value)
        solution = Solution(x.to(rhs.dtype), value, state.rank)
        has_rows = state.gram.structure.holds not in ("kernel", "operator")
        if has_rows or whitened is not None or value == 0:
            return solution
        if loses_digits(value, state.top.square(), rhs.dtype):
            return measure_residual(solution, state.gram, rhs)
        return solution

    def path(self, state: Spectrum, rhs: Tensor, whitened: Tensor | None = None) -> Path:
        """Return all solutions over damping.

        γ comes from r where that keeps its digits, else from g; g⊥ is what the singular vectors
        miss, unless it is round-off, which a division by λ would turn into a direction.
        """
        noise = _ROUND_OFF.outside_range * torch.finfo(rhs.dtype).eps
        gamma, scale = _find_coordinates(state, rhs, whitened)
        beyond = rhs - state.combine(gamma)
        if bool(beyond.norm() > noise * scale):
            return Path(state.sigma.square(), gamma, state.combine, beyond)
        return Path(state.sigma.square(), gamma, state.combine)

    def _keep(self, sigma: Tensor, floor: float, *, squared: bool) -> Tensor:
        """Return a mask of the singular values that count.

        Those of a squared matrix are not trusted below the floor, whatever `rcond` says.
        """
        if len(sigma):
            return sigma > self._cutoff(floor, squared=squared) * sigma.max()
        return sigma > 0

    def _cutoff(self, floor: float, *, squared: bool) -> float:
        """Return the share of the largest singular value below which others count as zero."""
        if self.rcond is None:
            return floor
        return max(self.rcond, floor * squared)

    def _from_rows(self, gram: FactoredGram, triples: Any = None) -> Spectrum:
        """Return the spectrum from the singular triples that the Gram knows, or by the SVD of A."""
        eps = torch.finfo(gram.dtype).eps
        floor = min(max(gram.count, gram.size) * eps, eps**0.5)
        if triples is None:
            a = gram.rows()
            if not is_finite(a):
                return _broken_spectrum(gram)
            if self.double and a.dtype != torch.float64:
                a = a.double()
                floor = eps
            triples = svd(a, cutoff=self._cutoff(floor, squared=False))
        triples = triples.select(self._keep(triples.sigma, floor, squared=False))
        dtype = triples.sigma.dtype
        return Spectrum(
            gram,
            triples.sigma,
            lambda r: triples.left(r.to(dtype)),
            lambda g: triples.right(g.to(dtype)),
            triples.combine,
        )

    def _from_kernel(self, gram: FactoredGram) -> Spectrum:
        """Return the spectrum of A from the eigenvectors of AAᵀ; its condition is squared."""
        kernel = gram.kernel().to(gram.dtype)
        if not is_finite(kernel):
            return _broken_spectrum(gram)
        sigma, u = self._eigen(kernel)

        def combine(c: Tensor) -> Tensor:
            y = (c / sigma) @ u.T
            if y.ndim == 1:
                return gram.lift(y)
            return gram.lift_rows(y)

        return Spectrum(
            gram, sigma, lambda r: u.T @ r, lambda g: (u.T @ gram.project(g)) / sigma, combine
        )

    def _from_dense(self, gram: Gram) -> Spectrum:
        dense = gram.dense()
        if not is_finite(dense):
            return _broken_spectrum(gram)
        sigma, v = self._eigen(dense)
        return Spectrum(gram, sigma, None, lambda g: v.T @ g, lambda c: c @ v.T)

    def _eigen(self, square: Tensor) -> tuple[Tensor, Tensor]:
        """Return the σ that count and their singular vectors, from AᵀA or AAᵀ."""
        values, vectors = torch.linalg.eigh(square)
        sigma = values.clamp(min=0).sqrt()
        floor = (len(square) * torch.finfo(square.dtype).eps) ** 0.5
        keep = self._keep(sigma, floor, squared=True)
        return sigma[keep], vectors[:, keep]


def _find_coordinates(state: Spectrum, g: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return γ = Vᵀg, from r where that keeps its digits, and the scale of its round-off."""
    if r is None or state.left is None or not keeps_digits(state.gram, state.top, r):
        return state.right(g), g.norm()
    return state.sigma * state.left(r), state.top * r.norm()


def is_finite(a: Tensor) -> bool:
    """Return True if all entries are finite.

    A finite sum proves it at a fraction of the cost; the sum may overflow where no entry does.
    """
    return bool(torch.isfinite(a.sum())) or bool(torch.isfinite(a).all())


def _broken_spectrum(gram: Gram) -> Spectrum:
    """Return the spectrum of a matrix that is not finite: every solve reports it as singular."""
    nan = torch.full((1,), torch.nan, dtype=gram.dtype, device=gram.device)
    return Spectrum(
        gram, nan, None, lambda g: nan * g[:1], lambda c: nan.expand(*c.shape[:-1], gram.size)
    )


def keeps_digits(gram: Gram, top: Tensor, r: Tensor) -> bool:
    """Return True if Uᵀr keeps r's digits: not if r is huge just where the rows of A are tiny.

    A sample that is classified wrongly with certainty has such a row: r_i‖row_i‖ is moderate, but
    r_i alone times the round-off of U exceeds all other terms.
    """
    if not isinstance(gram, FactoredGram):
        return True
    norms = gram.row_norms()
    if norms is None:
        return True
    noise = _ROUND_OFF.whitened * torch.finfo(r.dtype).eps * top * r.norm()
    return bool(noise <= (r * norms).norm())
