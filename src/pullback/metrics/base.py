"""The length of a move of the function: M(z) = S Sᵀ, and the metrics that need z alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import hessian, vmap

from .._core.errors import PullbackError
from .._core.factor import Blocks, Diagonal, Factor, Scaled
from ..likelihoods import Likelihood, from_loss


class Metric(ABC):
    """M = S Sᵀ at function values z of shape (N, *event), samples first."""

    #: whether M has blocks between samples
    couples_samples: bool = False

    @abstractmethod
    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        """Return S at z; `inputs` are the model's inputs, for metrics that depend on them."""

    @property
    def counter(self) -> Likelihood | Metric | None:
        """The likelihood or metric that this one is made of, which counts samples in its place."""
        return None

    def samples(self, z: Tensor) -> int:
        """Return the number of samples that a mean over z counts."""
        if self.counter is None:
            return z.shape[0]
        return self.counter.samples(z)

    def counted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        """Return a mask of the entries of z that the loss counted; None for all."""
        if self.counter is None:
            return None
        return self.counter.counted(z, cotangent)

    def has_uncounted(self, z: Tensor, cotangent: Tensor) -> Tensor | None:
        """Return a flag, False where `counted` returns None; see `Likelihood.has_uncounted`."""
        if self.counter is None:
            return None
        return self.counter.has_uncounted(z, cotangent)

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        """Return why the first ∂loss/∂z is not that of the metric's loss, and a remedy; or ""."""
        if self.counter is None:
            return ""
        return self.counter.mismatch(z, cotangent)

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items())
        return f"{type(self).__name__}({fields})"


class MetricFunction(Metric):
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
    """Return the metric itself, or a function of z wrapped as one."""
    if isinstance(metric, Metric):
        return metric
    if callable(metric) and not isinstance(metric, type):
        return MetricFunction(metric)
    raise PullbackError(
        "The metric is not usable",
        f"got {metric!r}",
        "Pass a metric object such as Fisher(likelihood), or a function z -> matrices",
    )


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
        self.metric = metric
        self.weight = weight

    @property
    def couples_samples(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return True if the weighted metric couples samples."""
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

    @property
    def counter(self) -> Metric:
        return self.metric


class Fisher(Metric):
    """M = E_y[∇ log p(y|z) ∇ log p(y|z)ᵀ], in closed form.

    Args:
        likelihood: p(y|z), or a loss of torch that has one (`likelihoods.from_loss`).
    """

    def __init__(self, likelihood: Likelihood | Callable[..., Tensor]) -> None:
        self.likelihood = from_loss(likelihood)

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        return self.likelihood.factor(z)

    @property
    def counter(self) -> Likelihood:
        return self.likelihood


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
        shape = self.potential(z[0]).shape
        if shape.numel() != 1:
            raise PullbackError(
                "The potential is not one number per sample",
                f"it gave shape {tuple(shape)}",
                "Sum it over the sample's output",
            )
        matrices = vmap(hessian(self.potential))(z).reshape(z.shape[0], size, size)
        return Blocks.of_metric(matrices.detach(), tuple(z.shape[1:]))
