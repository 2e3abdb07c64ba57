r"""Covectors φ at the output with E[φφᵀ] = M, which are pulled back to measure the layers.

A metric M = P (K⁻¹ ⊗ I) Pᵀ with K = L Lᵀ relates the samples of a batch.
With V_oi = δ_oi ⊗ ā_i, the gradient of output o (of Pᵀz) at sample i, a layer's exact block is

    G = Σ_ij K⁻¹_ij Σ_o V_oi V_ojᵀ / B.

Its Kronecker product is that of ordinary K-FAC for the inputs L⁻¹ā and the cotangents L⁻¹δ_o,

    A = āᵀK⁻¹ā / 1ᵀK⁻¹1,        S = Σ_o δ_oᵀK⁻¹δ_o / B,        G ≈ S ⊗ A.

Both sides are quadratic in L⁻¹, so one is divided by a Z of that degree; Z = 1ᵀK⁻¹1 is B at K = I,
and makes the bias's block exact. Those of gains and shifts in normalizations are exact. Covectors
must be *the same for all samples* up to a sign which is taken off again: independent draws would
cancel every term with i ≠ j. Where samples meet, as in batch normalization, the signs turn the
cotangents that come from other samples into noise of mean zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...._core.capture import find_first_input, move_samples_first
from ...._core.errors import PullbackError
from ...._core.flags import DeferredFlags
from ...._core.space import compute_dtype
from ....maps.layers.moments import Moments, Sharing
from ....maps.layers.scale import form_unit_rows
from ....maps.record import Entry, ForwardRecord
from ....metrics import Fisher, Metric
from ..options import Options

_ENTRIES = 2**25  # of the output whose scores are drawn at once


class NotFinite(Exception):
    """Outputs or gradients are not finite, so that nothing can be learned from the pass."""


@dataclass(frozen=True)
class Coupling:
    """The samples' relation L⁻¹ (N, N), and the signs (N,) that the covector at hand has."""

    inverse: Tensor
    signs: Tensor

    def whiten(self, x: Tensor, axis: int, *, signed: bool = False) -> Tensor:
        """Return L⁻¹ x along the axis of samples; a `signed` x loses the covector's signs first."""
        if signed:
            matrix = self.inverse * self.signs
        else:
            matrix = self.inverse
        moved = x.movedim(axis, 0)
        flat = matrix.to(x.dtype) @ moved.reshape(len(moved), -1)
        return flat.view(moved.shape).movedim(0, axis)

    def relate_covector(self, covector: Tensor, axis: int) -> Tensor:
        """Return φ_i = (L⁻ᵀε)_i P_i v for the covector ε_i P_i v, whose signs are ε.

        Other than those of the covector itself, the squares of its gradient are an estimate of the
        metric's diagonal: E[(Jᵀφ)²] = diag(JᵀMJ).
        """
        factor = (self.inverse.mT @ self.signs) * self.signs
        shape = shape_along(axis, covector.ndim)
        return covector * factor.to(covector.dtype).view(shape)

    def whiten_use(self, entry: Entry, delta: Tensor, sharing: Sharing) -> tuple[Tensor, Tensor]:
        """Return a use's input a as it is, and L⁻¹δ, both in full precision."""
        axis = find_samples_axis(entry, sharing)
        dtype = compute_dtype(delta.dtype)
        return entry.input.to(dtype), self.whiten(delta.to(dtype), axis, signed=True)

    def compute_unit_moments(
        self, entry: Entry, delta: Tensor, roles: list[str], sharing: Sharing
    ) -> Tensor:
        """Return Σ_ij K⁻¹_ij row_i row_jᵀ of gains and shifts, unit by unit: (U, k, k)."""
        layer: Any = entry.layer
        rows = form_unit_rows(
            [layer.compute_unit_sums(entry.module, entry.input, delta, roles, sharing)]
        )
        rows = self.whiten(rows, 0, signed=True)
        return torch.einsum("nuk,nul->ukl", rows, rows)

    def find_unrelated(self, record: ForwardRecord, sharing: Sharing) -> dict[str, str]:
        """Return the parameters held as diagonals since samples cannot be related, and why."""
        reasons: dict[str | None, str] = {}
        for entry in record.entries:
            axis = find_samples_axis(entry, sharing)
            shapes = (tuple(entry.shape), entry.input.shape)
            if any(len(s) <= axis or s[axis] != len(self.signs) for s in shapes):
                reason = f"the layer's output {shapes[0]} does not show them"
                reasons |= dict.fromkeys(entry.names.values(), reason)
            elif not entry.input.is_floating_point():
                reason = "hence every index to every other"
                reasons |= dict.fromkeys(entry.names.values(), reason)
        for call in record.compounds:
            reason = f"the maps inside {type(call.module).__name__} do not show them"
            reasons |= dict.fromkeys(map(record.name, call.module.parameters()), reason)
        cause = "the metric relates samples, and"
        return {n: f"{cause} {reason}" for n, reason in reasons.items() if n is not None}

    def compute_input_moments(self, entry: Entry, x: Tensor, sharing: Sharing) -> Moments:
        """Return the moments of L⁻¹(a, 1): second aᵀK⁻¹a, first aᵀK⁻¹1, and count 1ᵀK⁻¹1."""
        axis = find_samples_axis(entry, sharing)
        whitened = entry.layer.input_moments(entry.module, self.whiten(x, axis), sharing, None)
        weights = self.inverse.mT @ self.inverse.sum(1)  # K⁻¹1
        # Σ_ij K⁻¹_ij a_i is linear in a: that of one sample, the weighted sum of all
        total = torch.tensordot(weights.to(x.dtype), x.movedim(axis, 0), 1)[None]
        cheap = replace(sharing, longest=0)  # its second moment is of no use
        one = entry.layer.input_moments(entry.module, total.movedim(0, axis), cheap, None)
        return Moments(whitened.second, one.first, whitened.positions * weights.mean())


