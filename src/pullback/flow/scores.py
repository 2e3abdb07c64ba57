r"""Classification losses where logits diverge: slopes, natural velocities and rows in log domain.

With g = ∂ℓ/∂z and the Fisher metric M, autograd's g = p − y rounds to zero from logits of about
37 on, and M vanishes with it; their quotient v = M⁻¹g does not. A `Score` holds

    v       with M v = g,
    basis   Q, orthonormal columns that span the directions M sees,
    pairs   columns S̃ and r̃ with S̃ S̃ᵀ = M e^(−2c), S̃ r̃ = g e^(−2c), e^c their largest entry.

If QᵀJ has full row rank, the natural gradient is (QᵀJ)⁺Qᵀv whatever the weights in M; elsewhere it
is the weighted least-squares solution (S̃ᵀJ)⁺r̃.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Blocks, Diagonal, Factor


@dataclass(frozen=True)
class Score:
    """What the flow needs of one batch of logits z (N, *event)."""

    slope: Tensor
    basis: Factor
    basis_velocity: Tensor
    pairs: Factor
    white: Tensor


def bernoulli(z: Tensor, y: Tensor) -> Score:
    """Σ softplus(z) − y z, for labels y in [0, 1] shaped like z.

    v = (1 − y)/σ(−z) − y/σ(z), and r = v √(σ(z)σ(−z)) = (1 − y)e^(z/2) − y e^(−z/2).
    """
    y = _shaped(y, z)
    half = 0.5 * (F.logsigmoid(z) + F.logsigmoid(-z))
    c = half.max()
    slope = (1 - y) * z.sigmoid() - y * (-z).sigmoid()
    v = _times(1 - y, 1 + z.exp()) - _times(y, 1 + (-z).exp())
    white = _times(1 - y, (z / 2 - c).exp()) - _times(y, (-z / 2 - c).exp())
    return Score(slope, Diagonal(torch.ones_like(z)), v, Diagonal((half - c).exp()), white)


def categorical(z: Tensor, y: Tensor) -> Score:
    r"""Cross-entropy of logits (N, K) and classes (N,).

    v = −e_y/p_y, up to a multiple of 1 that M does not see. M is taken as
    Σ_{k<l} p_k p_l (e_k − e_l)(e_k − e_l)ᵀ, which has no cancellation where one p is near 1.
    """
    if z.ndim != 2 or y.shape != z.shape[:1] or y.is_floating_point():
        raise PullbackError(
            "The classes do not fit the logits",
            f"got {tuple(y.shape)} of {y.dtype} for {tuple(z.shape)}",
            "Give one class index per row of logits",
        )
    n, k = z.shape
    if not 0 <= int(y.min()) <= int(y.max()) < k:
        raise PullbackError(
            "A class is out of range",
            f"found {int(y.min())} to {int(y.max())} for {k} logits",
            f"Use classes from 0 to {k - 1}",
        )
    if k == 1:
        raise PullbackError(
            "There is only one class", "its probability is 1 at any logit", "Give two or more"
        )
    y = y.long()
    log_p = z.log_softmax(1)
    right = F.one_hot(y, k).bool()
    others = log_p.masked_fill(right, -torch.inf).logsumexp(1, keepdim=True).exp()
    slope = torch.where(right, -others, log_p.exp())
    v = torch.where(right, -(-log_p).exp(), 0.0)
    eye = torch.eye(k, dtype=z.dtype, device=z.device)
    q = torch.linalg.qr(eye - 1 / k)[0][:, : k - 1]
    a, b = torch.triu_indices(k, k, 1, device=z.device)
    half = 0.5 * (log_p[:, a] + log_p[:, b])  # (N, pairs)
    c = half.max()
    columns = (half - c).exp()[:, None, :] * (eye[:, a] - eye[:, b])
    # v_a − v_b is −1/p_a where a is the class, 1/p_b where b is
    sign = right[:, b].to(z.dtype) - right[:, a].to(z.dtype)
    log_v = -(log_p * right).sum(1, keepdim=True)
    white = _times(sign, (half - c + log_v).exp())
    basis = Blocks(q.expand(n, k, k - 1), (k,))
    return Score(slope, basis, basis.transpose(v), Blocks(columns, (k,)), white)


def _times(y: Tensor, x: Tensor) -> Tensor:
    """y·x, zero where y is, however large x."""
    return torch.where(y == 0, 0.0, y * x)


def _shaped(y: Tensor, z: Tensor) -> Tensor:
    if y.numel() != z.numel() or not bool(((y >= 0) & (y <= 1)).all()):
        raise PullbackError(
            "The labels do not fit the logits",
            f"got {tuple(y.shape)} between {float(y.min()):g} and {float(y.max()):g} for "
            f"{tuple(z.shape)}",
            "Give one label in [0, 1] per logit ((1 + y)/2 of signs)",
        )
    return y.to(z).reshape(z.shape)
