"""Second moments over the positions that share a weight: the sides of K-FAC's Kronecker products.

With inputs ā_nt and cotangents δ_nt at the positions t of sample n, the Gram of a weight is
Σ_n (Σ_t δ_nt ⊗ ā_nt)(Σ_t δ_nt ⊗ ā_nt)ᵀ. Sharing by *expansion* takes each position for a sample,

    Σ_nt δδᵀ ⊗ mean_nt āāᵀ,

and by *reduction* adds up first, Σ_n (Σ_t δ)(Σ_t δ)ᵀ ⊗ mean_n (mean_t ā)(mean_t ā)ᵀ. Expansion is
exact for deep linear nets whose loss is a sum over positions, reduction where the positions are
averaged.

Means are over the positions that *count*. These are all positions, unless the loss ignores some
positions of the output; then they are the counted ones and all that have a cotangent (see
`find_kept_or_reached_positions`): the model learns from an ignored prompt, through the tokens that
attend to it, but not from padding. Which axis of a layer counts samples is tested by a probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..._core.products import column_gram, write_half_precision_moment
from ..._core.space import compute_dtype, relative_tolerance


@dataclass(frozen=True)
class _Limits:
    """Bounds of round-off, of leaks between samples, and of memory."""

    #: share of a covector's squared length that may reach other samples, through a batch norm say
    leak: float = 0.25
    #: cotangents up to this many units in the last place of the largest one are round-off
    round_off: int = 10
    #: bytes of inputs that are copied to be multiplied at once. The copy lies beside the
    #: activations of the whole network, and 64 MiB are a small share of these.
    stacked_bytes: int = 2**26


_LIMITS = _Limits()


class SampleAxis(StrEnum):
    """Where the samples stand among a layer's leading axes."""

    FIRST = "first"
    SECOND = "second"
    #: axis 0 has N·positions entries, the samples slow or fast
    FOLDED = "folded"
    FOLDED_LAST = "folded-last"
    #: a single sample has no axis
    WHOLE = "whole"


@dataclass(frozen=True)
class SampleLayout:
    """How to read a layer's leading axes as (N, positions)."""

    axis: SampleAxis
    samples: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return x, whose leading axes are a layer's, with the samples first."""
        if self.axis is SampleAxis.FIRST:
            return x
        if self.axis is SampleAxis.SECOND:
            return x.transpose(0, 1)
        if self.axis is SampleAxis.FOLDED:
            return x.unflatten(0, (self.samples, -1))
        if self.axis is SampleAxis.FOLDED_LAST:
            return x.unflatten(0, (-1, self.samples)).transpose(0, 1)
        return x.unsqueeze(0)

    def apply_to_covectors(self, x: Tensor) -> Tensor:
        """Return cotangents of R covectors, (R, ...), with the samples first: (N, R, ...)."""
        return self(x.movedim(0, -1)).movedim(-1, 1)


def list_layouts(lead: tuple[int, ...], samples: int) -> Iterator[SampleLayout]:
    """Yield the layouts that the sizes allow, most common first."""
    if lead and lead[0] == samples:
        yield SampleLayout(SampleAxis.FIRST, samples)
    if len(lead) > 1 and lead[1] == samples:
        yield SampleLayout(SampleAxis.SECOND, samples)
    if lead and lead[0] % samples == 0:
        yield SampleLayout(SampleAxis.FOLDED, samples)
        yield SampleLayout(SampleAxis.FOLDED_LAST, samples)
    if samples == 1:
        yield SampleLayout(SampleAxis.WHOLE, samples)