def find_samples_axis(entry: Entry, sharing: Sharing) -> int:
    """Return the axis of a layer's input and output that counts samples."""
    lead = len(entry.shape) - entry.features
    if lead <= 1:
        return 0
    return min(sharing.batch_dim, lead - 1)


@dataclass(frozen=True)
class Covectors:
    """Covectors in the layout of the output z, without z itself: it may be large."""

    #: each covector, with the relation of samples where the metric has one
    pairs: Iterator[tuple[Tensor, Coupling | None]]
    samples: Tensor | float
    #: which positions of the output count, None for all
    counted: Tensor | None
    #: a covector of all positions that count, where the others are of single positions
    reach: Tensor | None
    #: whether all positions count, or flags on the device that say so
    counts_all: bool | DeferredFlags


@dataclass(frozen=True)
class CountedPositions:
    """Which positions of the output count: a mask, samples first, or None for all."""

    mask: Tensor | None
    #: whether all positions count, or flags on the device that say so
    counts_all: bool | DeferredFlags


@dataclass(frozen=True)
class OutputLayout:
    """How covectors (N, *event) become those of the output as the model returned it."""

    axis: int
    ndim: int
    dtype: torch.dtype
    #: the positions that count, None for all
    mask: Tensor | None

    def place(self, pair: tuple[Tensor, Coupling | None]) -> tuple[Tensor, Coupling | None]:
        """Return the covector in the output's layout, zero where positions do not count."""
        covector, coupling = pair
        if self.mask is not None:
            covector = covector * self.mask
        if self.ndim == 1:
            covector = covector.view(len(covector))
        return covector.movedim(0, self.axis).to(self.dtype), coupling


