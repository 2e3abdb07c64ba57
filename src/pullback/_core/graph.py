"""Searches in the autograd graph of a forward pass, and covectors pulled back through it.

A node is *below* another if a backward pass from the other reaches it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from .errors import PullbackError

Root = Tensor | GradientEdge


class _OwnPasses(threading.local):
    """The backward passes of `pull_back` that this thread runs, one inside of the other."""

    def __init__(self) -> None:
        self.depth = 0


_OWN_PASSES = _OwnPasses()
#: the nodes at which passes of `pull_back` begin, in any thread: on a GPU another one runs hooks
_OWN_STARTS: list[Any] = []


def get_start_node(root: Root) -> Any:
    """Return the node at which a backward pass from the root begins."""
    if isinstance(root, Tensor):
        return root.grad_fn
    return root.node


def _next_nodes(node: Any) -> list[Any]:
    return [below for below, _ in node.next_functions]


def skip_dtype_casts(z: Tensor) -> tuple[Any, int]:
    """Return node and output number of z, or of the tensor that z is a copy of in another dtype.

    A wrapper may convert the model's outputs to float32 after the model itself has computed the
    loss from them: then the loss's gradient reaches the original alone.
    """
    node = z.grad_fn
    number = z.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        below, output = node.next_functions[0]
        if below is None or below.name() == "torch::autograd::AccumulateGrad":
            break
        node, number = below, output
    return node, number


def find_last_edges(root: Root, edges: Sequence[GradientEdge]) -> list[int]:
    """Return the indices of the edges whose node has no other edge's node below it."""
    edge_nodes = {edge.node for edge in edges}
    has_edge_below: dict[Any, bool] = {}
    for node in _list_bottom_up(get_start_node(root)):
        below = [n for n in _next_nodes(node) if n is not None]
        has_edge_below[node] = any(n in edge_nodes or has_edge_below.get(n) for n in below)
    return [i for i, edge in enumerate(edges) if not has_edge_below.get(edge.node, False)]


def _list_bottom_up(start: Any) -> Iterator[Any]:
    """Yield every node that is reached from `start`, after all nodes below it."""
    visited: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(start, False)]
    while stack:
        node, is_finished = stack.pop()
        if is_finished:
            yield node
        elif node is not None and node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack.extend((n, False) for n in _next_nodes(node) if n not in visited)


def find_nodes_reached_outside(
    root: Root, segments: Sequence[tuple[Sequence[GradientEdge | None], Sequence[GradientEdge]]]
) -> set[Any]:
    """Return the nodes that the root reaches if it jumps over these segments of the graph.

    Args:
        root: where the search begins.
        segments: pairs (ends, beginnings) of edges: outputs and inputs of a piece of the forward
            pass. An end without a node is the root itself.
    """
    start = get_start_node(root)
    jumps: dict[Any, list[Any]] = {}
    for ends, beginnings in segments:
        targets = [edge.node for edge in beginnings]
        for end in ends:
            if end is not None:
                jumps[start if end.node is None else end.node] = targets

    def follow(node: Any) -> list[Any]:
        if node in jumps:
            return jumps[node]
        return _next_nodes(node)

    return collect_reachable_nodes(start, follow)


def collect_reachable_nodes(
    start: Any, follow: Callable[[Any], Sequence[Any]] = _next_nodes
) -> set[Any]:
    """Return all nodes that are reached from `start`; `follow` gives the next ones of a node."""
    reached: set[Any] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node is not None and node not in reached:
            reached.add(node)
            stack.extend(follow(node))
    return reached


def find_leaf_names(roots: Sequence[Tensor], names: Mapping[int, str]) -> set[str]:
    """Return the names, given by `id`, of the leaves that these tensors were computed from."""
    leaf_names = set()
    for root in roots:
        for node in collect_reachable_nodes(root.grad_fn):
            leaf = getattr(node, "variable", None)
            if id(leaf) in names:
                leaf_names.add(names[id(leaf)])
    return leaf_names


