"""Where each layer has its samples, told by a covector of some of them where sizes leave a doubt.

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

from ....maps.layers.layout import candidates, told
from ....maps.layers.moments import Sharing
from ....maps.record import Entry
from .coupling import samples_axis
from .graph import Roots, pulled

#: how a use of a layer is marked where nobody knows
UNKNOWN = "unknown"
_REMARK = "which of its places belong to one sample is not known, and each is taken for one"


def located(
    root: Roots,
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
    chosen = _some(samples).to(covector.device)

    def look(i: int, number: int, cotangents: Sequence[Tensor | None]) -> None:
        if (delta := cotangents[number]) is not None and delta.numel():
            layout = told(delta.reshape(entries[i].shape), chosen, entries[i].features)
            out[i] = out[i] if layout is None else layout.kind

    for i in doubtful:
        out[i] = "" if _shown(entries[i], sharing, samples) else UNKNOWN
    handles = [
        edges[i].node.register_prehook(partial(look, i, edges[i].output_nr)) for i in doubtful
    ]
    try:
        mask = chosen.view([-1 if i == axis else 1 for i in range(covector.ndim)])
        pulled(root, everywhere(covector).mul_(mask), list(leaves.values()))
    finally:
        for handle in handles:
            handle.remove()
    return out


def sizes(
    entries: Sequence[Entry], sharing: Sharing, samples: int, *, apart: bool
) -> tuple[bool, ...]:
    """What a pass lets `located` tell: of one sample, or one place each, not as much as of more."""
    some = [e for e in entries if apart or e.layer.curvature == "units"]
    return (samples == 1, *[_shown(e, sharing, samples) for e in some])


def unknown(entries: Sequence[Entry], layouts: Sequence[str]) -> dict[str, str]:
    """What `UNKNOWN` means for the parameters of such uses."""
    uses = [e for e, at in zip(entries, layouts, strict=True) if at == UNKNOWN]
    said = [(n, f"{type(e.module).__name__}; {_REMARK}") for e in uses for n in e.names.values()]
    return {n: text for n, text in said if n is not None}


def shared(sharing: Sharing, layout: str, entry: Entry, samples: int) -> Sharing:
    """How the places of one use enter; all of them on their own where nobody knows the samples."""
    lead = tuple(entry.shape[: len(entry.shape) - entry.features])
    fitting = [at for at in candidates(lead, samples) if at.kind == layout]
    return replace(sharing, layout=fitting[0]) if fitting else replace(sharing, reduce=False)


def _doubtful(entry: Entry, sharing: Sharing, samples: int) -> bool:
    lead = entry.shape[: len(entry.shape) - entry.features]
    return len(lead) > 0 and (not _shown(entry, sharing, samples) or lead.count(samples) > 1)


def _shown(entry: Entry, sharing: Sharing, samples: int) -> bool:
    """Whether the output's axis of samples has their number here as well."""
    return entry.shape[samples_axis(entry, sharing)] == samples


def everywhere(covector: Tensor) -> Tensor:
    """One at all positions, about as long at each as the metric's, and always the same."""
    random = torch.Generator(covector.device).manual_seed(0)
    return torch.empty_like(covector).normal_(0, covector.shape[-1] ** -0.5, generator=random)


def _some(samples: int) -> Tensor:
    """About half of them, without any order: always the same, the first and not the last."""
    chosen = torch.rand(samples, generator=torch.Generator().manual_seed(0)) < 0.5
    chosen[-1] = False
    chosen[0] = True
    return chosen
