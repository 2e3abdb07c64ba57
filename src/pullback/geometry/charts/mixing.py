"""Diffeomorphisms that mix entries: matrices, permutations, and a normalizing flow's couplings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .diffeomorphism import Diffeomorphism, Params, flatly


class Mixing(Diffeomorphism):
    r"""w = Mθ + c over the entries of the named tensors (or all), one after the other; M (p, p)."""

    def __init__(
        self, matrix: Tensor, shift: Tensor | None = None, *, names: Sequence[str] | None = None
    ) -> None:
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
        if not square or (shift is not None and shift.shape != matrix.shape[:1]):
            raise PullbackError(
                "The mixing is no change of coordinates",
                f"the matrix has shape {tuple(matrix.shape)}, the shift "
                f"{None if shift is None else tuple(shift.shape)}",
                "Give a square matrix, and a vector as long as its side",
            )
        wide = matrix.detach().to(torch.float64)
        factor, pivots, info = torch.linalg.lu_factor_ex(wide)
        self._matrix, self._lu = wide, (factor, pivots)
        self._shift = wide.new_zeros(len(wide)) if shift is None else shift.detach().to(wide)
        self.names = names
        values = factor.diagonal().abs()
        eps = torch.finfo(matrix.dtype).eps if matrix.is_floating_point() else 1e-16
        if len(wide) and (int(info) or not bool(values.min() > len(wide) * eps * values.max())):
            raise PullbackError(
                "The mixing is not invertible",
                f"its matrix of side {len(wide)} is singular to working precision",
                "Use a matrix of full rank",
            )

    def forward(self, theta: Params) -> Params:
        return flatly(theta, self.names, self._apply)

    def inverse(self, w: Params) -> Params:
        return flatly(w, self.names, self._solve)

    def _apply(self, flat: Tensor) -> Tensor:
        self._fits(flat)
        return self._matrix.to(flat) @ flat + self._shift.to(flat)

    def _solve(self, flat: Tensor) -> Tensor:
        self._fits(flat)
        factor, pivots = (t.to(flat.device) for t in self._lu)
        right = (flat.to(torch.float64) - self._shift.to(flat.device))[:, None]
        return torch.linalg.lu_solve(factor, pivots, right)[:, 0].to(flat)

    def _fits(self, flat: Tensor) -> None:
        if len(flat) != len(self._matrix):
            raise PullbackError(
                "The mixing does not fit the parameters",
                f"they have {len(flat)} entries, the matrix has side {len(self._matrix)}",
                "Give a matrix for all entries of the named parameters together",
            )


class EntryPermutation(Diffeomorphism):
    """The entries of each tensor in a random order, drawn from the seed."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _orders(self, params: Params) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return {
            n: torch.randperm(p.numel(), generator=generator).to(p.device)
            for n, p in params.items()
        }

    def forward(self, theta: Params) -> Params:
        orders = self._orders(theta)
        return {n: t.flatten()[orders[n]].view(t.shape) for n, t in theta.items()}

    def inverse(self, w: Params) -> Params:
        orders = self._orders(w)
        return {n: t.flatten()[orders[n].argsort()].view(t.shape) for n, t in w.items()}


class Coupling(Diffeomorphism):
    r"""A normalizing flow's layers: w_b = θ_b∘exp(s(θ_a)) + t(θ_a) with w_a = θ_a, then a and b
    change places.

    The halves a, b are random; s and t are small random networks c·U tanh(Vθ_a) of `rank` units,
    so that all entries mix and nothing of side p is stored twice.
    """

    def __init__(
        self, seed: int = 0, *, layers: int = 2, strength: float = 0.3, rank: int = 4
    ) -> None:
        self.seed, self.layers, self.strength, self.rank = seed, layers, strength, rank

    def _half(self, flat: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices a, b; s and t as functions of θ_a."""
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(flat), generator=generator).to(flat.device)
        a, b = order.tensor_split(2) if layer % 2 == 0 else order.tensor_split(2)[::-1]
        generator.manual_seed(self.seed + 1 + layer)
        shapes = ((self.rank, len(a)), (2 * len(b), self.rank))
        v, u = (torch.randn(s, generator=generator, dtype=torch.float64).to(flat) for s in shapes)
        hidden = torch.tanh(v @ flat[a] / max(len(a), 1) ** 0.5)
        s, t = (self.strength * (u @ hidden) / self.rank**0.5).tensor_split(2)
        return a, b, torch.tanh(s), t

    def forward(self, theta: Params) -> Params:
        return flatly(theta, None, self._apply)

    def inverse(self, w: Params) -> Params:
        return flatly(w, None, self._undo)

    def _apply(self, flat: Tensor) -> Tensor:
        for layer in range(self.layers):
            _, b, s, t = self._half(flat, layer)
            flat = flat.index_put((b,), flat[b] * s.exp() + t)
        return flat

    def _undo(self, flat: Tensor) -> Tensor:
        for layer in reversed(range(self.layers)):
            _, b, s, t = self._half(flat, layer)
            flat = flat.index_put((b,), (flat[b] - t) * (-s).exp())
        return flat