def detect_layout(
    base: Tensor, scaled: Tensor, scales: Tensor, features: int, dtype: torch.dtype | None = None
) -> SampleLayout | None:
    """Return the layout under which `scaled` is `base` with sample n multiplied by scales[n].

    The two are the layer's cotangents for output covectors u and scales∘u. They agree exactly if
    the samples do not interact and are read from the right axis. None if no layout fits, or if the
    layer has no cotangents. `dtype` is the arithmetic's, by default that of the cotangents.
    """
    if not base.numel():
        return None
    lead = tuple(base.shape[: base.ndim - features])
    if dtype is None or base.dtype != torch.float64:
        dtype = base.dtype
    bound = relative_tolerance(dtype) * base.abs().max()
    for layout in list_layouts(lead, len(scales)):
        by_sample = layout(base)
        factors = scales.to(base.dtype).view(-1, *[1] * (by_sample.ndim - 1))
        if bool(((layout(scaled) - factors * by_sample).abs() <= bound).all()):
            return layout
    return None


def find_layout_of_chosen(delta: Tensor, chosen: Tensor, features: int) -> SampleLayout | None:
    """Return the layout that shows cotangents at all of the chosen samples, (N,), and no others.

    The covector that was pulled back is zero at the others. None if all cotangents are zero, or if
    they are spread over all samples whatever the layout.
    """
    axes = tuple(range(delta.ndim - features, delta.ndim))
    squares = torch.linalg.vector_norm(delta, dim=axes, dtype=compute_dtype(delta.dtype)).square()
    total = squares.sum()
    if not bool(total > 0):
        return None
    best = None
    smallest_defect = torch.inf
    for layout in list_layouts(tuple(squares.shape), len(chosen)):
        share = layout(squares)[:, None].flatten(1).sum(1) / total
        leak = float(share[~chosen].sum())
        silent = float((share[chosen] == 0).double().mean())
        if leak <= _LIMITS.leak and leak + silent < smallest_defect:
            smallest_defect = leak + silent
            best = layout
    return best


@dataclass(frozen=True)
class Sharing:
    """How the positions that share a weight enter its Kronecker product."""

    #: by reduction, or else by expansion
    reduce: bool = False
    #: the axis that counts samples
    batch_dim: int = 0
    #: sides longer than this are diagonals
    longest: int = 8192
    #: where the samples of one layer stand, if not on `batch_dim`
    layout: SampleLayout | None = None

    def by_sample(self, x: Tensor, features: int = 1) -> Tensor:
        """Return x as (N, positions, *features), from leading axes in any order."""
        lead = x.ndim - features
        if lead == 0:
            return x[None, None]
        if self.layout is not None:
            x = self.layout(x)[:, None]
            return x.flatten(1, x.ndim - features - 1)
        if lead == 1:
            return x[:, None]
        return x.movedim(min(self.batch_dim, lead - 1), 0).flatten(1, lead - 1)


@dataclass(frozen=True)
class Moments:
    """Sums over positions of a layer's inputs a."""

    #: Σ a aᵀ, (G, n, n), or its diagonal (G, n), or another form that can be added
    second: Any
    #: Σ a, (G, n)
    first: Tensor
    #: how many positions were added, one number or one for each group (G,)
    positions: Tensor | float

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.second + other.second, self.first + other.first, self.positions + other.positions
        )


def find_kept_or_reached_positions(delta: Tensor, keep: Tensor, axis: int = -1) -> Tensor:
    """Return a mask of the positions that count, with the shape of δ without `axis`, its features.

    A position counts if the loss keeps it, or if δ ≠ 0 beyond round-off.

    `keep` says which positions of the model's output the loss counts, (N, *positions). A layer
    with the same leading axes keeps the same positions. A layer with other positions (an encoder
    beside a decoder, an image before it is pooled) keeps all positions of a sample whose outputs
    are all kept. So all positions count where nothing is ignored, padded sources too, and an
    ignored target leaves out only positions of its own sample. If no axis is as long as the number
    of samples (rows that were routed to an expert), only δ decides, and all count if δ = 0.
    """
    reached = _find_reached(delta, axis)
    aligned = _align_mask(keep, reached)
    if aligned is not None:
        return reached | aligned
    axes = _match_axes(keep.shape, reached.shape)
    if axes is not None:
        keep_axis, layer_axis = axes
        whole_samples = keep.movedim(keep_axis, 0).flatten(1).all(1)
        reached = reached | _place_on_axis(whole_samples, layer_axis, reached.ndim)
    return reached | ~reached.any()


