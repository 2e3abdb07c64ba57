"""Units of homogeneous activations that never change side on an example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph.tracing import Example

_BENT = (
    *("relu", "leaky_relu", "_prelu_kernel", "rrelu_with_noise"),
    *("threshold", "clamp", "clamp_min", "hardtanh"),
)
_FEW = 8


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(getattr(func, "_opname", "")).rstrip("_") in _BENT:
            self.seen.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def settled(example: Example) -> tuple[int, int, int, int]:
    """How many units are always on, always off, change side at few places; and how many exist."""
    named = dict(example.model.named_parameters())
    params = {n: named[n].detach().double() for n in example.params}
    with torch.no_grad(), _Watch() as watch:
        example(params)
    on = off = few = total = 0
    for x in (x for x in watch.seen if x.ndim):
        # channels stand second in images, last elsewhere
        units = x.movedim(1 if x.ndim >= 4 else -1, 0)
        units = units.reshape(len(units), -1)
        active = (units > 0).sum(1)
        rare = torch.minimum(active, units.shape[1] - active)
        on += int((active == units.shape[1]).sum())
        off += int((active == 0).sum())
        few += int(((rare > 0) & (rare <= _FEW)).sum())
        total += len(units)
    return on, off, few, total
