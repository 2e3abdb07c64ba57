"""Families whose output entries are independent, so that the metric is diagonal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.checks import require_number
from .._core.errors import PullbackError, require
from .._core.factor import Diagonal, Factor
from .._core.space import compute_dtype
from .base import Likelihood, bounded_exp


class IndependentEntries(Likelihood):
    """Every entry is a sample, as torch's means over all entries have it.

    Args:
        event: the number of trailing axes over which the loss adds up, so that they make one
            sample: a loss that is summed over the pixels and averaged over images has event=1.
    """

    def __init__(self, event: int = 0) -> None:
        require_number("The number of event axes", event, whole=True)
        self.event = event

    def _sum_event(self, nll: Tensor) -> Tensor:
        if self.event:
            return nll.flatten(nll.ndim - self.event).sum(-1)
        return nll

    def samples(self, z: Tensor) -> int:
        return z.shape[: z.ndim - self.event].numel()


class Bernoulli(IndependentEntries):
    """Logits z of independent yes/no outcomes: `F.binary_cross_entropy_with_logits`."""

    def probabilities(self, z: Tensor) -> Tensor:
        """Return the probability of a yes for every logit."""
        return torch.sigmoid(z)

    def factor(self, z: Tensor) -> Factor:
        """S = √(σ(z) σ(−z)), from log-probabilities."""
        return Diagonal((0.5 * (F.logsigmoid(z) + F.logsigmoid(-z))).exp())

    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return self._sum_event(F.binary_cross_entropy_with_logits(z, y, reduction="none"))

    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.rand(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        return (uniform < torch.sigmoid(z)).to(z.dtype)  # faster than torch.bernoulli on a CPU

    def score(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """p − y, from one sigmoid."""
        p = torch.sigmoid(z.detach())
        uniform = torch.rand(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        return p.sub_(torch.lt(uniform, p, out=uniform))


class Poisson(IndependentEntries):
    """Log-rates z of counts: `F.poisson_nll_loss`."""

    def factor(self, z: Tensor) -> Factor:
        """S = e^{z/2}."""
        return Diagonal(bounded_exp(z / 2, 0.25))

    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return self._sum_event(F.poisson_nll_loss(z, y, reduction="none"))

    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(z.exp(), generator=generator)


class Gaussian(Likelihood):
    """½‖y − z‖²/variance, summed over the last axis.

    With `variance="learned"` the last axis holds means and then log-variances, and the metric is
    diag(1/σ², ½); the loss is ½Σ[(y − μ)²/σ² + log σ²] over the last axis.
    """

    def __init__(self, variance: float | str = 1.0) -> None:
        usable = variance == "learned" or (isinstance(variance, (int, float)) and variance > 0)
        remedy = 'Give a positive number, or "learned" for outputs (mean, log-variance)'
        require(usable, "Gaussian's variance", variance, remedy)
        self.variance = variance

    def _split_mean_and_log_variance(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if z.shape[-1] % 2:
            raise PullbackError(
                'Gaussian(variance="learned") does not fit the model\'s output',
                f"the last axis has {z.shape[-1]} entries, not a mean and a log-variance each",
                "Return as many log-variances as means",
            )
        mean, log_variance = z.chunk(2, -1)
        return mean, log_variance

    def factor(self, z: Tensor) -> Factor:
        if isinstance(self.variance, str):
            _, log_variance = self._split_mean_and_log_variance(z)
            half = torch.full_like(log_variance, 0.5**0.5)
            return Diagonal(torch.cat([bounded_exp(-0.5 * log_variance, 0.25), half], -1))
        return Diagonal(torch.full_like(z, self.variance**-0.5))

    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.variance, str):
            mean, log_variance = self._split_mean_and_log_variance(z)
            return 0.5 * ((y - mean) ** 2 * bounded_exp(-log_variance) + log_variance).sum(-1)
        return 0.5 * ((y - z) ** 2).sum(-1) / self.variance

    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if isinstance(self.variance, str):
            mean, log_variance = self._split_mean_and_log_variance(z)
            spread = bounded_exp(0.5 * log_variance)
        else:
            mean = z
            spread = self.variance**0.5
        noise = torch.randn(mean.shape, generator=generator, dtype=z.dtype, device=z.device)
        return mean + spread * noise

    def samples(self, z: Tensor) -> int:
        return z.numel() // z.shape[-1]

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        """Recognize cross entropies by their gradient."""
        return _recognize_cross_entropy(z, cotangent, "Gaussian")


class MSE(Likelihood):
    """`F.mse_loss`: the squared error averaged over every entry, so M = 2/m per sample of m."""

    def factor(self, z: Tensor) -> Factor:
        return Diagonal(torch.full_like(z, 2**0.5))

    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y) ** 2

    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        return z + 0.5**0.5 * noise

    def mismatch(self, z: Tensor, cotangent: Tensor) -> str:
        """Recognize cross entropies by their gradient."""
        return _recognize_cross_entropy(z, cotangent, "MSE")


@dataclass(frozen=True)
class _CrossEntropyTest:
    """When a gradient cannot be that of a squared error by accident."""

    #: entries of z that must agree: with as many targets a squared error does not meet p − y
    least_entries: int = 8
    #: entries that are looked at, of the first samples: more cost time and decide nothing
    most_samples: int = 64
    #: round-off of p − y, in units of that of the largest logit
    round_off: float = 64.0
    #: the largest share of round-off in p − y: above it a confident network tells nothing, and
    #: below it two losses that differ by 5 % differ here
    largest_noise: float = 0.05


_TEST = _CrossEntropyTest()


def _recognize_cross_entropy(z: Tensor, cotangent: Tensor, likelihood: str) -> str:
    """Why ∂loss/∂z is certainly that of a cross entropy, (p − y)/s, and the remedy; or ""."""
    dtype = compute_dtype(z.dtype)
    logits = z[: _TEST.most_samples].to(dtype)
    slopes = cotangent[: _TEST.most_samples].to(dtype)
    if not bool(slopes.any()) or not bool(torch.isfinite(logits).all()):
        return ""
    noise = _TEST.round_off * torch.finfo(z.dtype).eps * (1 + float(logits.abs().amax()))
    loss = ""
    if _is_multiple(slopes, logits.sigmoid() - (slopes < 0).to(dtype), noise):
        loss = "nn.BCEWithLogitsLoss()"
    for axis in {1, logits.ndim - 1}:
        if logits.shape[axis] > 1:
            label = F.one_hot(slopes.argmin(axis), logits.shape[axis]).movedim(-1, axis)
            residual = logits.softmax(axis) - label
            counts = slopes.abs().amax(axis, keepdim=True) > 0  # others are ignored targets
            if _is_multiple(slopes, residual * counts, noise):
                loss = "nn.CrossEntropyLoss()"
    if not loss:
        return ""
    return (
        f"its gradient is that of a cross entropy, and {likelihood} is the metric of a squared "
        f"error. Use likelihood={loss}"
    )


def _is_multiple(slopes: Tensor, residual: Tensor, noise: float) -> bool:
    """Return True if residual = s·slopes for some s > 0, up to the noise."""
    if slopes.numel() < _TEST.least_entries:
        return False
    scale = (slopes * residual).sum() / slopes.square().sum()
    largest = float(residual.abs().amax())
    error = float((residual - scale * slopes).abs().amax())
    return bool(scale > 0) and noise <= _TEST.largest_noise * largest and error <= noise
