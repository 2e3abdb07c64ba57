"""What the first gradient at the outputs shows about a loss that the metric does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.space import compute_dtype
from ..likelihoods import Bernoulli, Categorical, Likelihood, Poisson
from ..metrics import Fisher, Metric


@dataclass(frozen=True)
class LossTest:
    """When a gradient cannot look like that of another loss by accident."""

    #: entries of the output that must agree: a few numbers meet any rule
    least_entries: int = 8
    #: units of round-off by which they may differ: a sum over the batch rounds a few times
    round_off: float = 64.0
    #: precisions with a coarser epsilon tell nothing: bfloat16 has two digits
    largest_epsilon: float = 1e-4
    #: samples that are looked at, where all follow the same rule
    most_samples: int = 64
    #: a residual p − y must be larger than this somewhere: a confident network tells nothing
    least_residual: float = 0.05


_TEST = LossTest()


@dataclass(frozen=True)
class OutputGradient:
    """What a squared error is recognized by, without the outputs themselves.

    Attributes:
        shape: of the outputs, samples first.
        dtype: of the outputs.
        squared_length: Σ (∂loss/∂z)², on the outputs' device.
    """

    shape: torch.Size
    dtype: torch.dtype
    squared_length: Tensor

    @classmethod
    def measure(cls, z: Tensor, cotangent: Tensor) -> OutputGradient:
        """Measure ∂loss/∂z at the outputs z; the device is not waited for."""
        return cls(z.shape, z.dtype, cotangent.detach().double().square().sum())


def warn_mismatch(
    metric: Metric,
    z: Tensor,
    cotangent: Tensor,
    reduction: str,
    stacklevel: int,
    loss: float | None = None,
) -> bool:
    """Warn where ∂loss/∂z at the outputs z, samples first, is certainly of another loss.

    Return whether it is.

    Args:
        metric: of the outputs.
        z: all outputs that the loss is made of, samples first.
        cotangent: ∂loss/∂z.
        reduction: "mean" or "sum", over the samples of the metric.
        stacklevel: of the warning.
        loss: its value, where it is known and these are all of its outputs.
    """
    reason = metric.mismatch(z, cotangent)
    if not reason and isinstance(metric, Fisher):
        reason = recognize_reduction(metric.likelihood, z, cotangent, reduction)
    if reason:
        _warn(reason, stacklevel + 1)
        return True
    if loss is None:
        return False
    return warn_squared_error(metric, OutputGradient.measure(z, cotangent), loss, stacklevel + 1)


def warn_squared_error(
    metric: Metric, gradient: OutputGradient, loss: float, stacklevel: int
) -> bool:
    """Warn where a loss of these outputs alone is certainly a squared error, and another's metric.

    The cotangent alone does not tell, if the targets are real numbers. Return whether it is one.
    """
    if not isinstance(metric, Fisher):
        return False
    reason = recognize_squared_error(metric.likelihood, gradient, loss)
    if reason:
        _warn(reason, stacklevel + 1)
    return bool(reason)


def _warn(reason: str, stacklevel: int) -> None:
    message = f"The metric does not fit the loss: {reason}."
    warnings.warn(message, RuntimeWarning, stacklevel + 1)


def recognize_squared_error(likelihood: Likelihood, gradient: OutputGradient, loss: float) -> str:
    """Return why a loss is certainly a squared error and the likelihood another, or "".

    A loss κ Σ (z − y)² has the gradient 2κ (z − y), so that it is Σ (∂loss/∂z)² / 4κ for any
    targets y. κ is one or a half for a sum, divided by the samples or by the entries for a mean.
    """
    epsilon = torch.finfo(gradient.dtype).eps
    entries = gradient.shape.numel()
    is_other = isinstance(likelihood, (Bernoulli, Categorical, Poisson))
    if not is_other or epsilon > _TEST.largest_epsilon or entries < _TEST.least_entries:
        return ""
    squares = float(gradient.squared_length)
    if not loss > 0 or not squares > 0:
        return ""
    scale = squares / (4 * loss)
    divisors = {factor * count for factor in (1, 2) for count in (1, gradient.shape[0], entries)}
    error = min(abs(scale * divisor - 1) for divisor in divisors)
    if error > _TEST.round_off * epsilon:
        return ""
    return (
        "the loss and its gradient are those of a squared error, and "
        f"{type(likelihood).__name__} is the metric of another loss. Use likelihood=nn.MSELoss()"
    )


def recognize_reduction(
    likelihood: Likelihood, z: Tensor, cotangent: Tensor, reduction: str
) -> str:
    """Return why a loss certainly adds up over samples and the metric averages, or the reverse.

    A cross entropy of labels y has the gradient s (p − y), with s = 1 for a sum. Then p − ∂loss/∂z
    is zero or one everywhere.
    """
    epsilon = torch.finfo(z.dtype).eps
    if not isinstance(likelihood, (Bernoulli, Categorical)) or epsilon > _TEST.largest_epsilon:
        return ""
    counted_rows = int((cotangent.flatten(1) != 0).any(1).sum())
    if counted_rows < 2:  # the mean of one sample is its sum
        return ""
    scale = 1.0
    if reduction == "sum":
        scale = float(likelihood.samples(z))
    outputs = z[: _TEST.most_samples].to(compute_dtype(z.dtype))
    residuals = scale * cotangent[: _TEST.most_samples].to(outputs.dtype)
    labels = (likelihood.probabilities(outputs) - residuals)[residuals != 0]
    if labels.numel() < _TEST.least_entries:
        return ""
    error = float(torch.minimum(labels.abs(), (1 - labels).abs()).max())
    noise = _TEST.round_off * epsilon * (1 + float(outputs.abs().max()))
    is_confident = float(residuals.abs().max()) < _TEST.least_residual
    if not error <= noise or noise > _TEST.least_residual or is_confident:
        return ""
    if reduction == "sum":
        return (
            'its gradient is that of a mean over samples, and reduction="sum" is that of a sum. '
            'Leave out reduction="sum", or add up the loss'
        )
    return (
        "its gradient is that of a sum over samples, and the metric is that of their mean. Average "
        'the loss, or give the summed one, such as likelihood=nn.CrossEntropyLoss(reduction="sum")'
    )


def warn_missing_batch_axis(z: Tensor, inputs: Sequence[Tensor], stacklevel: int) -> None:
    """Warn where an output with one axis has another length than any axis of the only input."""
    if z.ndim != 1 or len(inputs) != 1 or len(z) in inputs[0].shape:
        return
    warnings.warn(
        f"The output of shape {tuple(z.shape)} counts as {len(z)} samples of one number, but the "
        f"input has shape {tuple(inputs[0].shape)}. If the output is one sample, it lacks a batch "
        "axis: give the model a batch, x[None], or return z[None].",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )
