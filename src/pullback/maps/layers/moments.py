"""Second moments over the positions that share a weight: the sides of K-FAC's Kronecker products.

With inputs ā_nt and cotangents δ_nt at the positions t of sample n, the Gram of a weight is
Σ_n (Σ_t δ_nt ⊗ ā_nt)(Σ_t δ_nt ⊗ ā_nt)ᵀ. Sharing by *expansion* takes every place for a sample,

    Σ_nt δδᵀ ⊗ mean_nt āāᵀ,

and by *reduction* adds up first, Σ_n (Σ_t δ)(Σ_t δ)ᵀ ⊗ mean_n (mean_t ā)(mean_t ā)ᵀ. Expansion is
exact for deep linear nets whose loss is a sum over positions, reduction where the positions are
averaged.

Means are over the positions that *count*: all of them, unless the loss ignores some of the
output's. Then these are the others and all that have a cotangent (see `counted`): one learns from
an ignored prompt as well, by way of what attends to it, and from padding not. Where the samples
stand among a layer's leading axes is established by a probe and not by guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..._core.products import column_gram, write_half_precision_moment
from ..._core.space import compute_dtype, relative_tolerance

_LEAK = 0.25  # of a covector that may reach other samples, by way of a batch normalization say


@dataclass(frozen=True)
class SampleLayout:
    """A way to read leading axes as (N, positions): batch first, second, or folded into axis 0."""

    kind: str
    samples: int

    def __call__(self, x: Tensor) -> Tensor:
        """x with the samples first."""
        n = self.samples
        if self.kind == "first":
            return x
        if self.kind == "second":
            return x.transpose(0, 1)
        if self.kind == "folded":
            return x.unflatten(0, (n, -1))
        if self.kind == "folded-last":
            return x.unflatten(0, (-1, n)).transpose(0, 1)
        return x.unsqueeze(0)

    def of_batch(self, x: Tensor) -> Tensor:
        """The same for covectors side by side, (R, ...), as a view: (N, R, ...)."""
        return self(x.movedim(0, -1)).movedim(-1, 1)


def candidates(lead: tuple[int, ...], samples: int) -> Iterator[SampleLayout]:
    """The layouts that the sizes allow, most common first."""
    if lead and lead[0] == samples:
        yield SampleLayout("first", samples)
    if len(lead) > 1 and lead[1] == samples:
        yield SampleLayout("second", samples)
    if lead and lead[0] % samples == 0:
        yield SampleLayout("folded", samples)
        yield SampleLayout("folded-last", samples)
    if samples == 1:
        yield SampleLayout("whole", samples)


def detect(
    base: Tensor, scaled: Tensor, scales: Tensor, features: int, dtype: torch.dtype | None = None
) -> SampleLayout | None:
    """The layout under which `scaled` is `base` with sample n multiplied by scales[n].

    `dtype` is that of the arithmetic on the way, by default the cotangents' own.

    The two are the layer's cotangents for outputs u and scales∘u: they agree exactly when
    the samples do not interact and are read from the right axis. A layer that met nothing has none.
    """
    if not base.numel():
        return None
    lead = tuple(base.shape[: base.ndim - features])
    if dtype is None or base.dtype != torch.float64:
        dtype = base.dtype
    bound = relative_tolerance(dtype) * base.abs().max()
    for layout in candidates(lead, len(scales)):
        one = layout(base)
        two = layout(scaled)
        c = scales.to(one.dtype).view(-1, *[1] * (one.ndim - 1))
        if bool(((two - c * one).abs() <= bound).all()):
            return layout
    return None


def find_layout(delta: Tensor, chosen: Tensor, features: int) -> SampleLayout | None:
    """The layout that shows cotangents at the chosen samples, (N,), at all of these and no others.

    The covector that was pulled back is zero at the others. None where nothing came of it, or where
    it is spread over all samples whatever the layout.
    """
    axes = tuple(range(delta.ndim - features, delta.ndim))
    size = torch.linalg.vector_norm(delta, dim=axes, dtype=compute_dtype(delta.dtype)).square()
    total = size.sum()
    found = []
    if not bool(total > 0):
        return None
    for layout in candidates(tuple(size.shape), len(chosen)):
        own = layout(size)[:, None].flatten(1).sum(1) / total
        leak = float(own[~chosen].sum())
        silent = float((own[chosen] == 0).double().mean())
        if leak <= _LEAK:
            found.append((leak + silent, layout))
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    return None


_ROUND_OFF = 10  # in units of the last place
_TOGETHER = 2**26  # bytes of inputs that are copied to be multiplied at once


@dataclass(frozen=True)
class Sharing:
    """How positions enter, which axis counts samples, and from where on sides are diagonals.

    `layout` says where the samples of one layer stand, if it is elsewhere than on `batch_dim`.
    """

    reduce: bool = False
    batch_dim: int = 0
    longest: int = 8192
    layout: SampleLayout | None = None

    def by_sample(self, x: Tensor, features: int = 1) -> Tensor:
        """(N, positions, *features), from leading axes in any order."""
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
    """Σ a aᵀ, (G, n, n) or a diagonal (G, n); Σ a, (G, n); and how many positions (or G counts).

    The second moment may be held in another form that can be added.
    """

    second: Any
    first: Tensor
    positions: Tensor | float

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.second + other.second, self.first + other.first, self.positions + other.positions
        )


def counted(delta: Tensor, keep: Tensor, axis: int = -1) -> Tensor:
    """Which positions count, the shape of δ without `axis`, its features: kept, or with δ ≠ 0
    beyond round-off.

    `keep` says which positions of the model's output the loss counts, (N, *positions). A layer
    whose positions begin like these keeps the same. Elsewhere they are others (an encoder's beside
    those of a decoder, an image's before it is pooled), and a sample's are all kept if its outputs
    are: so all count where nothing is ignored, padded sources too, and a target that is ignored
    leaves out none but positions of its own sample. Where no axis is as long as the samples' (rows
    that an expert was given), δ alone tells, unless there is none at all.
    """
    reached = _reached(delta, axis)
    if (found := _placed(keep, reached)) is not None:
        return reached | found
    if (agree := _agree(keep.shape, reached.shape)) is not None:
        whole = keep.movedim(agree[0], 0).flatten(1).all(1)
        reached = reached | whole.view([-1 if i == agree[1] else 1 for i in range(reached.ndim)])
    return reached | ~reached.any()


def _reached(delta: Tensor, axis: int) -> Tensor:
    """Where δ is not zero but for round-off: a first query, say, has but one key to choose."""
    if not delta.numel() or delta.dtype == torch.bool:
        return delta.any(axis)
    length = torch.linalg.vector_norm(delta, torch.inf, axis)
    return length > _ROUND_OFF * torch.finfo(compute_dtype(delta.dtype)).eps * length.amax()


def _placed(keep: Tensor, reached: Tensor) -> Tensor | None:
    """`keep` beside the positions of a layer, where it can be told which of its axes are theirs.

    Samples and positions may be as many, and a layer inside may have them the other way round: then
    it is the way in which fewer cotangents stand where `keep` has none.
    """
    ends = [1] * (reached.ndim - keep.ndim)
    if keep.shape == reached.shape[: keep.ndim]:
        found = [keep.view(*keep.shape, *ends)]
    else:
        found = []
    if keep.ndim == 1:
        axes = [i for i, n in enumerate(reached.shape) if n == len(keep) and (i or not found)]
        found += [keep.view([-1 if i == j else 1 for j in range(reached.ndim)]) for i in axes]
    elif found and keep.ndim == 2 and keep.shape[0] == keep.shape[1]:
        found.append(keep.T.reshape(*keep.shape, *ends))
    if len(found) > 1:
        astray = torch.stack([(reached & ~one).sum() for one in found])
        return found[int(astray.argmin())]
    if found:
        return found[0]
    return None


def _agree(one: torch.Size, two: torch.Size) -> tuple[int, int] | None:
    """An axis of each with the same length, the same axis where possible."""
    found = [(i, j) for i, a in enumerate(one) for j, b in enumerate(two) if a == b]
    return min(found, key=lambda pair: pair[0] != pair[1], default=None)


def means(x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return means over the positions of (N, P, *features), and which samples have any, (N,).

    `keep`, (N, P), says which positions count; all of them where it is None.
    """
    if keep is None:
        return x.mean(1), None
    keep = keep.view(*keep.shape, *[1] * (x.ndim - 2))
    counts = keep.sum(1)
    return (x * keep).sum(1) / counts.clamp(min=1), counts.flatten() > 0


