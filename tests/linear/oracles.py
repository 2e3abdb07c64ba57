"""The slow, obvious answers: J by torch.func, pseudo-inverses, and many digits by mpmath."""

from __future__ import annotations

from collections.abc import Sequence

import mpmath
import torch
from torch import Tensor


def product(*factors: Tensor) -> Tensor:
    beta = factors[0]
    for w in factors[1:]:
        beta = beta @ w
    return beta


def hadamard(*factors: Tensor) -> Tensor:
    return torch.stack(factors).prod(0)


def jacobian(function, factors: Sequence[Tensor]) -> Tensor:
    """dz/dfactors as one matrix (n, p)."""
    inputs = [w.detach() for w in factors]
    blocks = torch.func.jacrev(function, argnums=tuple(range(len(inputs))))(*inputs)
    n = function(*inputs).numel()
    return torch.cat([b.reshape(n, -1) for b in blocks], 1)


def flat(moves: Sequence[Tensor]) -> Tensor:
    return torch.cat([m.flatten() for m in moves])


def logistic_oracle(x: Tensor, y: Tensor, logits: Tensor, digits: int = 1500) -> Tensor:
    """F⁺∇ with F = Xᵀφφ(−)X for X of full row or column rank, in so many digits."""
    with mpmath.workdps(digits):
        a = mpmath.matrix(x.tolist())
        labels = [mpmath.mpf(v) for v in y.tolist()]
        s = [mpmath.mpf(v) for v in logits.tolist()]
        n, d = x.shape
        wrong = [1 / (1 + mpmath.exp(yi * si)) for yi, si in zip(labels, s, strict=True)]
        g = a.T * mpmath.matrix([-yi * w for yi, w in zip(labels, wrong, strict=True)])
        weights = mpmath.diag([w * (1 - w) for w in wrong])
        if n >= d:
            solution = mpmath.lu_solve(a.T * weights * a, g)
        else:
            right = mpmath.matrix([-yi / (1 - w) for yi, w in zip(labels, wrong, strict=True)])
            solution = a.T * mpmath.lu_solve(a * a.T, right)
        return torch.tensor([float(v) for v in solution], dtype=torch.float64)
