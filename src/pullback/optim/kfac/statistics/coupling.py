r"""Statistics under a metric M = P (K⁻¹ ⊗ I) Pᵀ that relates the samples of a batch, K = L Lᵀ.

With V_oi = δ_oi ⊗ ā_i, the gradient of output o (of Pᵀz) at sample i, a layer's exact block is

    G = Σ_ij K⁻¹_ij Σ_o V_oi V_ojᵀ / B.

Its Kronecker product is that of ordinary K-FAC for the inputs L⁻¹ā and the cotangents L⁻¹δ_o,

    A = āᵀK⁻¹ā / 1ᵀK⁻¹1,        S = Σ_o δ_oᵀK⁻¹δ_o / B,        G ≈ S ⊗ A.

Both sides are quadratic in L⁻¹, so one of them is to be divided by a Z of that degree; Z = 1ᵀK⁻¹1
is B at K = I, and makes the bias's block exact whatever the network.
Gains and shifts of normalizations have exact blocks. The covectors that are pulled back must be
*the same for all samples* up to a sign which is taken off again: independent draws would cancel
every term with i ≠ j. The signs make no difference where samples pass the model apart, and where
they meet (batch normalization in training) they turn the cotangents that come from other samples
into noise of mean zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ...._core.space import compute_dtype
from ....maps.layers.moments import Moments, Sharing
from ....maps.layers.scale import Scale
from ....maps.record import Entry
from ....metrics import Metric
from .record import ForwardRecord


@dataclass(frozen=True)
class Coupling:
    """The samples' relation L⁻¹ (N, N), and the signs (N,) that the covector at hand has.

    `batch_dim` is the samples' axis in the model's output.
    """

    inverse: Tensor
    signs: Tensor
    batch_dim: int

    def whiten(self, x: Tensor, axis: int, *, signed: bool = False) -> Tensor:
        """L⁻¹ x along the axis of samples, after the covector's signs are taken off."""
        matrix = self.inverse * self.signs if signed else self.inverse
        moved = x.movedim(axis, 0)
        flat = matrix.to(x.dtype) @ moved.reshape(len(moved), -1)
        return flat.view(moved.shape).movedim(0, axis)

    def related_covector(self, covector: Tensor) -> Tensor:
        """For parameters that are held by squares: E[(Jᵀφ)²] = diag(JᵀMJ), given φ at the output.

        φ_i = (L⁻ᵀε)_i P_i v, where `covector` is ε_i P_i v.
        """
        factor = (self.inverse.mT @ self.signs) * self.signs
        axis = min(self.batch_dim, covector.ndim - 1)
        return covector * _along(factor.to(covector.dtype), covector, axis)

    def whitened_use(self, entry: Entry, delta: Tensor, sharing: Sharing) -> tuple[Tensor, Tensor]:
        """A use's input a as it is, and L⁻¹δ, both in full precision."""
        axis, dtype = samples_axis(entry, sharing), compute_dtype(delta.dtype)
        return entry.input.to(dtype), self.whiten(delta.to(dtype), axis, signed=True)

    def units(self, entry: Entry, delta: Tensor, roles: list[str], sharing: Sharing) -> Tensor:
        """Σ_ij K⁻¹_ij row_i row_jᵀ of gains and shifts, unit by unit: (U, k, k)."""
        layer = entry.layer
        assert isinstance(layer, Scale)
        rows = layer.unit_rows(entry.module, entry.input, delta, roles, sharing)
        rows = self.whiten(rows, 0, signed=True)
        return torch.einsum("nuk,nul->ukl", rows, rows)

    @cached_property
    def weights(self) -> Tensor:
        """K⁻¹1, (N,)."""
        return self.inverse.mT @ self.inverse.sum(1)

    def inputs(self, entry: Entry, x: Tensor, sharing: Sharing) -> Moments:
        """Σ āāᵀ of L⁻¹ā with ā = (a, 1), and its number of places as 1ᵀK⁻¹1 counts them."""
        axis = samples_axis(entry, sharing)
        found = entry.layer.inputs(entry.module, self.whiten(x, axis), sharing, None)
        # Σ_ij K⁻¹_ij a_i is linear in a: that of one sample, the weighted sum of all
        total = torch.tensordot(self.weights.to(x.dtype), x.movedim(axis, 0), 1)[None]
        cheap = replace(sharing, longest=0)  # its second moment is of no use
        one = entry.layer.inputs(entry.module, total.movedim(0, axis), cheap, None)
        return Moments(found.second, one.first, found.places * self.weights.mean())


