"""An output that can be had again: that of a linear layer, from what its graph keeps anyway.

The logits of a language model take more memory than anything else, and no backward pass needs them:
that of log-softmax keeps its own result. One more product is cheaper than to keep them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....maps.record import Entry
from .tape import Tape


def head_of(z: Tensor, tape: Tape) -> Callable[[], Tensor] | None:
    """How to compute z again, where a plain linear layer gave it; before z's node is released."""
    if z.grad_fn is None:
        return None
    for entry in reversed(tape.entries):
        if entry.edge.node is z.grad_fn:
            return _again(entry, z.dtype) if type(entry.module) is nn.Linear else None
    return None


def _again(entry: Entry, dtype: torch.dtype) -> Callable[[], Tensor]:
    x, module = entry.input, entry.module

    def again() -> Tensor:
        weight, bias = (None if t is None else t.detach().to(dtype) for t in _parameters(module))
        assert weight is not None
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), weight, bias)

    return again


def _parameters(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    return module._parameters["weight"], module._parameters["bias"]
