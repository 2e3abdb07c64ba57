"""What a model does with parameters that no known layer uses, in words, from the autograd graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

#: nodes whose output has the same entries in another shape, order or memory
_VIEWS = frozenset(
    ("View", "UnsafeView", "Reshape", "T", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Expand",
     "Clone", "ToCopy", "Alias", "Slice", "Select", "Unbind", "Split", "SplitWithSizes")
)  # fmt: skip
_COMPLEX = "ViewAsComplex"
#: functions that are named; a parameter that enters more of them is described by the first ones
_MOST_FUNCTIONS = 3


def describe_unknown_uses(
    result: Any, parameters: Mapping[str, Tensor], vmapped: Iterable[str]
) -> dict[str, str]:
    """Return, for parameters on which a forward pass's result depends, what they enter.

    Args:
        result: what the model returned, with its graph.
        parameters: those of interest, by name: leaves of the graph.
        vmapped: names of parameters that a function inside of `torch.vmap` used.
    """
    names = {id(p): name for name, p in parameters.items()}
    users = find_users(result)
    descriptions: dict[str, str] = {}
    for node in users:
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            descriptions[name] = _describe(node, users)
    hidden = [name for name in vmapped if name in parameters]
    return descriptions | dict.fromkeys(hidden, "it is used inside torch.vmap")


def find_users(result: Any) -> dict[Any, list[Any]]:
    """Return, for each node of the graph, the nodes that use its output."""
    users: dict[Any, list[Any]] = {}
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    visited = {*stack}
    while stack:
        node = stack.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            users.setdefault(below, []).append(node)
            if below not in visited:
                visited.add(below)
                stack.append(below)
    return users


def _describe(leaf: Any, users: Mapping[Any, list[Any]]) -> str:
    """Return what a leaf of the graph enters, apart from views of it."""
    functions: dict[str, None] = {}
    stack = list(users[leaf])
    visited: set[Any] = set()
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        function = re.sub(r"Backward\d*$", "", node.name())
        if isinstance(node, BackwardCFunction):
            return f"it enters the custom function {function}"
        if function == _COMPLEX:
            return "it is used as complex numbers, and factors are real"
        if function in _VIEWS:
            stack += users.get(node, ())
        else:
            functions[_to_snake_case(function)] = None
    return f"it enters {', '.join(list(functions)[:_MOST_FUNCTIONS])}"


def _to_snake_case(name: str) -> str:
    """Return torch's name of a function, such as index_put for IndexPut."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
