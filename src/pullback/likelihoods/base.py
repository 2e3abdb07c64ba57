r"""Likelihoods p(y | z): the distributions whose Fisher information is a metric on outputs.

Each matches one of torch's losses in scale: under `reduction="mean"` the metric is that of the
loss averaged over `samples(z)`, under "sum" that of the summed loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import log
from typing import Any

import torch
from torch import Tensor

from .._core.factor import Factor


class Likelihood(ABC):
    """A family of distributions with parameters z of shape (N, *event)."""

    #: whether `score` takes z in half precision as it is
    scores_in_half_precision: bool = False

    @abstractmethod
    def factor(self, z: Tensor) -> Factor:
        """Return S with S Sᵀ = Fisher information in z, per sample."""

    @abstractmethod
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        """Return −log p(y | z) up to a constant in z, one value per sample."""

    @abstractmethod
    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return y drawn from p(· | z)."""

    def score(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return −∂ log p(y|z)/∂z for a y drawn from p(·|z)."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            y = self.sample(z.detach(), generator)
            return torch.autograd.grad(self.nll(z, y).sum(), z)[0]

    def constructor_arguments(self) -> dict[str, Any]:
        """The arguments with which an equal likelihood is made."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def samples(self, z: Tensor) -> int:
        """Return the number of samples that a mean over z counts."""
        return z.numel()

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        """Return a broadcasting mask of the entries of z that the loss counted; None for all."""
        return None

    def has_uncounted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        """Return a flag on the device that is False where `counted` returns None.

        The host does not wait for it. A likelihood that returns a flag must be able to `sample`
        from values that are not finite.
        """
        return None

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        """Return why the first ∂loss/∂z is not that of this loss, and a remedy; or ""."""
        return ""

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_")
        return f"{type(self).__name__}({fields})"


def bounded_exp(x: Tensor, power: float = 0.5) -> Tensor:
    """Return exp(x), bounded by max**power of the dtype so that products with it stay finite.

    A factor S wants power 1/4: then M = S² stays below √max, and M v is finite.
    """
    return x.clamp(max=power * log(torch.finfo(x.dtype).max)).exp()
