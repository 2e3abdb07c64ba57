"""Diffeomorphisms of parameters, each as a function of the dict with its inverse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pullback.geometry import Diffeomorphism

Params = dict[str, Tensor]


def flatly(f: Callable[[Tensor], Tensor]) -> Callable[[Params], Params]:
    """f of all entries as one vector."""

    def of(params: Params) -> Params:
        flat = f(torch.cat([t.flatten() for t in params.values()]))
        pieces = flat.split([t.numel() for t in params.values()])
        return {n: p.view(t.shape) for (n, t), p in zip(params.items(), pieces, strict=True)}

    return of


def mixing(matrix: Tensor, shift: float = 0.0) -> Diffeomorphism:
    """w = Mθ + c."""
    return Diffeomorphism(
        flatly(lambda t: matrix.to(t) @ t + shift),
        flatly(lambda w: torch.linalg.solve(matrix, w.to(matrix) - shift).to(w)),
    )


def shear(strength: float = 1.0) -> Diffeomorphism:
    """The first half of all entries is moved by a function of the second."""

    def along(sign: float) -> Callable[[Tensor], Tensor]:
        def move(t: Tensor) -> Tensor:
            a, b = t.tensor_split(2)
            return torch.cat([a + sign * strength * torch.tanh(b.sum()), b])

        return move

    return Diffeomorphism(flatly(along(1.0)), flatly(along(-1.0)))
