"""The best combination of the natural gradient and the last move, by the quadratic model."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Local, Move, Need, Step, reject_failure

_PINV_CUTOFF = 1e-10  # relative: directions alike to so many digits count as one (double precision)


class QuadraticModel(Step):
    r"""The move αd + βm that lowers the model most, d the natural gradient and m the last move.

    Minimizes −gᵀx + ½xᵀ(G + λ)x over the plane of d and m, so that neither a learning rate nor a
    momentum is left to choose.

    Args:
        momentum: whether to use the last move.
    """

    def __init__(self, momentum: bool = True) -> None:
        self.momentum = momentum

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.PRODUCTS})

    @property
    def numbers(self) -> dict[str, float]:
        return {"count": 0} if self.momentum else {}

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("move",) if self.momentum else ()

    def take(self, local: Local) -> Move:
        solution = local.direction()
        rejection = reject_failure(solution)
        if rejection is not None:
            return rejection
        directions = [solution.x]
        count = local.state.get("count", 0)
        if self.momentum and count:
            directions.append(local.state["move"].to(solution.x))
        span = torch.stack(directions)
        coefficients = best_coefficients(
            slopes=span @ local.gradient,
            products=local.inner_products(span),
            lengths=span @ span.T,
            damping=solution.damping,
        )
        move = span.T @ coefficients
        if self.momentum:
            local.state |= {"move": move, "count": count + 1}
        return Move(move, 1.0, solution)


def best_coefficients(slopes: Tensor, products: Tensor, lengths: Tensor, damping: float) -> Tensor:
    """Return the c that minimizes −bᵀc + ½cᵀ(P + λS)c for directions x_1, ..., x_k.

    Directions are brought to the same length first; those that the model does not see get nothing.

    Args:
        slopes: b, gᵀx_i, (k,).
        products: P, x_iᵀG x_j, (k, k).
        lengths: S, x_iᵀx_j, (k, k).
        damping: λ.
    """
    slopes_double = slopes.double()
    matrix = products.double()
    matrix = (matrix + matrix.T) / 2 + damping * lengths.double()
    norms = matrix.diagonal().clamp(min=0).sqrt()
    to_unit = torch.where(norms > 0, 1 / norms, 0.0)
    correlations = to_unit[:, None] * matrix * to_unit
    inverse = torch.linalg.pinv(correlations, rtol=_PINV_CUTOFF, hermitian=True)
    return (to_unit * (inverse @ (to_unit * slopes_double))).to(slopes.dtype)