def _along(v: Tensor, like: Tensor, axis: int) -> Tensor:
    return v.view([-1 if i == axis else 1 for i in range(like.ndim)])


def samples_axis(entry: Entry, sharing: Sharing) -> int:
    """The axis of a layer's input and output that counts samples."""
    lead = len(entry.shape) - entry.features
    return 0 if lead <= 1 else min(sharing.batch_dim, lead - 1)


def unaligned(entry: Entry, sharing: Sharing, samples: int) -> str:
    """Why the samples cannot be related at a use of a layer, or an empty string."""
    axis = samples_axis(entry, sharing)
    if any(len(s) <= axis or s[axis] != samples for s in (entry.shape, entry.input.shape)):
        shape = tuple(entry.shape)
        return f"the metric relates samples, and the layer's output {shape} does not show them"
    if not entry.input.is_floating_point():
        return "the metric relates samples, and hence every index to every other"
    return ""


def unrelated_parameters(
    record: ForwardRecord, sharing: Sharing, coupling: Coupling | None
) -> dict[str, str]:
    """The parameters that are held as diagonals since samples cannot be related there, and why."""
    if coupling is None:
        return {}
    out = {}
    for entry in record.entries:
        if reason := unaligned(entry, sharing, len(coupling.signs)):
            out |= {n: reason for n in entry.names.values() if n is not None}
    for call in record.compounds:
        kind = type(call.module).__name__
        reason = f"the metric relates samples, and the maps inside {kind} do not show them"
        names = map(record.name, call.module.parameters())
        out |= {n: reason for n in names if n is not None}
    return out


def coupled_covectors(
    metric: Metric,
    fisher: str,
    z: Tensor,
    *,
    draws: int,
    inputs: Tensor | None,
    generator: torch.Generator | None,
    batch_dim: int,
) -> Iterator[tuple[Tensor, Coupling]]:
    """Covectors (N, *event) that all samples share, up to signs, and how samples are related.

    "exact" runs through the columns of P, "mc" draws v ∈ {±1}^m once for the whole batch.
    """
    factor = metric.factor(z, inputs=inputs)
    if factor.coupling is None:
        raise coupling_error(metric, "its factor does not say how")
    lower, separate = factor.coupling, factor.separate()
    eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)

    def signed(covector: Tensor) -> tuple[Tensor, Coupling]:
        signs = random_signs((len(z),), z, generator)
        return covector * _along(signs, covector, 0), Coupling(inverse, signs, batch_dim)

    if fisher == "exact":
        for column in separate.covectors(z):
            yield signed(column)
        return
    for _ in range(draws):
        v = random_signs(separate.white, z, generator)
        yield signed(separate.apply(v.expand(len(z), *v.shape)) / draws**0.5)


def random_signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """±1 with equal probability, in the dtype of `like`."""
    coins = torch.randint(0, 2, shape, device=like.device, generator=generator)
    return (2 * coins - 1).to(like.dtype)


def coupling_error(metric: Metric, why: str) -> PullbackError:
    """A metric with blocks between samples, in a place where these are not known."""
    return PullbackError(
        "The metric couples the samples of a batch",
        f"{metric!r} has blocks between samples, and {why}",
        "Use NaturalGradient with this metric, or KFAC with a metric of single samples",
    )


def refuse_options(metric: Metric, *, fisher: str, ekfac: bool) -> None:
    """Raise for options that a metric with blocks between samples does not go with."""
    if not metric.couples_samples:
        return
    if fisher == "empirical":
        raise PullbackError(
            'fisher="empirical" does not go with this metric',
            f"{metric!r} relates samples, and their own gradients are not the same covector",
            'Use fisher="mc" or "exact"',
        )
    if ekfac:
        raise PullbackError(
            "ekfac=True does not go with this metric",
            f"{metric!r} relates samples, and the corrected eigenvalues are sums over single ones",
            "Leave ekfac out",
        )