def find_arithmetic_dtype(z: Tensor) -> torch.dtype:
    """Return the dtype whose round-off z has: float32 where a double was computed from float32."""
    if z.dtype != torch.float64:
        return z.dtype
    for node in collect_reachable_nodes(z.grad_fn):
        if any(metadata.dtype == torch.float32 for metadata in node._input_metadata):
            return torch.float32
    return z.dtype


def pull_back(
    root: Root, covector: Tensor, targets: Sequence[GradientEdge | Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the covector at the root pulled back to the targets; the graph is retained.

    A target that the root does not reach gets None.
    """
    inputs: Any = list(targets)
    outputs: Any = [root]
    try:
        with _mark_own_pass(root):
            return torch.autograd.grad(
                outputs, inputs, [covector], retain_graph=True, allow_unused=True
            )
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise _reentrant_error() from error


@contextlib.contextmanager
def _mark_own_pass(root: Root) -> Iterator[None]:
    """Context in whose hooks `is_own_pass` is True."""
    start = get_start_node(root)
    _OWN_PASSES.depth += 1
    _OWN_STARTS.append(start)
    try:
        yield
    finally:
        _OWN_PASSES.depth -= 1
        _OWN_STARTS.remove(start)


def is_own_pass() -> bool:
    """Return True if the hook that calls this runs in a pass of `pull_back`, not in the user's.

    Several optimizers may watch one model. The covector that one of them pulls back from the
    output is no gradient of the loss for the others.
    """
    if _OWN_PASSES.depth:
        return True
    return bool(_OWN_STARTS) and torch._C._current_autograd_node() in _OWN_STARTS


def refuse_reentrant(root: Root) -> None:
    """Raise where a reentrant checkpoint hides the parameters from the graph."""
    nodes = collect_reachable_nodes(get_start_node(root))
    if any("CheckpointFunction" in node.name() for node in nodes):
        raise _reentrant_error()


def _reentrant_error() -> PullbackError:
    return PullbackError(
        "The model uses reentrant activation checkpointing",
        "its graph cannot be asked for the cotangents inside",
        "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False); in a Trainer "
        "gradient_checkpointing_kwargs={'use_reentrant': False}",
    )


def reaches_parameters(leaves: Mapping[str, Tensor]) -> bool:
    """Return True if the backward pass under way is going to reach one of these parameters."""
    for p in leaves.values():
        try:
            if torch._C._will_engine_execute_node(get_gradient_edge(p).node):
                return True
        except RuntimeError:  # asked for by autograd.grad
            return True
    return False


def call_on_second_pass(node: Any, callback: Callable[[], None]) -> None:
    """Call `callback` when a later pass differentiates the pass under way, from `node` on.

    A derivative by the inputs with a graph of its own may become a part of the loss, or only be
    displayed. Its graph begins where the covector is first combined with something that depends on
    parameters or inputs. A backward pass through that node shows that the loss contains the
    derivative. The hooks belong to the graph and have no reference to it.
    """

    def after_node(cotangents: tuple[Tensor | None, ...], incoming: Any) -> None:
        handle.remove()
        current = torch._C._current_autograd_node()
        for (below, _), cotangent in zip(current.next_functions, cotangents, strict=False):
            if cotangent is None or below is None:
                continue
            if cotangent.grad_fn is None:  # nothing but the covector so far
                call_on_second_pass(below, callback)
            else:
                cotangent.grad_fn.register_prehook(before_second_pass)

    def before_second_pass(incoming: Any) -> None:
        if torch.is_grad_enabled():  # a derivative of the derivative
            call_on_second_pass(torch._C._current_autograd_node(), callback)
        else:
            callback()

    handle = node.register_hook(after_node)


@contextlib.contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Use neither fused attention kernels nor the inference path of transformer layers inside."""
    mha: Any = torch.backends.mha
    was_enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(was_enabled)
