r"""Least squares with Kronecker products, (Cᵀ ⊗ A) vec X = vec T, by QR factorizations of A and C.

After Fausett and Fulton, "Large least squares problems involving Kronecker products" (1994):
neither the Kronecker product nor a pseudo-inverse is formed, and rank-deficient A and C are met by
column pivoting and a second QR from the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor

from .._core.errors import PullbackError
from .checks import refuse_nonfinite, refuse_rcond, refuse_shape


@dataclass(frozen=True)
class Complete:
    """A = Q Tᵀ Zᵀ with orthonormal Q (m, r) and Z (n, r) and a lower triangular Tᵀ: r = rank A."""

    q: Tensor
    t: Tensor
    z: Tensor

    @property
    def rank(self) -> int:
        """r."""
        return len(self.t)

    def solve(self, b: Tensor) -> Tensor:
        """A⁺b = Z T⁻ᵀ Qᵀb for columns b (m, k)."""
        return self.z @ torch.linalg.solve_triangular(self.t.T, self.q.T @ b, upper=False)


def pivoted_qr(a: Tensor, rcond: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A[:, order] = Q R by LAPACK, the largest remaining column first; on the CPU.

    Columns whose remainder is at most rcond·‖largest column‖ are dropped: Q (m, r), R (r, n). With
    the rows of A sorted by size this is stable row by row.
    """
    rcond = max(a.shape) * torch.finfo(a.dtype).eps if rcond is None else rcond
    found: Any = scipy.linalg.qr(a.detach().cpu().numpy(), mode="economic", pivoting=True)
    q, r, order = found
    sizes = abs(r.diagonal())
    rank = int((sizes > rcond * sizes[:1]).sum())
    q, r = torch.as_tensor(q[:, :rank]).to(a), torch.as_tensor(r[:rank]).to(a)
    return q, r, torch.as_tensor(order, device=a.device).long()


def complete(a: Tensor, rcond: float | None = None) -> Complete:
    """The complete orthogonal factorization: pivoted QR of A, then QR of Rᵀ."""
    q, r, order = pivoted_qr(a, rcond)
    back = torch.empty_like(r)
    back[:, order] = r
    z, t = torch.linalg.qr(back.T)
    return Complete(q, t, z)


def kronecker_lstsq(a: Tensor, c: Tensor, t: Tensor, rcond: float | None = None) -> Tensor:
    r"""The shortest X that minimizes ‖A X C − T‖: A⁺T C⁺ from two QR factorizations.

    Args:
        a: A, (m, n).
        c: C, (k, l).
        t: T, (m, l).
        rcond: columns that add less than this fraction of the largest count as dependent.

    >>> a, c = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0], [1.0]])
    >>> (a @ kronecker_lstsq(a, c, torch.tensor([[4.0]])) @ c).round(decimals=4)
    tensor([[4.]])
    """
    if a.ndim != 2 or c.ndim != 2:
        raise PullbackError(
            "The sides of a Kronecker product are not matrices",
            f"their shapes are {tuple(a.shape)} and {tuple(c.shape)}",
            "Pass A of shape (m, n) and C of shape (k, l)",
        )
    refuse_shape("The right-hand side", t, (a.shape[0], c.shape[1]))
    for name, value in (("A", a), ("C", c), ("The right-hand side", t)):
        refuse_nonfinite(name, value)
    refuse_rcond(rcond)
    dtype = torch.promote_types(torch.promote_types(a.dtype, c.dtype), t.dtype)
    a, c, t = a.to(dtype), c.to(dtype), t.to(dtype)
    half = complete(a, rcond).solve(t)
    return complete(c.T.contiguous(), rcond).solve(half.T).T