def _find_reached(delta: Tensor, axis: int) -> Tensor:
    """Return where δ is not zero; round-off counts as zero.

    The first query of a causal attention, for instance, has one key only, and the cotangent of
    its score is zero but for round-off.
    """
    if not delta.numel() or delta.dtype == torch.bool:
        return delta.any(axis)
    length = torch.linalg.vector_norm(delta, torch.inf, axis)
    eps = torch.finfo(compute_dtype(delta.dtype)).eps
    return length > _LIMITS.round_off * eps * length.amax()


def _align_mask(keep: Tensor, reached: Tensor) -> Tensor | None:
    """Return `keep` broadcast to a layer's positions, or None if its axes are not among them.

    If several alignments fit (there are as many samples as positions, and a layer may have them in
    either order), it is the one with the fewest cotangents at positions that are not kept.
    """
    alignments = _list_alignments(keep, reached)
    if not alignments:
        return None
    if len(alignments) == 1:
        return alignments[0]
    outside = torch.stack([(reached & ~aligned).sum() for aligned in alignments])
    return alignments[int(outside.argmin())]


def _list_alignments(keep: Tensor, reached: Tensor) -> list[Tensor]:
    """Return all ways to broadcast `keep` to the shape of `reached`, leading axes first."""
    alignments = []
    trailing = [1] * (reached.ndim - keep.ndim)
    is_leading = keep.shape == reached.shape[: keep.ndim]
    if is_leading:
        alignments.append(keep.view(*keep.shape, *trailing))
    if keep.ndim == 1:
        for axis, size in enumerate(reached.shape):
            if size == len(keep) and (axis > 0 or not is_leading):
                alignments.append(_place_on_axis(keep, axis, reached.ndim))
    elif is_leading and keep.ndim == 2 and keep.shape[0] == keep.shape[1]:
        alignments.append(keep.T.reshape(*keep.shape, *trailing))
    return alignments


def _place_on_axis(values: Tensor, axis: int, ndim: int) -> Tensor:
    """Return a vector as a view with `ndim` axes, its entries along one of them."""
    shape = [1] * ndim
    shape[axis] = -1
    return values.view(shape)


def _match_axes(shape: torch.Size, other: torch.Size) -> tuple[int, int] | None:
    """Return an axis of each shape with the same length, the same axis where possible."""
    for axis, (size, other_size) in enumerate(zip(shape, other, strict=False)):
        if size == other_size:
            return axis, axis
    for axis, size in enumerate(shape):
        if size in other:
            return axis, other.index(size)
    return None


