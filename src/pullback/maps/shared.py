"""What was established about a model's structure, kept for later calls while its graph is the same.

Which axis counts the samples and whether layers explain a parameter follow from the operations of
a forward pass and from how they are joined, not from the numbers that pass through. So the plan of
one call serves another whose autograd graph has the same nodes, joined alike, over the same
parameters.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

if TYPE_CHECKING:
    from .module import ModuleLinearization

_AXES = ("_saved_dim", "_saved_dim0", "_saved_dim1", "_saved_dims")
_KEPT = 64  # graphs remembered per model
_PLANS: WeakKeyDictionary[nn.Module, dict[Any, dict[Any, Any]]] = WeakKeyDictionary()


def shared_plans(linear: ModuleLinearization) -> dict[Any, Any] | None:
    """The plans that fit this graph; None where a parameter is used outside its layers.

    Such a use may vanish for the parameters of one call (a gate that begins at zero) and count for
    those of the next, so that what was seen of it holds for one call alone.
    """
    graph, joints = topology(linear.graph, linear.leaves)
    uses = Counter(n for entry in linear.entries for n in entry.names.values() if n is not None)
    if any(joints[name] != count for name, count in uses.items()):
        return None
    kinds = tuple((p.dtype, p.device) for p in linear.leaves.values())
    kept = _PLANS.setdefault(linear.map.model, {})
    if len(kept) >= _KEPT:
        kept.clear()
    return kept.setdefault((graph, kinds), {})


@lru_cache(maxsize=1024)
def _axes(kind: type) -> tuple[str, ...]:
    """Under which names a kind of node keeps its axes."""
    return tuple(axis for axis in _AXES if hasattr(kind, axis))


def topology(root: Tensor, leaves: dict[str, Tensor]) -> tuple[Any, Counter[str]]:
    """The graph's nodes in the order they are met, each with its kind, axes, parameter and what
    it leads to; and how often each parameter is led to.
    """
    names = {id(leaf): name for name, leaf in leaves.items()}
    order, index, out = [root.grad_fn], {root.grad_fn: 0}, []
    joints: Counter[str] = Counter()
    for node in order:  # which grows
        if node is None:
            continue
        edges = []
        for following, place in node.next_functions:
            if following is not None and following not in index:
                index[following] = len(order)
                order.append(following)
            edges.append((None if following is None else index[following], place))
            if (name := names.get(id(getattr(following, "variable", None)))) is not None:
                joints[name] += 1
        axes = tuple([str(getattr(node, axis)) for axis in _axes(type(node))])
        name = names.get(id(getattr(node, "variable", None)))
        out.append((node.name(), axes, name, tuple(edges)))
    return tuple(out), joints