def second_moment(x: Tensor, sharing: Sharing) -> Tensor:
    """Σ_p x xᵀ over the positions of (G, P, n), as a diagonal where n is too long."""
    if x.shape[-1] > sharing.longest:
        return torch.linalg.vector_norm(x, dim=1, dtype=compute_dtype(x.dtype)).square()
    if x.shape[0] == 1:
        return column_gram(x[0])[None]
    x = x.to(compute_dtype(x.dtype))
    return x.mT @ x


def stackable(x: Tensor) -> bool:
    """Whether products of x can be written where they are wanted, in another precision than x's."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def stacked(uses: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> list[Moments]:
    """The moments of several (..., n) in half precision on a GPU, of one shape, side by side.

    `keep` says for each which positions count, (...). Small ones are copied to be multiplied at
    once: a launch each takes longer than to move them.
    """
    x = uses[0]
    count = len(uses)
    n = x.shape[-1]
    if keep is None:
        mask = None
    else:
        mask = torch.stack([k.flatten() for k in keep])[..., None]
    if mask is None:
        positions = [x.numel() // n] * count
    else:
        positions = mask.sum((1, 2)).unbind()
    second = x.new_empty(count, 1, n, n, dtype=torch.float32)
    first = x.new_empty(count, 1, n, dtype=torch.float32)
    step = max(1, _TOGETHER // max(1, x.nbytes))
    for a in range(0, count, step):
        some = [x.reshape(1, -1, n) for x in uses[a : a + step]]
        if len(some) == 1:
            rows = some[0]
        else:
            rows = torch.cat(some)
        if mask is not None:
            rows = rows * mask[a : a + step]
        if len(some) == 1 and rows.dtype != second.dtype:
            write_half_precision_moment(second[a, 0], rows[0])
        else:
            _batched_into(second[a : a + step, 0], rows.mT, rows)
        ones = _ones(rows.shape[1], rows.dtype, rows.device).expand(len(some), -1, -1)
        _batched_into(first[a : a + step], ones, rows)
    each = zip(second.unbind(), first.unbind(), positions, strict=True)
    return [Moments(*one) for one in each]


@lru_cache(8)
def _ones(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, 1, n, dtype=dtype, device=device)


def _batched_into(out: Tensor, x: Tensor, y: Tensor) -> None:
    if x.dtype == out.dtype:
        torch.bmm(x, y, out=out)
    else:
        torch.bmm(x, y, out_dtype=out.dtype, out=out)


def moments(
    x: Tensor, sharing: Sharing, keep: Tensor | None = None, *, first: bool = True
) -> Moments:
    """The moments of (G, P, n); `keep` says which positions count, (P,) or for each group (G, P).

    Where nobody needs the first one, since there is no bias, it is zero, (G, 1).
    """
    positions: Tensor | float = x.shape[1]
    if keep is not None:
        x = x * keep[..., None]
        positions = keep.sum(-1)
    second = second_moment(x, sharing)
    dtype = compute_dtype(x.dtype)
    if first:
        ones = x.sum(1, dtype=dtype)
    else:
        ones = x.new_zeros(x.shape[0], 1, dtype=dtype)
    return Moments(second, ones, positions)


def shared_moments(a: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
    """The moments of (B, G, positions, n); `keep` says which samples, (B,), or positions count."""
    if keep is not None:
        keep = keep.reshape(len(keep), -1).expand(len(a), a.shape[2])
    if not sharing.reduce:
        if keep is None:
            kept = None
        else:
            kept = keep.flatten()
        return moments(a.transpose(0, 1).flatten(1, 2), sharing, kept)
    if keep is not None:
        keep = sharing.by_sample(keep).flatten(1)
    a, kept = means(sharing.by_sample(a.transpose(1, 2), 3).flatten(1, 2), keep)
    return moments(a.transpose(0, 1), sharing, kept)


def shared_second_moment(d: Tensor, sharing: Sharing) -> Tensor:
    """Σ δδᵀ of cotangents (B, G, positions, n), which are added up over positions by reduction."""
    if sharing.reduce:
        return second_moment(sharing.by_sample(d.sum(2), 2).sum(1).transpose(0, 1), sharing)
    return second_moment(d.transpose(0, 1).flatten(1, 2), sharing)
