"""Where each layer has its samples: a covector of some samples shows it where sizes leave a doubt.

Gains and shifts, reduced places and corrected eigenvalues are sums over samples, of which each may
have several places. A layer shows them on the output's axis of samples as a rule; but a model may
turn its axes over, fold them into one, or pick some places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.graph import Root, pull
from ....maps.layers.layout import candidates, told
from ....maps.layers.moments import Sharing
from ....maps.record import Entry
from .coupling import samples_axis

#: the layout of a use where the samples' places are not known
UNKNOWN = "unknown"
_REMARK = "which of its places belong to one sample is not known, and each is taken for one"


def locate_samples(
    root: Root,
    covector: Tensor,
    entries: Sequence[Entry],
    edges: Sequence[GradientEdge],
    leaves: Mapping[str, Tensor],
    sharing: Sharing,
    *,
    apart: bool,
) -> list[str]:
    """By use: empty where the axis tells, the kind of a `Layout`, or `UNKNOWN`.

    The covector shows the output's shape: one of the metric's may be that of a single position.
    `apart` says that all layers have to tell samples apart, and not only gains and shifts.
    """
    axis = min(sharing.batch_dim, covector.ndim - 1)
    out, samples = [""] * len(entries), covector.shape[axis]
    doubtful = [
        i
        for i, e in enumerate(entries)
        if (apart or e.layer.curvature == "units") and _doubtful(e, sharing, samples)
    ]
    if not doubtful:
        return out
    chosen = _half_of(samples).to(covector.device)

    def observe(i: int, number: int, cotangents: Sequence[Tensor | None]) -> None:
        if (delta := cotangents[number]) is not None and delta.numel():
            layout = told(delta.reshape(entries[i].shape), chosen, entries[i].features)
            out[i] = out[i] if layout is None else layout.kind

    for i in doubtful:
        out[i] = "" if _on_batch_axis(entries[i], sharing, samples) else UNKNOWN
    handles = [
        edges[i].node.register_prehook(partial(observe, i, edges[i].output_nr)) for i in doubtful
    ]
    try:
        mask = chosen.view([-1 if i == axis else 1 for i in range(covector.ndim)])
        pull(root, covector_everywhere(covector).mul_(mask), list(leaves.values()))
    finally:
        for handle in handles:
            handle.remove()
    return out


def layout_signature(
    entries: Sequence[Entry], sharing: Sharing, samples: int, *, apart: bool
) -> tuple[bool, ...]:
    """The sizes on which the answer of `locate_samples` depends."""
    some = [e for e in entries if apart or e.layer.curvature == "units"]
    return (samples == 1, *[_on_batch_axis(e, sharing, samples) for e in some])


def unknown_layouts(entries: Sequence[Entry], layouts: Sequence[str]) -> dict[str, str]:
    """What `UNKNOWN` means for the parameters of such uses."""
    uses = [e for e, at in zip(entries, layouts, strict=True) if at == UNKNOWN]
    said = [(n, f"{type(e.module).__name__}; {_REMARK}") for e in uses for n in e.names.values()]
    return {n: text for n, text in said if n is not None}


def sharing_of(sharing: Sharing, layout: str, entry: Entry, samples: int) -> Sharing:
    """How the places of one use enter; each for itself where the samples are not known."""
    lead = tuple(entry.shape[: len(entry.shape) - entry.features])
    fitting = [at for at in candidates(lead, samples) if at.kind == layout]
    return replace(sharing, layout=fitting[0]) if fitting else replace(sharing, reduce=False)


def _doubtful(entry: Entry, sharing: Sharing, samples: int) -> bool:
    lead = entry.shape[: len(entry.shape) - entry.features]
    return len(lead) > 0 and (
        not _on_batch_axis(entry, sharing, samples) or lead.count(samples) > 1
    )


def _on_batch_axis(entry: Entry, sharing: Sharing, samples: int) -> bool:
    """Whether the output's axis of samples has their number here as well."""
    return entry.shape[samples_axis(entry, sharing)] == samples


def covector_everywhere(covector: Tensor) -> Tensor:
    """A fixed random covector, nonzero at all positions and about as long as the metric's."""
    random = torch.Generator(covector.device).manual_seed(0)
    return torch.empty_like(covector).normal_(0, covector.shape[-1] ** -0.5, generator=random)


def _half_of(samples: int) -> Tensor:
    """About half of the samples in no order, always the same: the first one and not the last."""
    chosen = torch.rand(samples, generator=torch.Generator().manual_seed(0)) < 0.5
    chosen[-1] = False
    chosen[0] = True
    return chosen
