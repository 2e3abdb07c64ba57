"""The Fisher information of a likelihood, as a metric on its parameters z."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .._core.factor import Factor
from ..likelihoods import Likelihood, from_loss
from .base import Metric


class Fisher(Metric):
    """M = E_y[∇ log p(y|z) ∇ log p(y|z)ᵀ], in closed form.

    Args:
        likelihood: p(y|z), or a loss of torch that has one (`likelihoods.from_loss`).
    """

    def __init__(self, likelihood: Likelihood | Callable[..., Tensor]) -> None:
        self.likelihood = from_loss(likelihood)

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        return self.likelihood.factor(z)

    def samples(self, z: Tensor) -> int:
        return self.likelihood.samples(z)

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        return self.likelihood.counted(z, cotangent)

    def uncounted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        return self.likelihood.uncounted(z, cotangent)

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        return self.likelihood.mismatch(z, cotangent)
