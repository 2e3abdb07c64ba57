"""The flat metric on outputs, and weights on top of any metric."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Diagonal, Factor, Scaled
from .base import Metric


class Euclidean(Metric):
    """M = I on each sample's output."""

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        return Diagonal(torch.ones_like(z))


class Weighted(Metric):
    """w_n · M_n: one weight per sample, such as a quadrature or an importance weight.

    Args:
        metric: the metric to weight.
        weight: a number, a tensor (N,) or (N, *event), or a function of the model's inputs.
    """

    def __init__(self, metric: Metric, weight: float | Tensor | Callable[[Tensor], Tensor]) -> None:
        self.metric, self.weight = metric, weight

    @property
    def couples_samples(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the weighted metric does."""
        return self.metric.couples_samples

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        weight = self.weight
        if callable(weight) and not isinstance(weight, Tensor):
            if inputs is None:
                raise PullbackError(
                    "Weighted needs the model's inputs",
                    "its weight is a function of them and none were given",
                    "Pass inputs=..., or give the weights as a tensor",
                )
            weight = weight(inputs)
        weight = torch.as_tensor(weight, dtype=z.dtype, device=z.device)
        if weight.ndim and weight.shape != z.shape[: weight.ndim]:
            raise PullbackError(
                "The weights do not fit the model's output",
                f"weights {tuple(weight.shape)}, output {tuple(z.shape)}",
                "Give one number, or one weight per sample of the batch",
            )
        if bool((weight < 0).any()):
            raise PullbackError("A weight is negative", "M would be indefinite", "Use weights ≥ 0")
        return Scaled(self.metric.factor(z, inputs=inputs), weight, tuple(z.shape[1:]))

    def samples(self, z: Tensor) -> int:
        return self.metric.samples(z)

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        return self.metric.counted(z, cotangent)

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        return self.metric.mismatch(z, cotangent)