def make_covectors(
    options: Options,
    z: Tensor,
    cotangent: Tensor,
    inputs: Sequence[Tensor],
    generator: torch.Generator,
    deferred: bool = False,
) -> Covectors:
    """Return the covectors at z, from ∂loss/∂z and the call's tensors; raise NotFinite at NaN.

    If `deferred`, do not wait for the device: whether all positions count is read later from
    `counts_all`, and whether z is finite from the statistics.
    """
    axis = options.batch_dim
    metric = options.metric
    value = move_samples_first(z, axis)
    slope = move_samples_first(cotangent, axis)
    counted = _count_positions(metric, value, slope, deferred)
    samples: Tensor | float = metric.samples(value)
    if counted.mask is not None:
        samples = samples * counted.mask.double().mean()
    reduced_mask = _reduce_mask(counted.mask, z, axis)
    layout = OutputLayout(axis, cotangent.ndim, cotangent.dtype, counted.mask)
    first = find_first_input(inputs, len(value), axis)
    reach = None
    if reduced_mask is not None and options.fisher == "exact" and not metric.couples_samples:
        single_draw = replace(options, fisher="mc", draws=1)
        pairs = generate_covectors(single_draw, value, slope, first, generator)
        reach, _ = layout.place(next(pairs))
    pairs = generate_covectors(options, value, slope, first, generator)
    return Covectors(map(layout.place, pairs), samples, reduced_mask, reach, counted.counts_all)


def _count_positions(
    metric: Metric, value: Tensor, slope: Tensor, deferred: bool
) -> CountedPositions:
    """Return which positions count; raise NotFinite at NaN unless the device shall not be read."""
    if deferred:
        has_uncounted = metric.has_uncounted(value, slope)
        if has_uncounted is not None:
            flags = DeferredFlags(~has_uncounted.view(1))
            return CountedPositions(None, flags)
    if not bool(value.amax() < torch.inf):  # NaN neither; −inf may mask a class
        raise NotFinite
    mask = metric.counted(value, slope)
    return CountedPositions(mask, mask is None)


def _reduce_mask(mask: Tensor | None, z: Tensor, batch_dim: int) -> Tensor | None:
    """Return the mask of z's positions without the one axis along which it is constant, or None.

    None without a mask, and where no axis or more than one is left out: inputs are then counted at
    all positions.
    """
    if mask is None or mask.ndim != z.ndim or z.ndim < 2:
        return None
    mask = mask.movedim(0, batch_dim)
    constant_axes = [i for i in range(z.ndim) if mask.shape[i] == 1 and z.shape[i] > 1]
    if len(constant_axes) == 1:
        return mask.squeeze(constant_axes[0])
    return None


def generate_covectors(
    options: Options,
    z: Tensor,
    cotangent: Tensor,
    inputs: Tensor | None,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Coupling | None]]:
    """Return covectors (N, *event) whose outer products add up to M, on average or exactly.

    The signs of "exact" and "empirical" covectors are random by sample: it does not matter for
    layers, and makes the square of a summed gradient an estimate of the summed squares. Where the
    metric relates samples, each covector comes with their relation. Nothing is computed before the
    first one is asked for.
    """
    if options.metric.couples_samples:
        return _generate_coupled(options, z, inputs, generator)
    if options.fisher == "empirical":
        return _generate_signed_cotangent(cotangent, generator)
    if options.fisher == "exact":
        return _generate_columns(options, z, inputs, generator)
    return _generate_draws(options, z, inputs, generator)


def _generate_signed_cotangent(
    cotangent: Tensor, generator: torch.Generator
) -> Iterator[tuple[Tensor, None]]:
    """Yield the loss's own cotangent with random signs, in its dtype: it may be large."""
    signs = draw_signs(shape_along(0, cotangent.ndim, len(cotangent)), cotangent, generator)
    yield cotangent * signs, None


def _generate_columns(
    options: Options, z: Tensor, inputs: Tensor | None, generator: torch.Generator
) -> Iterator[tuple[Tensor, None]]:
    """Yield the columns of the metric's factor, with random signs."""
    z = _promote_output(options, z)
    _refuse_undeclared_coupling(options.metric, z, inputs)
    shape = shape_along(0, z.ndim, len(z))
    for column in options.metric.factor(z, inputs=inputs).covectors(z):
        yield column * draw_signs(shape, z, generator), None