def average_positions(x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return means over the positions of (N, P, *features), and which samples have any, (N,).

    `keep`, (N, P), says which positions count; all of them where it is None.
    """
    if keep is None:
        return x.mean(1), None
    keep = keep.view(*keep.shape, *[1] * (x.ndim - 2))
    counts = keep.sum(1)
    return (x * keep).sum(1) / counts.clamp(min=1), counts.flatten() > 0


def compute_second_moment(x: Tensor, sharing: Sharing) -> Tensor:
    """Return Σ_p x xᵀ over the positions of (G, P, n), or its diagonal where n is too long."""
    if x.shape[-1] > sharing.longest:
        return torch.linalg.vector_norm(x, dim=1, dtype=compute_dtype(x.dtype)).square()
    if x.shape[0] == 1:
        return column_gram(x[0])[None]
    x = x.to(compute_dtype(x.dtype))
    return x.mT @ x


def can_stack(x: Tensor) -> bool:
    """Return True if products of x can be written into a tensor of higher precision."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def compute_stacked_moments(
    inputs: Sequence[Tensor], keep: Sequence[Tensor] | None = None
) -> list[Moments]:
    """Return the moments of several half-precision inputs (..., n) of one shape, on a GPU.

    `keep` has a mask (...) of the positions that count for each. Small inputs are copied and
    multiplied together: that takes less time than a launch for each.
    """
    x = inputs[0]
    count = len(inputs)
    n = x.shape[-1]
    mask: Tensor | None = None
    positions: Sequence[Tensor | float] = [x.numel() // n] * count
    if keep is not None:
        mask = torch.stack([k.flatten() for k in keep])[..., None]
        positions = mask.sum((1, 2)).unbind()
    second = x.new_empty(count, 1, n, n, dtype=torch.float32)
    first = x.new_empty(count, 1, n, dtype=torch.float32)
    step = max(1, _LIMITS.stacked_bytes // max(1, x.nbytes))
    for start in range(0, count, step):
        batch = slice(start, start + step)
        rows = _concatenate([x.reshape(1, -1, n) for x in inputs[batch]])
        if mask is not None:
            rows = rows * mask[batch]
        _write_moments(second[batch, 0], first[batch], rows)
    sums = zip(second.unbind(), first.unbind(), positions, strict=True)
    return [Moments(*moments) for moments in sums]


def _concatenate(tensors: list[Tensor]) -> Tensor:
    """Return the tensors along axis 0; one alone is not copied."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors)


def _write_moments(second: Tensor, first: Tensor, rows: Tensor) -> None:
    """Write Σ x xᵀ (K, n, n) and Σ x (K, 1, n) of rows (K, P, n)."""
    if len(rows) == 1 and rows.dtype != second.dtype:
        write_half_precision_moment(second[0], rows[0])
    else:
        _write_batched_product(second, rows.mT, rows)
    ones = _ones(rows.shape[1], rows.dtype, rows.device).expand(len(rows), -1, -1)
    _write_batched_product(first, ones, rows)


@lru_cache(8)
def _ones(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, 1, n, dtype=dtype, device=device)


def _write_batched_product(out: Tensor, x: Tensor, y: Tensor) -> None:
    if x.dtype == out.dtype:
        torch.bmm(x, y, out=out)
    else:
        torch.bmm(x, y, out_dtype=out.dtype, out=out)


def compute_moments(
    x: Tensor, sharing: Sharing, keep: Tensor | None = None, *, first: bool = True
) -> Moments:
    """Return the moments of (G, P, n) over the positions of a mask `keep`, (P,) or (G, P).

    Without `first` (a layer without bias does not need it) the first moment is zero, (G, 1).
    """
    positions: Tensor | float = x.shape[1]
    if keep is not None:
        x = x * keep[..., None]
        positions = keep.sum(-1)
    second = compute_second_moment(x, sharing)
    dtype = compute_dtype(x.dtype)
    if first:
        total = x.sum(1, dtype=dtype)
    else:
        total = x.new_zeros(x.shape[0], 1, dtype=dtype)
    return Moments(second, total, positions)


def compute_shared_moments(a: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
    """Return the moments of (B, G, positions, n), shared by expansion or reduction.

    `keep` is a mask of the samples, (B,), or of the positions that count.
    """
    if keep is not None:
        keep = keep.reshape(len(keep), -1).expand(len(a), a.shape[2])
    if sharing.reduce:
        if keep is not None:
            keep = sharing.by_sample(keep).flatten(1)
        by_sample = sharing.by_sample(a.transpose(1, 2), 3).flatten(1, 2)
        averages, has_positions = average_positions(by_sample, keep)
        return compute_moments(averages.transpose(0, 1), sharing, has_positions)
    if keep is not None:
        keep = keep.flatten()
    return compute_moments(a.transpose(0, 1).flatten(1, 2), sharing, keep)


def compute_shared_second_moment(d: Tensor, sharing: Sharing) -> Tensor:
    """Return Σ δδᵀ of cotangents (B, G, positions, n); by reduction positions are added first."""
    if sharing.reduce:
        return compute_second_moment(sharing.by_sample(d.sum(2), 2).sum(1).transpose(0, 1), sharing)
    return compute_second_moment(d.transpose(0, 1).flatten(1, 2), sharing)
