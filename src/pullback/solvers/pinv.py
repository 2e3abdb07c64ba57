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
from .base import Damping, Path, Solution, Solver, delicate, measure_residual, resolve


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
        return self.sigma.max() if len(self.sigma) else self.sigma.new_zeros(())

    @property
    def rank(self) -> int:
        """How many singular values were kept."""
        return len(self.sigma)

    @property
    def finite(self) -> bool:
        """Whether the matrix could be factorized at all."""
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
        self.rcond, self.double = rcond, double

    def init(self, gram: Gram) -> Spectrum:
        holds = gram.structure.holds
        if isinstance(gram, FactoredGram) and holds != "dense":
            if (known := gram.spectrum()) is not None or holds == "rows":
                return self._from_rows(gram, known)
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
        value = 0.0 if damping is None else resolve(damping, state.gram)
        if not state.finite or (state.rank == 0 and value == 0):
            return Solution(torch.zeros_like(rhs), value, 0, status=Status.SINGULAR)
        x = self.path(state, rhs, whitened).solution(value)
        found = Solution(x.to(rhs.dtype), value, state.rank)
        blind = state.gram.structure.holds in ("kernel", "operator") and whitened is None
        if blind and value > 0 and delicate(value, state.top.square(), rhs.dtype):
            return measure_residual(found, state.gram, rhs)
        return found

    def path(self, state: Spectrum, rhs: Tensor, whitened: Tensor | None = None) -> Path:
        """γ from r where that keeps the digits, else from g; g⊥ is what the directions miss."""
        eps, top = torch.finfo(rhs.dtype).eps, state.top
        if (
            whitened is not None
            and state.left is not None
            and keeps_digits(state.gram, state.top, whitened)
        ):
            gamma, noise = state.sigma * state.left(whitened), 1e3 * eps * top * whitened.norm()
        else:
            gamma, noise = state.right(rhs), 1e3 * eps * rhs.norm()
        beyond = rhs - state.combine(gamma)
        outside = bool(beyond.norm() > noise)  # round-off over λ would pass for a direction
        return Path(state.sigma.square(), gamma, state.combine, beyond if outside else None)

    def _keep(self, sigma: Tensor, floor: float, *, squared: bool) -> Tensor:
        """Which singular values count; after squaring none below the floor can be trusted."""
        rcond = floor if self.rcond is None else max(self.rcond, floor * squared)
        return sigma > rcond * sigma.max() if len(sigma) else sigma > 0

    def _from_rows(self, gram: FactoredGram, whole: Any = None) -> Spectrum:
        """From the triples that the Gram knows, else by the SVD of A."""
        eps = torch.finfo(gram.dtype).eps
        floor = min(max(gram.count, gram.size) * eps, eps**0.5)
        if whole is None:
            a = gram.rows()
            if not finite(a):
                return _broken(gram)
            if self.double and a.dtype != torch.float64:
                a, floor = a.double(), eps
            whole = svd(a)
        part = whole.select(self._keep(whole.sigma, floor, squared=False))
        dtype = part.sigma.dtype
        return Spectrum(
            gram,
            part.sigma,
            lambda r: part.left(r.to(dtype)),
            lambda g: part.right(g.to(dtype)),
            part.combine,
        )

    def _from_kernel(self, gram: FactoredGram) -> Spectrum:
        kernel = gram.kernel()
        if not finite(kernel):
            return _broken(gram)
        sigma, u = self._eigen(kernel)

        def combine(c: Tensor) -> Tensor:
            y = (c / sigma) @ u.T
            return gram.lift(y) if y.ndim == 1 else gram.lift_rows(y)

        return Spectrum(
            gram, sigma, lambda r: u.T @ r, lambda g: (u.T @ gram.project(g)) / sigma, combine
        )

    def _from_dense(self, gram: Gram) -> Spectrum:
        dense = gram.dense()
        if not finite(dense):
            return _broken(gram)
        sigma, v = self._eigen(dense)
        return Spectrum(gram, sigma, None, lambda g: v.T @ g, lambda c: c @ v.T)

    def _eigen(self, square: Tensor) -> tuple[Tensor, Tensor]:
        """σ and singular vectors of A that count, from AᵀA or AAᵀ."""
        values, vectors = torch.linalg.eigh(square)
        sigma = values.clamp(min=0).sqrt()
        floor = (len(square) * torch.finfo(square.dtype).eps) ** 0.5
        keep = self._keep(sigma, floor, squared=True)
        return sigma[keep], vectors[:, keep]


def finite(a: Tensor) -> bool:
    """Whether all entries are; their sum says so at a fraction of the cost, unless it overflows."""
    return bool(torch.isfinite(a.sum())) or bool(torch.isfinite(a).all())


def _broken(gram: Gram) -> Spectrum:
    """The spectrum of a matrix that is not finite: every solve reports it as singular."""
    nan = torch.full((1,), torch.nan, dtype=gram.dtype, device=gram.device)
    return Spectrum(
        gram, nan, None, lambda g: nan * g[:1], lambda c: nan.expand(*c.shape[:-1], gram.size)
    )


def keeps_digits(gram: Gram, top: Tensor, r: Tensor) -> bool:
    """Whether Uᵀr keeps r's digits: not if r is huge just where the rows of A are tiny.

    A sample classified wrongly with certainty has such a row: r_i‖row_i‖ is moderate, but r_i alone
    times the round-off of U drowns the rest.
    """
    norms = gram.row_norms() if isinstance(gram, FactoredGram) else None
    if norms is None:
        return True
    noise = 1e4 * torch.finfo(r.dtype).eps * top * r.norm()
    return bool(noise <= (r * norms).norm())
