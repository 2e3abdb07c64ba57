"""The Fubini–Study metric of quantum states: log-amplitude and phase, centered over the samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Factor, Whitened
from .base import Metric

SampleWeights = Tensor | Callable[[Tensor], Tensor]


class FubiniStudy(Metric):
    r"""M = diag(ω) − ωωᵀ/N on every output: lengths after the mean over samples is subtracted.

    A network gives log ψ(s) = u(s) + iφ(s) at samples s. The state ψ does not change when a
    constant is added to log ψ, so a constant has length zero. With weights ω of mean 1 (all ones
    for samples of |ψ|²) the Gram JᵀMJ/N is the quantum geometric tensor

        S = Re⟨(O − ⟨O⟩)* (O − ⟨O⟩)⟩,   O = ∂ log ψ/∂w,   ⟨f⟩ = Σ ω_n f_n / N.

    The outputs are (N,) for a real log ψ, (N, 2) for log-amplitude and phase, or complex (N,); the
    optimizers take real outputs, `torch.view_as_real(log_psi)`. The mean couples all samples, so
    that a batch has to be in one forward call. The whitened gradient exists where the cotangents
    of the loss add up to zero, as those of an energy do.

    Args:
        weights: one number ≥ 0 per sample, (N,), or a function of the model's inputs that returns
            them, such as |ψ|² over the density that the samples were drawn from. Their scale does
            not matter. None stands for equal weights.

    >>> metric = FubiniStudy()
    >>> metric.factor(torch.zeros(2, 1)).matvec(torch.tensor([[3.0], [1.0]]))
    tensor([[ 1.],
            [-1.]])
    """

    couples_samples = True

    def __init__(self, weights: SampleWeights | None = None) -> None:
        self.weights = weights

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> CenteredFactor:
        """S = diag(√ω) (1 − √ω√ωᵀ/N), so that S Sᵀ = M."""
        return CenteredFactor(self._normalized_weights(z, inputs), tuple(z.shape[1:]))

    def _normalized_weights(self, z: Tensor, inputs: Tensor | None) -> Tensor:
        """ω, (N,), real and of mean 1."""
        real_dtype = z.real.dtype
        weights = self.weights
        if weights is None:
            return torch.ones(len(z), dtype=real_dtype, device=z.device)
        if not isinstance(weights, Tensor):
            if inputs is None:
                raise PullbackError(
                    "FubiniStudy needs the model's inputs",
                    "its weights are a function of them and none were given",
                    "Pass inputs=..., or give the weights as a tensor",
                )
            weights = weights(inputs)
        if weights.shape != (len(z),):
            raise PullbackError(
                "The weights do not fit the samples",
                f"weights have shape {tuple(weights.shape)} for {len(z)} samples",
                "Give one weight per sample, (N,)",
            )
        weights = weights.detach().to(z.device, real_dtype)
        if not bool((weights >= 0).all() & torch.isfinite(weights).all() & (weights.sum() > 0)):
            raise PullbackError(
                "The weights of the samples are not usable",
                "some are negative or not finite, or all of them are zero",
                "Use finite numbers ≥ 0, such as exp(2·(log|ψ| − max log|ψ|))",
            )
        return weights / weights.mean()


class CenteredFactor(Factor):
    """S = diag(√ω) P with the projection P = 1 − √ω√ωᵀ/N along the axis of samples.

    Args:
        weights: ω, (N,), of mean 1.
        event: the shape of one sample's output.
    """

    couples_samples = True
    subtracts_means = True

    def __init__(self, weights: Tensor, event: tuple[int, ...]) -> None:
        self.white = event
        #: √ω, as (N, 1, ..., 1)
        self._root = weights.sqrt().reshape(-1, *[1] * len(event))
        self._is_uniform = bool((weights == 1).all())

    def apply(self, r: Tensor) -> Tensor:
        projected = self._project(r)
        if self._is_uniform:
            return projected
        return self._root * projected

    def transpose(self, v: Tensor) -> Tensor:
        if self._is_uniform:
            return self._project(v)
        return self._project(self._root * v)

    def _project(self, x: Tensor) -> Tensor:
        """P x for (*batch, N, *event)."""
        sample_axis = x.ndim - 1 - len(self.white)
        if self._is_uniform:  # kernels are large: no copy of them is made for a factor of one
            return x - x.mean(sample_axis, keepdim=True)
        mean = (self._root * x).mean(sample_axis, keepdim=True)
        return x - self._root * mean

    def whiten(self, g: Tensor, eps: float | None = None) -> Whitened:
        r = self._project(torch.where(self._root > 0, g / self._root, 0.0))
        precision = eps or torch.finfo(g.dtype).eps
        missing = (self.apply(r) - g).norm()
        return Whitened.if_valid(r, missing <= precision**0.5 * g.norm())
