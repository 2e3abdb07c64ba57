"""Learning rate and momentum from the quadratic model itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Local, Move, Step, failed


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
    def numbers(self) -> dict[str, float]:
        return {"count": 0} if self.momentum else {}

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("move",) if self.momentum else ()

    def take(self, local: Local) -> Move:
        solution = local.direction()
        if (rejection := failed(solution)) is not None:
            return rejection
        span = [solution.x]
        count = local.state.get("count", 0)
        if self.momentum and count:
            span.append(local.state["move"].to(solution.x))
        products = [[x @ y for y in map(local.image, span)] for x in span]
        lengths = [[x @ y for y in span] for x in span]
        slopes = [local.gradient @ x for x in span]
        factors = best_factors(slopes, products, lengths, solution.damping)
        move = torch.stack(span).T @ factors
        if self.momentum:
            local.state |= {"move": move, "count": count + 1}
        return Move(move, 1.0, solution)


def best_factors(
    slopes: Sequence[Tensor],
    products: Sequence[Sequence[Tensor]],
    lengths: Sequence[Sequence[Tensor]],
    damping: float,
) -> Tensor:
    """The c that minimizes −bᵀc + ½cᵀ(P + λS)c: b slopes gᵀx_i, P products, S inner products.

    Directions are brought to the same length first; those that the model does not see get nothing.
    """
    b = torch.stack(list(slopes)).double()
    p = torch.stack([torch.stack(list(row)) for row in products]).double()
    s = torch.stack([torch.stack(list(row)) for row in lengths]).double()
    matrix = (p + p.T) / 2 + damping * s
    size = matrix.diagonal().clamp(min=0).sqrt()
    unit = torch.where(size > 0, 1 / size, 0.0)
    inverse = torch.linalg.pinv(unit[:, None] * matrix * unit, rtol=1e-10, hermitian=True)
    return (unit * (inverse @ (unit * b))).to(slopes[0].dtype)
