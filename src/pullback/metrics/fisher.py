"""The Fisher information of a likelihood, as a metric on its parameters z."""

from __future__ import annotations

from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Factor
from ..likelihoods import Likelihood
from .base import Metric


class Fisher(Metric):
    """M = E_y[∇ log p(y|z) ∇ log p(y|z)ᵀ], in closed form."""

    def __init__(self, likelihood: Likelihood) -> None:
        if not isinstance(likelihood, Likelihood):
            raise PullbackError(
                "Fisher needs a likelihood",
                f"got {likelihood!r}",
                "Pass an object such as pullback.likelihoods.Categorical()",
            )
        self.likelihood = likelihood

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        return self.likelihood.factor(z)

    def samples(self, z: Tensor) -> int:
        return self.likelihood.samples(z)

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        return self.likelihood.counted(z, cotangent)

    def uncounted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        return self.likelihood.uncounted(z, cotangent)
