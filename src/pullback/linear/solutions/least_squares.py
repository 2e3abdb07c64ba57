"""Ordinary least squares, and its continuation to fewer samples than dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.svd import svd
from ..checks import refuse_data


def ridgeless(x: Tensor, y: Tensor, rcond: float | None = None) -> Tensor:
    """X⁺y, (D,): of all least-squares solutions the shortest, at any rank.

    >>> ridgeless(torch.tensor([[3.0, 4.0]]), torch.tensor([25.0]))
    tensor([3., 4.])
    """
    refuse_data(x, y)
    whole = svd(x)
    floor = max(x.shape) * torch.finfo(x.dtype).eps if rcond is None else rcond
    part = whole.select(whole.sigma > floor * whole.sigma.max())
    return part.combine(part.left(y.to(x.dtype)) / part.sigma)


def ordinary_least_squares(x: Tensor, y: Tensor) -> Tensor:
    """(XᵀX)⁻¹Xᵀy, (D,), from a QR factorization.

    Raises:
        PullbackError: where the columns of X are dependent, so that many solutions exist.
    """
    refuse_data(x, y)
    rank = int(torch.linalg.matrix_rank(x))
    if rank < x.shape[1]:
        raise PullbackError(
            "The least-squares solution is not unique",
            f"the data matrix {tuple(x.shape)} has rank {rank}, below its number of columns",
            "Use ridgeless, the shortest solution, or drop dependent features",
        )
    q, r = torch.linalg.qr(x)
    return torch.linalg.solve_triangular(r, (q.T @ y.to(x.dtype))[:, None], upper=True)[:, 0]
