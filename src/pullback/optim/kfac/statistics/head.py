"""An output that can be had again: that of a linear layer, from what its graph keeps anyway.

The logits of a language model take more memory than anything else, and no backward pass needs them:
that of log-softmax keeps its own result. One more product is cheaper than to keep them. The
covector there is as large, so it is pulled through the layer first, and let go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from ....maps.record import Entry
from .sweep import Sweep
from .tape import Tape, rows_of


def head_of(z: Tensor, tape: Tape) -> int | None:
    """The use of a plain linear layer that gave z, if one did; before z's node is released."""
    for i, entry in reversed([*enumerate(tape.entries)]):
        if type(entry.module) is nn.Linear and _made(entry, z):
            return i
    return None


def _made(entry: Entry, z: Tensor) -> bool:
    """Whether z is the output of this use of a layer."""
    rows, node = rows_of(entry.module, z), entry.edge.node
    same = node is not None and node is (z if rows is None else rows).grad_fn
    return same and z.shape == entry.shape


def again_by(entry: Entry, dtype: torch.dtype) -> Callable[[], Tensor]:
    """How to compute its output again."""
    x, module = entry.input, entry.module

    def again() -> Tensor:
        weight, bias = (None if t is None else t.detach().to(dtype) for t in _parameters(module))
        assert weight is not None
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), weight, bias)

    return again


def below(
    sweep: Sweep,
    root: Tensor | GradientEdge,
    covector: list[Tensor],
    tape: Tape,
    head: int,
    asked: Collection[str],
) -> tuple[GradientEdge, Tensor] | None:
    """The covector taken and pulled back to the head's input: where that is, and δW there.

    None, and nothing taken, where gradients of the head are asked for, or the graph looks otherwise
    or ends here. Unlike in the graph's own pass, nobody holds the covector longer than it takes.
    """
    entry = tape.entries[head]
    if isinstance(root, Tensor) or not {*entry.names.values()}.isdisjoint(asked):
        return None
    node: Any = root.node
    while node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    at = {"MmBackward0": 0, "AddmmBackward0": 1}.get(node.name())
    weight = _parameters(entry.module)[0]
    if at is None or weight is None or node.next_functions[at][0] is None:
        return None
    edge, width = GradientEdge(*node.next_functions[at]), weight.shape[0]
    found = covector[0].reshape(-1, width) @ weight.detach().to(covector[0].dtype)
    sweep.consume(head, covector.pop())
    return edge, found


def _parameters(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    return module._parameters["weight"], module._parameters["bias"]
