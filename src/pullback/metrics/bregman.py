"""The Hessian of a convex potential: the generalized Gauss–Newton metric."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.func import hessian, vmap

from .._core.factor import Blocks, Factor
from .base import Metric


class Bregman(Metric):
    """M = ∇²F(z_n), for a strictly convex potential F of one sample's output.

    The divergence F(z') − F(z) − ⟨∇F(z), z' − z⟩ has this Hessian at z' = z. With F = logsumexp
    it is the Fisher metric of `Categorical`.

    >>> import torch
    >>> metric = Bregman(lambda z: 0.5 * (z**2).sum())
    >>> metric.factor(torch.zeros(2, 3)).matvec(torch.ones(2, 3))
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """

    def __init__(self, potential: Callable[[Tensor], Tensor]) -> None:
        self.potential = potential

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        size = z[0].numel()
        matrices = vmap(hessian(self.potential))(z).reshape(z.shape[0], size, size)
        return Blocks.of_metric(matrices.detach(), tuple(z.shape[1:]))
