r"""The per-layer split (1/L) A_i⁺ ∇_β B_i⁺, where it solves J x = ∇_β.

The paper prints B⁺ and A⁺ on the other sides; since vec(A X B) = (Bᵀ ⊗ A) vec X, the equation
A_i X B_i = ∇_β/L is solved by A_i⁺∇_βB_i⁺/L.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .checks import refuse_nonfinite, refuse_shape
from .kronecker import kronecker_lstsq
from .tangents import around


def split_obstacle(factors: Sequence[Tensor]) -> str:
    """Why the split does not solve J x = ∇ for every ∇; empty where it does.

    It does where every A_i = W₁⋯W_{i−1} has full row rank and every B_i = W_{i+1}⋯W_L full column
    rank. That J has full row rank is not enough.
    """
    if not len(factors):
        raise PullbackError("There are no factors", "the list is empty", "Pass at least one matrix")
    for i, w in enumerate(factors):
        refuse_shape(f"Factor {i}", w, (factors[i - 1].shape[-1] if i else "d", "d"))
    before, after = around(factors)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        rows, columns = _rank(a), _rank(b)
        if rows < a.shape[0]:
            return f"the {i} factors before factor {i} multiply to rank {rows} of {a.shape[0]} rows"
        if columns < b.shape[1]:
            return (
                f"the {len(factors) - 1 - i} factors after factor {i} multiply to rank {columns} "
                f"of {b.shape[1]} columns"
            )
    return ""


def _rank(a: Tensor) -> int:
    refuse_nonfinite("A product of factors", a)
    return int(torch.linalg.matrix_rank(a))


def split(factors: Sequence[Tensor], grad: Tensor, method: str = "pinv") -> list[Tensor]:
    """(1/L) A_i⁺ ∇ B_i⁺ for every i, by "pinv" or "qr"; refused where it is no solution."""
    if method not in ("pinv", "qr"):
        raise PullbackError(
            f"Unknown method {method!r}", "it is not one of the choices", 'Use "pinv" or "qr"'
        )
    refuse_nonfinite("The gradient", grad)
    reason = split_obstacle(factors)
    if reason:
        raise PullbackError(
            "The split natural gradient does not exist here",
            reason,
            "Use natural_gradient, which is the shortest solution at any rank, or make every "
            "inner dimension at least max(d₀, d_L)",
        )
    target = grad / len(factors)
    if method == "qr":
        return [kronecker_lstsq(a, b, target) for a, b in zip(*around(factors), strict=True)]
    sides = zip(*around(factors), strict=True)
    return [torch.linalg.pinv(a) @ target @ torch.linalg.pinv(b) for a, b in sides]
