r"""The natural gradient of the logistic loss in a linear model, at logits of any size.

With u = y∘Xβ, loss Σ log(1 + e^{−u}) and F = Xᵀdiag(φ(u)φ(−u))X, φ the sigmoid, the natural
gradient is −Δ for the shortest Δ that minimizes

    Σ_n φ(u_n)φ(−u_n) (y_n x_nᵀΔ − 1/φ(u_n))²

Weights positive but of any spread leave the rank and the row space of X alone. So the row space
is split off first, X = U Σ Vᵀ: where the rows of X are independent nothing else is left to do, and
the weights do not enter, Δ = X⁺(y/φ(u)); elsewhere a weighted problem in the orthonormal U
remains, whose weights are taken relative to the largest (common factors of F and ∇ cancel).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.errors import PullbackError
from .._core.svd import Svd, svd
from .checks import refuse_data, refuse_shape, signs
from .kronecker import pivoted_qr


def logistic_natural_gradient(
    x: Tensor, y: Tensor, beta: Tensor, *, rcond: float | None = None
) -> Tensor:
    r"""F⁺∇L of L = Σ_n log(1 + e^{−y_n x_nᵀβ}) at β, (D,), for N < D and N ≥ D alike.

    F and L are both sums over samples; with both taken as means the answer is the same. (A summed
    loss with a mean Fisher matrix, as the paper has it, is N times faster.)

    Args:
        x: the inputs, (N, D).
        y: labels −1 or +1, (N,).
        beta: β, (D,).
        rcond: singular values of X below rcond·σ_max count as zero.

    >>> x, y = torch.eye(2), torch.tensor([1.0, -1.0])
    >>> logistic_natural_gradient(x, y, torch.zeros(2))
    tensor([-2.,  2.])
    """
    refuse_shape("β", beta, (x.shape[-1],))
    return natural_logit_move(x, y, x @ beta, rcond=rcond)


def natural_logit_move(
    rows: Tensor, y: Tensor, logits: Tensor, *, rcond: float | None = None
) -> Tensor:
    """F⁺∇ for any J given as rows (N, q) of d(logits): −(S J)⁺(S y/φ(y·logits)), S² = φφ(−·)."""
    refuse_data(rows, y)
    refuse_shape("The logits", logits, (rows.shape[0],))
    y = signs(y, rows.dtype)
    u = y * logits
    eps = torch.finfo(rows.dtype).eps
    whole = svd(rows)
    floor = max(rows.shape) * eps if rcond is None else rcond
    part = whole.select(whole.sigma > floor * whole.sigma.max())
    if len(part.sigma) == 0:
        return torch.zeros_like(rows[0])
    if len(part.sigma) == len(rows):
        coordinates = part.left(y * (1 + (-u).exp()))
    else:
        coordinates = _weighted(y[:, None] * _left(part), u)
    move = -part.combine(coordinates / part.sigma)
    if not bool(torch.isfinite(move).all()):
        raise PullbackError(
            "The natural gradient overflows",
            f"a sample is misclassified by a logit of {float(u.min()):.3g}, and 1/φ(u) grows as "
            "its exponential",
            "Start from smaller logits, or add damping (NaturalGradient with a damped solver)",
        )
    return move


def _left(part: Svd) -> Tensor:
    """U, (N, k)."""
    return part.u if part.q is None or part.wide else part.q.applied(part.u.T).T


def _weighted(basis: Tensor, u: Tensor) -> Tensor:
    """argmin Σ φ(u)φ(−u)(b_nᵀc − 1/φ(u))² for independent columns b.

    Rows are sorted by weight before a pivoted QR, which then is accurate row by row.
    """
    log_weight = F.logsigmoid(u) + F.logsigmoid(-u)
    top = log_weight.max()
    order = log_weight.argsort(descending=True)
    root = ((log_weight - top) / 2).exp()[order]
    target = (F.logsigmoid(-u) - (log_weight + top) / 2).exp()[order]
    rows = root[:, None] * basis[order]
    if bool(root[-1] > 1e-3):  # no pivots needed: the condition is at most the weights' spread
        q, r = torch.linalg.qr(rows)
        columns = torch.arange(len(r), device=r.device)
    else:
        q, r, columns = pivoted_qr(rows, 0.0)
    solved = torch.linalg.solve_triangular(r[:, : len(r)], (q.T @ target)[:, None], upper=True)[
        :, 0
    ]
    out = torch.zeros_like(basis[0])
    out[columns[: len(r)]] = solved
    return out
