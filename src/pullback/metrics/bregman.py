"""The Hessian of a convex potential: the generalized Gauss–Newton metric."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.func import hessian, vmap

from .._core.errors import PullbackError
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
        size, shape = z[0].numel(), self.potential(z[0]).shape
        if shape.numel() != 1:
            raise PullbackError(
                "The potential is not one number per sample",
                f"it gave shape {tuple(shape)}",
                "Sum it over the sample's output",
            )
        matrices = vmap(hessian(self.potential))(z).reshape(z.shape[0], size, size)
        return Blocks.of_metric(matrices.detach(), tuple(z.shape[1:]))
