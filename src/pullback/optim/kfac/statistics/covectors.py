r"""Covectors φ at the output with E[φφᵀ] = M: what is pulled back to measure the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...._core.capture import Selector, first_input, samples_first
from ...._core.space import compute_dtype
from ....maps.layers.moments import Sharing
from ....metrics import Fisher, Metric
from .coupling import Coupling, coupled_covectors, coupling_error, random_signs

_ENTRIES = 2**25  # of the output whose scores are drawn at once


@dataclass(frozen=True)
class Recipe:
    """What is measured: the metric at the output, and how places and samples count."""

    metric: Metric
    #: "mc" draws covectors, "exact" takes the columns of S, "empirical" the loss's own cotangent
    fisher: str
    sharing: Sharing
    #: whether weight and bias share a block
    joint: bool
    #: targets per sample for "mc"
    draws: int
    output: Selector
    batch_dim: int
    #: whether corrected eigenvalues are wanted, which are sums over samples
    ekfac: bool = False
    #: "mean" or "sum" over samples, of the loss
    reduction: str = "mean"
    #: whether the loss may be scaled, by a `GradScaler` that is known
    scaled: bool = False


@dataclass(frozen=True)
class Covectors:
    """Covectors in the layout of the output z, without z itself: it may be large."""

    every: Iterator[tuple[Tensor, Coupling | None]]
    samples: Tensor | float
    #: which places of the output count, None for all
    keep: Tensor | None
    #: a covector of all places that count, where the others are of single positions: it shows which
    #: places of a layer have a part in them
    reach: Tensor | None = None


def covectors_of(
    recipe: Recipe,
    z: Tensor,
    cotangent: Tensor,
    inputs: Sequence[Tensor],
    generator: torch.Generator,
) -> Covectors | None:
    """From the output, ∂loss/∂z and the call's tensors; None where z is not finite."""
    axis, metric = recipe.batch_dim, recipe.metric
    value, slope = samples_first(z, axis), samples_first(cotangent, axis)
    if not bool(value.amax() < torch.inf):  # NaN neither; −inf may mask a class
        return None
    mask = metric.counted(value, slope)
    samples: Tensor | float = metric.samples(value)
    if mask is not None:
        samples = samples * mask.double().mean()
    keep, ndim, dtype = _kept_places(mask, z, axis), cotangent.ndim, cotangent.dtype
    first = first_input(inputs, len(value), axis)

    def placed(pair: tuple[Tensor, Coupling | None]) -> tuple[Tensor, Coupling | None]:
        covector = pair[0] if mask is None else pair[0] * mask
        covector = covector.view(len(covector)) if ndim == 1 else covector
        return covector.movedim(0, axis).to(dtype), pair[1]

    reach = None
    if keep is not None and recipe.fisher == "exact" and not metric.couples_samples:
        reach = placed(next(_drawn(metric, "mc", value, slope, 1, first, generator, axis)))[0]
    found = _drawn(metric, recipe.fisher, value, slope, recipe.draws, first, generator, axis)
    return Covectors(map(placed, found), samples, keep, reach)


def _kept_places(mask: Tensor | None, z: Tensor, batch_dim: int) -> Tensor | None:
    """Which of the output's places count: the mask without the one axis it is constant along."""
    if mask is None or mask.ndim != z.ndim or z.ndim < 2:
        return None
    mask = mask.movedim(0, batch_dim)
    event = [i for i in range(z.ndim) if mask.shape[i] == 1 and z.shape[i] > 1]
    return mask.squeeze(event[0]) if len(event) == 1 else None


def _drawn(
    metric: Metric,
    fisher: str,
    z: Tensor,
    cotangent: Tensor,
    draws: int,
    inputs: Tensor | None,
    generator: torch.Generator,
    batch_dim: int,
) -> Iterator[tuple[Tensor, Coupling | None]]:
    """The covectors, each with the relation of the samples where the metric has one."""
    if fisher != "mc" or not isinstance(metric, Fisher):  # which takes some samples at a time
        z, cotangent = (t.to(compute_dtype(t.dtype)) for t in (z, cotangent))
    if metric.couples_samples:
        return coupled_covectors(
            metric, fisher, z, draws=draws, inputs=inputs, generator=generator, batch_dim=batch_dim
        )
    found = covectors(metric, fisher, z, cotangent, draws, inputs, generator)
    return ((covector, None) for covector in found)


def covectors(
    metric: Metric,
    fisher: str,
    z: Tensor,
    cotangent: Tensor,
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
    signs = (len(z), *[1] * (z.ndim - 1))
    if fisher == "empirical":
        yield cotangent * random_signs(signs, z, generator)
        return
    if not isinstance(metric, Fisher) and metric.factor(z, inputs=inputs).couples_samples:
        raise coupling_error(metric, "it does not declare them: couples_samples is False")
    if fisher == "exact":
        for column in metric.factor(z, inputs=inputs).covectors(z):
            yield column * random_signs(signs, z, generator)
        return
    for _ in range(draws - 1):
        yield _draw(metric, z, inputs, generator).div_(draws**0.5)
    last = [_draw(metric, z, inputs, generator)]
    del z, cotangent  # the logits of a language model are larger than its activations
    yield last.pop() if draws == 1 else last.pop().div_(draws**0.5)


def _draw(
    metric: Metric, z: Tensor, inputs: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    if isinstance(metric, Fisher):
        return _score(metric.likelihood, z, generator)
    factor = metric.factor(z, inputs=inputs)
    return factor.apply(random_signs((len(z), *factor.white), z, generator))


def _score(likelihood: Any, z: Tensor, generator: torch.Generator | None) -> Tensor:
    """Scores of drawn targets, some samples at a time: in full precision they take much memory."""
    step, dtype = max(1, _ENTRIES * len(z) // max(1, z.numel())), compute_dtype(z.dtype)
    if likelihood.halves:
        return likelihood.score(z, generator)
    if step >= len(z):
        return likelihood.score(z.to(dtype), generator)
    out = torch.empty_like(z)
    for one, some in zip(out.split(step), z.split(step), strict=True):
        one.copy_(likelihood.score(some.to(dtype), generator))
    return out
