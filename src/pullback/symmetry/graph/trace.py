"""A model's call as a graph of plain tensor operations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ..._core.errors import PullbackError, reraise_fatal
from ..._core.graph import collect_reachable_nodes, disable_fused_attention
from .example import Example, Inputs

BY_HAND = "Name the actions by hand: find(model, example, actions=[symmetry.Scaling(...)])"


@dataclass(frozen=True)
class Trace:
    """The graph of a call.

    Attributes:
        graph: its placeholders are the parameters, then other parameters and buffers, then inputs.
        is_specialized: whether it holds for the given inputs alone, because the model looked at
            their values (for a mask that masks nothing).
    """

    graph: Graph
    is_specialized: bool


def trace(example: Example) -> Trace:
    """Return the graph of the call, with composite operations taken apart and none in place.

    Raises:
        PullbackError: where which operations run depends on the values of tensors.
    """
    failure: Exception | None = None
    # Two samples suffice to see the operations. A model that needs all of them gets them next.
    for inputs in (example.inputs_of_two_samples(), example.inputs):
        try:
            return _trace_call(example, inputs)
        except Exception as error:
            reraise_fatal(error)
            failure = error
    example.refuse_failure()
    reason = str(failure).split("\n")[0][:200]
    if "get value out of a tracing tensor" in str(failure):  # torch raises a plain RuntimeError
        reason = "which operations run depends on the values of tensors (control flow or .item())"
    raise PullbackError("The model cannot be traced", reason, BY_HAND) from failure


def _trace_call(example: Example, inputs: Inputs) -> Trace:
    """Return the graph of the model's call on inputs, and whether it has read their values."""
    value_reads = _ValueReads(len(example.params))

    def call(params: dict[str, Tensor], fixed: dict[str, Tensor], inputs: Any) -> list[Tensor]:
        with value_reads:
            return example.call({**fixed, **params}, inputs)

    fixed = {name: tensor.clone() for name, tensor in example.fixed.items()}
    # With cuDNN a recurrent layer would be one operation.
    without_cudnn = torch.backends.cudnn.flags(enabled=False)
    with torch.no_grad(), disable_fused_attention(), warnings.catch_warnings(), without_cudnn:
        warnings.simplefilter("ignore")
        module = make_fx(functionalize(call, remove="mutations"))(example.params, fixed, inputs)
    module.graph.eliminate_dead_code()  # operations of outputs that do not count
    return Trace(module.graph, value_reads.has_read)


class _ValueReads(TorchDispatchMode):
    """Lets a traced model look at values that no parameter enters.

    Args:
        parameter_count: the graph's first placeholders are the parameters.

    Attributes:
        has_read: whether the model has looked at a value.
    """

    def __init__(self, parameter_count: int) -> None:
        super().__init__()
        self._parameter_count = parameter_count
        self.has_read = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        reading_functions = (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.equal.default,
        )
        if func in reading_functions and not any(map(self._depends_on_parameters, args)):
            self.has_read = True
            with disable_proxy_modes_tracing():
                return func(*args)
        return func(*args, **(kwargs or {}))

    def _depends_on_parameters(self, t: Tensor) -> bool:
        """Return True if a tensor is computed from a parameter."""
        mode = get_proxy_mode()
        if mode is None:
            return False
        slot = get_proxy_slot(t, mode.tracer, None)
        if slot is None:
            return False
        node = slot.proxy.node
        placeholders = [n for n in node.graph.nodes if n.op == "placeholder"]
        ancestors = collect_reachable_nodes(node, lambda n: n.all_input_nodes)
        return not ancestors.isdisjoint(placeholders[: self._parameter_count])
