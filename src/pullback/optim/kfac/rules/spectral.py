r"""The polar factor of the momentum, whitened by the layer's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from ....grams.kronecker import sides
from ....grams.kronecker.inverse import Inverse, to_half
from ....grams.kronecker.roots import polar
from .rule import Rule, advance

_RMS = 0.75  # of a step's entries over the learning rate and the agreement: 0.2 for noise
_LEAST = 1e-3  # of the length that is divided by: without a gradient it is zero


class Spectral(Rule):
    r"""All singular directions of the whitened momentum alike:

        X = M (C + λ tr(C)/n)^(-½),    U = polar(X),    Δ = D U,

    with Nesterov's momentum M of the gradient and C = mean aaᵀ of the inputs. D gives all rows one
    length, in proportion to ‖M‖ over the running mean of the gradients' size: steps are long where
    gradients agree, as Adam's are. Those of noise alone have entries of 0.2 on average, so that
    AdamW's learning rates carry over. C comes from the forward pass: there is no second
    backward pass, and no output side. A weight with three times as many rows as columns is taken
    for three matrices: fused queries, keys and values.

    Args:
        momentum: the weight of the past in M.
        adapt: the weight of the past in the mean squares of the gradient.
        head: whether the output layer follows too.
        rest: the share of the learning rate for parameters that follow AdamW.
    """

    needs = "root"
    moments: ClassVar = {"first": "entries", "second": "rows"}
    inputs = True
    head = False
    defaults: ClassVar = {
        "lr": 6e-3,
        "damping": 0.2,
        "ema": 0.8,
        "statistics_every": 10,
        "invert_every": 20,
    }

    def __init__(
        self,
        momentum: float = 0.9,
        adapt: float = 0.95,
        *,
        head: bool = False,
        rest: float = 0.5,
    ) -> None:
        self.momentum, self.adapt, self.head, self.rest = momentum, adapt, head, rest

    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        (g,) = given
        first, second = prepared.first, prepared.second
        assert first is not None
        assert second is not None
        advance(first, g, 1 - self.momentum, good)
        advance(second, g.square().mean(2, keepdim=True), 1 - self.adapt, good)
        m = torch.lerp(g, first, self.momentum)
        x = self.whitened(m, prepared)
        count, rows, columns = x.shape
        parts = 3 if rows == 3 * columns else 1
        u = polar(x.reshape(count * parts, rows // parts, columns)).view(x.shape)
        lengths = torch.linalg.vector_norm(u, dim=2, keepdim=True, dtype=g.dtype)
        tiny = torch.finfo(g.dtype).tiny
        past = second.mean(1, keepdim=True).clamp(min=tiny)
        agreement = (m.square().mean((1, 2), keepdim=True) / past).sqrt()
        scale = _RMS * sqrt(columns) * agreement / lengths.clamp(min=_LEAST)
        return [u.to(g.dtype).mul_(scale)]

    def whitened(self, m: Tensor, prepared: Inverse) -> Tensor:
        """Return M (C + λ tr(C)/n)^(-½)."""
        right = prepared.right
        assert right is not None
        if sides.is_diagonal(right):
            return m * right[:, None]
        return torch.bmm(to_half(m, right)[0], right)
