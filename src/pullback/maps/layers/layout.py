"""Where the samples stand among a layer's leading axes, established by a probe and not by guess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.space import compute_dtype, tolerance

_LEAK = 0.25  # of a covector that may reach other samples, by way of a batch normalization say


@dataclass(frozen=True)
class Layout:
    """A way to read leading axes as (N, places): batch first, second, or folded into axis 0."""

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
        n = self.samples
        if self.kind == "first":
            return x.transpose(0, 1)
        if self.kind == "second":
            return x.movedim(2, 0)
        if self.kind == "folded":
            return x.unflatten(1, (n, -1)).transpose(0, 1)
        if self.kind == "folded-last":
            return x.unflatten(1, (-1, n)).movedim(2, 0)
        return x.unsqueeze(0)


def candidates(lead: tuple[int, ...], samples: int) -> Iterator[Layout]:
    """The layouts that the sizes allow, most common first."""
    if lead and lead[0] == samples:
        yield Layout("first", samples)
    if len(lead) > 1 and lead[1] == samples:
        yield Layout("second", samples)
    if lead and lead[0] % samples == 0:
        yield Layout("folded", samples)
        yield Layout("folded-last", samples)
    if samples == 1:
        yield Layout("whole", samples)


def detect(
    base: Tensor, scaled: Tensor, scales: Tensor, features: int, dtype: torch.dtype | None = None
) -> Layout | None:
    """The layout under which `scaled` is `base` with sample n multiplied by scales[n].

    `dtype` is that of the arithmetic on the way, by default the cotangents' own.

    The two are the layer's cotangents for outputs u and scales∘u: they agree exactly when
    the samples do not interact and are read from the right axis. A layer that met nothing has none.
    """
    if not base.numel():
        return None
    lead = tuple(base.shape[: base.ndim - features])
    dtype = base.dtype if dtype is None or base.dtype != torch.float64 else dtype
    bound = tolerance(dtype) * base.abs().max()
    for layout in candidates(lead, len(scales)):
        one, two = layout(base), layout(scaled)
        c = scales.to(one.dtype).view(-1, *[1] * (one.ndim - 1))
        if bool(((two - c * one).abs() <= bound).all()):
            return layout
    return None


def told(delta: Tensor, chosen: Tensor, features: int) -> Layout | None:
    """The layout that shows cotangents at the chosen samples, (N,), at all of these and no others.

    The covector that was pulled back is zero at the others. None where nothing came of it, or where
    it is spread over all samples whatever the layout.
    """
    axes = tuple(range(delta.ndim - features, delta.ndim))
    size = torch.linalg.vector_norm(delta, dim=axes, dtype=compute_dtype(delta.dtype)).square()
    total, found = size.sum(), []
    if not bool(total > 0):
        return None
    for layout in candidates(tuple(size.shape), len(chosen)):
        own = layout(size)[:, None].flatten(1).sum(1) / total
        leak, silent = float(own[~chosen].sum()), float((own[chosen] == 0).double().mean())
        if leak <= _LEAK:
            found.append((leak + silent, layout))
    return min(found, key=lambda pair: pair[0])[1] if found else None
