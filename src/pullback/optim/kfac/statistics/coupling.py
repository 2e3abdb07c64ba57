r"""Statistics under a metric M = P (K⁻¹ ⊗ I) Pᵀ that relates the samples of a batch, K = L Lᵀ.

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

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ...._core.space import compute_dtype
from ....maps.layers.moments import Moments, Sharing
from ....maps.record import Entry
from ....metrics import Metric
from .record import ForwardRecord


@dataclass(frozen=True)
class Coupling:
    """The samples' relation L⁻¹ (N, N), and the signs (N,) that the covector at hand has."""

    inverse: Tensor
    signs: Tensor

    def whiten(self, x: Tensor, axis: int, *, signed: bool = False) -> Tensor:
        """L⁻¹ x along the axis of samples, after the covector's signs are taken off."""
        matrix = self.inverse * self.signs if signed else self.inverse
        moved = x.movedim(axis, 0)
        flat = matrix.to(x.dtype) @ moved.reshape(len(moved), -1)
        return flat.view(moved.shape).movedim(0, axis)

    def related_covector(self, covector: Tensor, axis: int) -> Tensor:
        """Return φ_i = (L⁻ᵀε)_i P_i v for the covector ε_i P_i v: E[(Jᵀφ)²] = diag(JᵀMJ)."""
        factor = (self.inverse.mT @ self.signs) * self.signs
        along = [-1 if i == axis else 1 for i in range(covector.ndim)]
        return covector * factor.to(covector.dtype).view(along)

    def whitened_use(self, entry: Entry, delta: Tensor, sharing: Sharing) -> tuple[Tensor, Tensor]:
        """A use's input a as it is, and L⁻¹δ, both in full precision."""
        axis, dtype = samples_axis(entry, sharing), compute_dtype(delta.dtype)
        return entry.input.to(dtype), self.whiten(delta.to(dtype), axis, signed=True)

    def units(self, entry: Entry, delta: Tensor, roles: list[str], sharing: Sharing) -> Tensor:
        """Σ_ij K⁻¹_ij row_i row_jᵀ of gains and shifts, unit by unit: (U, k, k)."""
        layer: Any = entry.layer
        rows = layer.unit_rows(entry.module, entry.input, delta, roles, sharing)
        rows = self.whiten(rows, 0, signed=True)
        return torch.einsum("nuk,nul->ukl", rows, rows)

    def unrelated(self, record: ForwardRecord, sharing: Sharing) -> dict[str, str]:
        """Return the parameters held as diagonals since samples cannot be related, and why."""
        out: dict[str | None, str] = {}
        for entry in record.entries:
            axis, shapes = samples_axis(entry, sharing), (tuple(entry.shape), entry.input.shape)
            if any(len(s) <= axis or s[axis] != len(self.signs) for s in shapes):
                reason = f"the layer's output {shapes[0]} does not show them"
                out |= dict.fromkeys(entry.names.values(), reason)
            elif not entry.input.is_floating_point():
                out |= dict.fromkeys(entry.names.values(), "hence every index to every other")
        for call in record.compounds:
            reason = f"the maps inside {type(call.module).__name__} do not show them"
            out |= dict.fromkeys(map(record.name, call.module.parameters()), reason)
        said = "the metric relates samples, and"
        return {n: f"{said} {why}" for n, why in out.items() if n is not None}

    def inputs(self, entry: Entry, x: Tensor, sharing: Sharing) -> Moments:
        """Σ āāᵀ of L⁻¹ā with ā = (a, 1), and its number of places as 1ᵀK⁻¹1 counts them."""
        axis = samples_axis(entry, sharing)
        found = entry.layer.inputs(entry.module, self.whiten(x, axis), sharing, None)
        weights = self.inverse.mT @ self.inverse.sum(1)  # K⁻¹1
        # Σ_ij K⁻¹_ij a_i is linear in a: that of one sample, the weighted sum of all
        total = torch.tensordot(weights.to(x.dtype), x.movedim(axis, 0), 1)[None]
        cheap = replace(sharing, longest=0)  # its second moment is of no use
        one = entry.layer.inputs(entry.module, total.movedim(0, axis), cheap, None)
        return Moments(found.second, one.first, found.places * weights.mean())


def samples_axis(entry: Entry, sharing: Sharing) -> int:
    """The axis of a layer's input and output that counts samples."""
    lead = len(entry.shape) - entry.features
    return 0 if lead <= 1 else min(sharing.batch_dim, lead - 1)


def coupling_error(metric: Metric, why: str) -> PullbackError:
    """Return the error for a metric with blocks between samples that are not known."""
    return PullbackError(
        "The metric couples the samples of a batch",
        f"{metric!r} has blocks between samples, and {why}",
        "Use NaturalGradient with this metric, or KFAC with a metric of single samples",
    )


def refuse_options(metric: Metric, *, fisher: str, ekfac: bool) -> None:
    """Raise for options that a metric with blocks between samples does not go with."""
    if metric.couples_samples and fisher == "empirical":
        raise PullbackError(
            'fisher="empirical" does not go with this metric',
            f"{metric!r} relates samples, and their own gradients are not the same covector",
            'Use fisher="mc" or "exact"',
        )
    if metric.couples_samples and ekfac:
        raise PullbackError(
            "ekfac=True does not go with this metric",
            f"{metric!r} relates samples, and the corrected eigenvalues are sums over single ones",
            "Leave ekfac out",
        )
