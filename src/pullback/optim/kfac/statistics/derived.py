"""Whether a loss is made of derivatives of the output: seen where a pass goes through their graph.

A derivative by the inputs with a graph of its own may be meant for a loss, or for looking at. That
graph begins where the covector first meets something that depends on parameters or inputs, and who
propagates through this place uses the derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def follow(node: Any, used: Callable[[], None]) -> None:
    """Call `used` where a later pass goes through the graph that the one under way has from `node`.

    The functions stay with the graph, so they must not hold it.
    """

    def after(found: tuple[Tensor | None, ...], given: Any) -> None:
        handle.remove()
        for (below, _), cotangent in zip(_node().next_functions, found, strict=False):
            if cotangent is None or below is None:
                continue
            if cotangent.grad_fn is None:  # nothing but the covector so far
                follow(below, used)
            else:
                cotangent.grad_fn.register_prehook(before)

    def before(given: Any) -> None:
        if torch.is_grad_enabled():  # a derivative of the derivative
            follow(_node(), used)
        else:
            used()

    handle = node.register_hook(after)


def _node() -> Any:
    """That at which the pass is."""
    return torch._C._current_autograd_node()
