"""A function of a few tensors as a plain list of tensor operations.

Evaluating a small network takes longer in Python (modules, rules of jets, views of fields) than in
arithmetic. Recorded once, the same operations run without all that, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .._core.errors import reraise_fatal

Function = Callable[..., Tensor]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.lift_fresh_copy.default)


def record(function: Function, inputs: Sequence[Tensor]) -> Function | None:
    """The function's operations at these inputs; None where they are not all there is to it.

    What does not depend on the inputs is computed here and kept.
    """
    try:
        with torch.no_grad():
            module = make_fx(function)(*inputs)
    except Exception as error:  # of any kind: the function may do what it likes
        reraise_fatal(error)  # else it branches on values, or leaves torch
        return None
    if not all(map(_pure, module.graph.nodes)):
        return None
    with torch.no_grad():
        _fold(module)
    module.graph.lint()
    module.recompile()
    return module.forward if _agree(module.forward, function, inputs) else None


def _agree(one: Function, two: Function, inputs: Sequence[Tensor]) -> bool:
    """Whether both give the same a little further on: what left torch is a constant in a record."""
    moved = [1.01 * x + 0.01 for x in inputs]
    with torch.no_grad():
        return torch.allclose(one(*moved), two(*moved), rtol=1e-6, atol=0, equal_nan=True)


def _pure(node: Node) -> bool:
    """Whether the operation neither writes to its arguments nor draws random numbers."""
    if node.op != "call_function":
        return True
    op: Any = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return False
    return not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def _fold(module: GraphModule) -> None:
    """Compute constants, and leave out copies: nothing is written to."""
    known: dict[Node, Any] = {}

    def value(x: Any) -> Any:
        return known.get(x, x) if isinstance(x, Node) else x

    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and node.target in _COPIES and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
        elif node.op == "call_function" and all(x in known for x in node.all_input_nodes):
            args = torch.fx.map_arg(node.args, known.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    for i, (node, constant) in enumerate(known.items()):
        if node.op == "get_attr" or not isinstance(constant, Tensor):
            continue
        if any(user not in known for user in node.users):
            module.register_buffer(f"_folded{i}", constant)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(f"_folded{i}"))
    module.graph.eliminate_dead_code()
