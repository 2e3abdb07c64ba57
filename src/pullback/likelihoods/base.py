r"""Likelihoods p(y | z): the distributions whose Fisher information is a metric on outputs.

Each matches one of torch's losses in scale: under `reduction="mean"` the metric is that of the
loss averaged over `samples(z)`, under "sum" that of the summed loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import log

import torch
from torch import Tensor

from .._core.factor import Factor


class Likelihood(ABC):
    """A family of distributions with parameters z of shape (N, *event)."""

    #: whether `score` takes z in half precision as it is
    halves: bool = False

    @abstractmethod
    def factor(self, z: Tensor) -> Factor:
        """S with S Sᵀ = Fisher information in z, per sample."""

    @abstractmethod
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        """−log p(y | z) up to a constant in z, one value per sample."""

    @abstractmethod
    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """y drawn from p(· | z)."""

    def score(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """−∂ log p(y|z)/∂z for a y drawn from p(·|z)."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            y = self.sample(z.detach(), generator)
            return torch.autograd.grad(self.nll(z, y).sum(), z)[0]

    def samples(self, z: Tensor) -> int:
        """How many samples a mean over z counts."""
        return z.numel()

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        """Which entries of z the loss counted, as a mask that broadcasts; None for all."""
        return None

    def uncounted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        """A flag on the device that is False where `counted` would return None, without waiting.

        Who gives it draws without harm from values that are not finite.
        """
        return None

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        """Why the first ∂loss/∂z is certainly not of this loss, and the remedy; or ""."""
        return ""

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_")
        return f"{type(self).__name__}({fields})"


def bounded_exp(x: Tensor, power: float = 0.5) -> Tensor:
    """exp(x), held below max**power of the dtype so that products with it stay finite.

    A factor S wants power 1/4: then M = S² stays below √max, and M v is finite.
    """
    return x.clamp(max=power * log(torch.finfo(x.dtype).max)).exp()
