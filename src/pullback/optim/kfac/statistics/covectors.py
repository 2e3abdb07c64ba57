r"""Covectors φ at the output with E[φφᵀ] = M: what is pulled back to measure the layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...._core.space import compute_dtype
from ....metrics import Fisher, Metric
from .coupling import Coupling, coupled, refusal

_ENTRIES = 2**25  # of the output whose scores are drawn at once


def drawn(
    metric: Metric,
    fisher: str,
    z: Tensor,
    cotangent: Tensor,
    *,
    draws: int,
    inputs: Tensor | None,
    generator: torch.Generator,
    batch_dim: int,
) -> Iterator[tuple[Tensor, Coupling | None]]:
    """The covectors, each with the relation of the samples where the metric has one.

    z is not held longer than it is needed, the last draw being the last time.
    """
    if fisher != "mc" or not isinstance(metric, Fisher):  # which takes some samples at a time
        z, cotangent = (t.to(compute_dtype(t.dtype)) for t in (z, cotangent))
    if metric.couples_samples:
        return coupled(
            metric, fisher, z, draws=draws, inputs=inputs, generator=generator, batch_dim=batch_dim
        )
    found = covectors(metric, fisher, z, cotangent, draws=draws, inputs=inputs, generator=generator)
    return map(_alone, found)


def _alone(covector: Tensor) -> tuple[Tensor, None]:
    return covector, None


def covectors(
    metric: Metric,
    fisher: str,
    z: Tensor,
    cotangent: Tensor,
    *,
    draws: int = 1,
    inputs: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Covectors (N, *event) whose outer products add up to M, on average or exactly.

    Args:
        metric: M at z; `Fisher` of a likelihood samples targets from the model's own predictions.
        fisher: "mc" draws covectors, "exact" runs through the columns of S, "empirical" takes the
            loss's own cotangent (whose scale is settled later).
        z: function values, samples first.
        cotangent: ∂loss/∂z.
        draws: how many samples "mc" averages over.
        inputs: the model's inputs, for metrics that depend on them.
        generator: for the draws.

    The signs of "exact" and "empirical" covectors are random by sample: it does not matter for
    layers, and makes the square of a summed gradient an estimate of the summed squares.
    """
    if not isinstance(metric, Fisher) and fisher != "empirical":
        _refuse_coupled(metric, z, inputs)
    if fisher == "mc":
        for _ in range(draws - 1):
            yield _drawn(metric, z, inputs, generator) / draws**0.5
        last = [_drawn(metric, z, inputs, generator)]
        del z, cotangent  # the logits of a language model are larger than its activations
        yield last.pop() if draws == 1 else last.pop().div_(draws**0.5)
        return
    if fisher == "empirical":
        yield cotangent * _signs(z, generator)
        return
    for column in metric.factor(z, inputs=inputs).covectors(z):
        yield column * _signs(z, generator)


def _refuse_coupled(metric: Metric, z: Tensor, inputs: Tensor | None) -> None:
    if metric.factor(z, inputs=inputs).couples_samples:
        raise refusal(metric, "it does not declare them: couples_samples is False")


def _signs(z: Tensor, generator: torch.Generator | None) -> Tensor:
    shape = (len(z), *[1] * (z.ndim - 1))
    coins = torch.randint(0, 2, shape, device=z.device, generator=generator)
    return (2 * coins - 1).to(z.dtype)


def _drawn(
    metric: Metric, z: Tensor, inputs: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    if isinstance(metric, Fisher):
        return scored(metric, z, generator)
    factor = metric.factor(z, inputs=inputs)
    shape = (len(z), *factor.white)
    coins = torch.randint(0, 2, shape, device=z.device, generator=generator)
    return factor.apply((2 * coins - 1).to(z.dtype))


def scored(metric: Fisher, z: Tensor, generator: torch.Generator | None) -> Tensor:
    """Scores of drawn targets, some samples at a time: in full precision they take much memory."""
    step, dtype = max(1, _ENTRIES * len(z) // max(1, z.numel())), compute_dtype(z.dtype)
    if metric.likelihood.halves:
        return metric.likelihood.score(z, generator)
    if step >= len(z):
        return metric.likelihood.score(z.to(dtype), generator)
    out = torch.empty_like(z)
    for one, some in zip(out.split(step), z.split(step), strict=True):
        one.copy_(metric.likelihood.score(some.to(dtype), generator))
    return out
