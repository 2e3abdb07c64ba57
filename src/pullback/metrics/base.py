"""Metrics M(z) on function values: how long is a move of the function?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Blocks, Factor


class Metric(ABC):
    """M = S Sᵀ at function values z of shape (N, *event), samples first."""

    #: whether M has blocks between samples
    couples_samples: bool = False

    @abstractmethod
    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        """S at z; `inputs` are the model's inputs, for metrics that depend on them."""

    def samples(self, z: Tensor) -> int:
        """How many samples a mean over z counts."""
        return z.shape[0]

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        """Which entries of z the loss counted, as a mask that broadcasts; None for all."""
        return None

    def uncounted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        """A flag that is False where `counted` would return None, see `Likelihood.uncounted`."""
        return None

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        """Why the first ∂loss/∂z is certainly not of the metric's loss, and the remedy; or ""."""
        return ""

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items())
        return f"{type(self).__name__}({fields})"


class Custom(Metric):
    """A user's function z ↦ M, positive semidefinite matrices (N, |event|, |event|)."""

    def __init__(self, matrices: Callable[[Tensor], Tensor]) -> None:
        self.matrices = matrices

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        m = self.matrices(z)
        size = z[0].numel()
        if m.shape != (z.shape[0], size, size):
            raise PullbackError(
                "The metric does not fit the model's output",
                f"it gave shape {tuple(m.shape)} for values of shape {tuple(z.shape)}",
                f"Return one {size}×{size} matrix per sample: {(z.shape[0], size, size)}",
            )
        return Blocks.of_metric(m.to(z), tuple(z.shape[1:]))


def as_metric(metric: Metric | Callable[[Tensor], Tensor]) -> Metric:
    """The metric itself, or a function of z wrapped as one."""
    if isinstance(metric, Metric):
        return metric
    if callable(metric) and not isinstance(metric, type):
        return Custom(metric)
    raise PullbackError(
        "The metric is not usable",
        f"got {metric!r}",
        "Pass a metric object such as Fisher(likelihood), or a function z -> matrices",
    )
