"""Questions to the graph of a forward pass: what stands where, and covectors pulled back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...._core.errors import PullbackError

Roots = Tensor | GradientEdge


def last(root: Roots, edges: Sequence[GradientEdge]) -> list[int]:
    """The edges below whose node no other edge's node stands."""
    own = {e.node for e in edges}
    below: dict[Any, bool] = {}
    start = root.grad_fn if isinstance(root, Tensor) else root.node
    stack: list[tuple[Any, bool]] = [(start, False)]
    while stack:  # depth first, a node after all that stand below it
        node, done = stack.pop()
        if node is None or (not done and node in below):
            continue
        after = [n for n, _ in node.next_functions if n is not None]
        if done:
            below[node] = any(n in own or below.get(n, False) for n in after)
        else:
            below[node] = False
            stack.append((node, True))
            stack.extend((n, False) for n in after if n not in below)
    return [i for i, e in enumerate(edges) if not below.get(e.node, False)]


def beside(
    root: Roots, parts: Sequence[tuple[Sequence[GradientEdge | None], Sequence[GradientEdge]]]
) -> set[Any]:
    """The nodes that the root reaches where these parts are stepped over, from end to beginning."""
    start: Any = root.grad_fn if isinstance(root, Tensor) else root.node
    over: dict[Any, list[Any]] = {}
    for ends, begins in parts:
        nodes = [start if e.node is None else e.node for e in ends if e is not None]
        below = [e.node for e in begins]
        over.update((node, below) for node in nodes)
    seen, stack = set(), [start]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(over[node] if node in over else [n for n, _ in node.next_functions])
    return seen


def pulled(
    root: Roots, covector: Tensor, targets: Sequence[GradientEdge | Tensor]
) -> tuple[Tensor | None, ...]:
    """The covector pulled back to these places of the graph, which stays as it is."""
    asked: Any = list(targets)
    start: Any = [root]
    try:
        return torch.autograd.grad(start, asked, [covector], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise _reentrant() from error


def refuse_reentrant(root: Roots) -> None:
    """Raise where a reentrant checkpoint hides the parameters from the graph."""
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn if isinstance(root, Tensor) else root.node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            raise _reentrant()
        stack.extend(n for n, _ in node.next_functions)


def _reentrant() -> PullbackError:
    return PullbackError(
        "The model uses reentrant activation checkpointing",
        "its graph cannot be asked for the cotangents inside",
        "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )


def accumulates(leaves: Mapping[str, Tensor]) -> bool:
    """Whether the backward pass under way is going to reach one of these parameters."""
    for p in leaves.values():
        try:
            if torch._C._will_engine_execute_node(get_gradient_edge(p).node):
                return True
        except RuntimeError:  # asked for by autograd.grad
            return True
    return False