def _generate_draws(
    options: Options, z: Tensor, inputs: Tensor | None, generator: torch.Generator
) -> Iterator[tuple[Tensor, None]]:
    """Yield as many random covectors as the options ask for; the last one without holding z."""
    metric = options.metric
    draws = options.draws
    z = _promote_output(options, z)
    _refuse_undeclared_coupling(metric, z, inputs)
    for _ in range(draws - 1):
        yield _draw(metric, z, inputs, generator).div_(draws**0.5), None
    last = [_draw(metric, z, inputs, generator)]
    del z  # the logits of a language model are larger than its activations
    if draws > 1:
        last[0].div_(draws**0.5)
    yield last.pop(), None


def _generate_coupled(
    options: Options, z: Tensor, inputs: Tensor | None, generator: torch.Generator
) -> Iterator[tuple[Tensor, Coupling]]:
    """Yield covectors that all samples share, up to signs, and how samples are related.

    "exact" runs through the columns of P, "mc" draws v ∈ {±1}^m once for the whole batch.
    """
    z = _promote_output(options, z)
    factor = options.metric.factor(z, inputs=inputs)
    draws = options.draws
    if factor.coupling is None:
        raise make_coupling_error(options.metric, "its factor does not say how")
    lower = factor.coupling
    separate = factor.separate()
    eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)

    def apply_signs(covector: Tensor) -> tuple[Tensor, Coupling]:
        signs = draw_signs((len(z),), z, generator)
        column = signs.view(shape_along(0, covector.ndim))
        return covector * column, Coupling(inverse, signs)

    if options.fisher == "exact":
        yield from map(apply_signs, separate.covectors(z))
        return
    for _ in range(draws):
        v = draw_signs(separate.white, z, generator)
        yield apply_signs(separate.apply(v.expand(len(z), *v.shape)) / draws**0.5)


def _promote_output(options: Options, z: Tensor) -> Tensor:
    """Return z in full precision, unless scores are drawn, which take some samples at a time."""
    if options.fisher == "mc" and isinstance(options.metric, Fisher):
        return z
    return z.to(compute_dtype(z.dtype))


def _refuse_undeclared_coupling(metric: Metric, z: Tensor, inputs: Tensor | None) -> None:
    """Raise where the metric's factor relates samples, and the metric does not say so."""
    if not isinstance(metric, Fisher) and metric.factor(z, inputs=inputs).couples_samples:
        raise make_coupling_error(metric, "it does not declare them: couples_samples is False")


def _draw(metric: Metric, z: Tensor, inputs: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return one covector; scores in full precision are formed of some samples at a time."""
    if not isinstance(metric, Fisher):
        factor = metric.factor(z, inputs=inputs)
        return factor.apply(draw_signs((len(z), *factor.white), z, generator))
    likelihood: Any = metric.likelihood
    if likelihood.scores_in_half_precision:
        return likelihood.score(z, generator)
    step = max(1, _ENTRIES * len(z) // max(1, z.numel()))
    dtype = compute_dtype(z.dtype)
    if step >= len(z):
        return likelihood.score(z.to(dtype), generator)
    scores = torch.empty_like(z)
    for target, samples in zip(scores.split(step), z.split(step), strict=True):
        target.copy_(likelihood.score(samples.to(dtype), generator))
    return scores


def draw_signs(shape: tuple[int, ...], template: Tensor, generator: torch.Generator) -> Tensor:
    """Return ±1 with equal probability, in the dtype of `template` and on its device."""
    coins = torch.randint(0, 2, shape, device=template.device, generator=generator)
    return (2 * coins - 1).to(template.dtype)


def shape_along(axis: int, ndim: int, size: int = -1) -> tuple[int, ...]:
    """Return the shape with `size` at one axis and 1 at all others."""
    shape = [1] * ndim
    shape[axis] = size
    return tuple(shape)


def make_coupling_error(metric: Metric, why: str) -> PullbackError:
    """Return the error for a metric with blocks between samples that are not known."""
    return PullbackError(
        "The metric couples the samples of a batch",
        f"{metric!r} has blocks between samples, and {why}",
        "Use NaturalGradient with this metric, or KFAC with a metric of single samples",
    )
