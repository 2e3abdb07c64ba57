"""Rows Σ_t δ_t ⊗ ā_t of small layers, written to where they belong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .jet import Used

#: cotangents (S·N, …, O) for each of R covectors and T channels
Deltas = Sequence[Sequence[Tensor]]

_PASSES = 16  # over the entries, that a batch of tiny matrix products is worth


def looped(used: Used, deltas: Deltas, sites: int) -> bool:
    """Whether the layer is so narrow on one side that a loop over it is fastest."""
    delta = deltas[0][0]
    passes = len(deltas[0]) * sites * min(delta.shape[-1], used.input.shape[-1])
    return delta.ndim == 2 and passes <= _PASSES and not delta.is_cuda


def write_rows(
    used: Used, deltas: Deltas, sites: int, weight: Tensor | None, bias: Tensor | None
) -> None:
    """The rows of one use of a layer.

    Args:
        used: with T channels of inputs (S·N, I).
        deltas: its cotangents.
        sites: S.
        weight: (N, R, O·I), written to.
        bias: (N, R, O), written to.
    """
    terms = []
    for t, a in enumerate(used.channels):
        d = [one[t] for one in deltas]
        if any(x.stride() != (0, 0) for x in d):  # which marks zeros
            joint = d[0][:, None] if len(d) == 1 else torch.stack(d, 1)
            terms += [(t, *pair) for pair in zip(joint.chunk(sites), a.chunk(sites), strict=True)]
    if bias is not None:
        for d in (d for t, d, _ in terms if t == 0):
            bias += d
    if weight is not None and terms:
        out = weight.unflatten(-1, (deltas[0][0].shape[-1], used.input.shape[-1]))
        _outer([d for _, d, _ in terms], [a for _, _, a in terms], out)


def _outer(d: Sequence[Tensor], a: Sequence[Tensor], out: Tensor) -> None:
    """Σ_t d_t ⊗ a_t of (N, R, O) and (N, I) into (N, R, O, I), feature by feature."""
    few = a[0].shape[-1] <= d[0].shape[-1]
    for k in range(min(a[0].shape[-1], d[0].shape[-1])):
        if few:
            pairs = [(delta, x[:, None, k, None]) for delta, x in zip(d, a, strict=True)]
        else:
            pairs = [(delta[..., k, None], x[:, None]) for delta, x in zip(d, a, strict=True)]
        some = pairs[0][0] * pairs[0][1]
        for one, two in pairs[1:]:
            some.addcmul_(one, two)
        (out[..., k] if few else out[:, :, k]).copy_(some)
