r"""Derivatives that are diagonal but for a part of low rank, J = diag(a) + U Vᵀ, and 1 − cJ.

With E = 1 − c a and k columns in U and V, Woodbury's identity needs a system of k unknowns:

    (1 − cJ)⁻¹ = E⁻¹ + E⁻¹U (1/c − VᵀE⁻¹U)⁻¹ VᵀE⁻¹

Where k is not below the number of unknowns n, or an entry of E is close to zero, 1 − cJ is factored
as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Solve = Callable[[Tensor], Tensor]

_SMALL = 0.1  # E below this costs Woodbury's identity digits


@dataclass(frozen=True)
class Jacobian:
    """J = diag(a) + U Vᵀ of B systems.

    Attributes:
        diagonal: a, (B, n).
        left: U, (B, n, k).
        right: V, (B, n, k).
    """

    diagonal: Tensor
    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """J, (B, n, n)."""
        return torch.diag_embed(self.diagonal) + self.left @ self.right.mT

    def solver(self, c: Tensor) -> Solve:
        """r ↦ (1 − cJ)⁻¹r for c > 0 (B, 1) and r (B, n)."""
        rest = 1 - c * self.diagonal
        n, k = self.left.shape[1:]
        if k >= n or bool((rest.abs() < _SMALL).any()):
            return self._directly(c)
        return self._woodbury(c, rest)

    def _directly(self, c: Tensor) -> Solve:
        whole = self.dense().mul_(-c[..., None])
        whole.diagonal(dim1=-2, dim2=-1).add_(1)
        return _factored(whole)

    def _woodbury(self, c: Tensor, rest: Tensor) -> Solve:
        left = self.left / rest[..., None]
        inner = (self.right.mT @ left).mul_(-c[..., None])
        inner.diagonal(dim1=-2, dim2=-1).add_(1)
        solve = _factored(inner)

        def whole(r: Tensor) -> Tensor:
            first = r / rest
            inside = solve((self.right.mT @ first[..., None])[..., 0])
            return first + c * (left @ inside[..., None])[..., 0]

        return whole


def _factored(matrix: Tensor) -> Solve:
    lu, pivots, _ = torch.linalg.lu_factor_ex(matrix)  # singular: not a number, not an exception
    return lambda r: torch.linalg.lu_solve(lu, pivots, r[..., None])[..., 0]
