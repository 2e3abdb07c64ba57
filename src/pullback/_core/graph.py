"""Questions to the graph of a forward pass: what stands where, and covectors pulled back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from .errors import PullbackError

Root = Tensor | GradientEdge


def get_start_node(root: Root) -> Any:
    """The node at which a pass from the root begins."""
    return root.grad_fn if isinstance(root, Tensor) else root.node


def skip_dtype_casts(z: Tensor) -> tuple[Any, int]:
    """Node and output number of z, or of what z is a copy of in another dtype.

    A wrapper may convert the model's outputs to float32 after the model itself has computed the
    loss from them: then the loss's gradient reaches the original alone.
    """
    node, number = z.grad_fn, z.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        below, output = node.next_functions[0]
        if below is None or below.name() == "torch::autograd::AccumulateGrad":
            break
        node, number = below, output
    return node, number


def find_last_edges(root: Root, edges: Sequence[GradientEdge]) -> list[int]:
    """Indices of the edges below whose node no other edge's node stands."""
    own = {e.node for e in edges}
    below: dict[Any, bool] = {}
    stack: list[tuple[Any, bool]] = [(get_start_node(root), False)]
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


def find_nodes_reached_outside(
    root: Root, parts: Sequence[tuple[Sequence[GradientEdge | None], Sequence[GradientEdge]]]
) -> set[Any]:
    """The nodes that the root reaches where these parts (ends, beginnings) are stepped over."""
    start = get_start_node(root)
    over: dict[Any, list[Any]] = {}
    for ends, begins in parts:
        nodes = [start if e.node is None else e.node for e in ends if e is not None]
        over.update((node, [e.node for e in begins]) for node in nodes)
    return collect_reachable_nodes(
        start, lambda node: over.get(node, [n for n, _ in node.next_functions])
    )


def collect_reachable_nodes(
    start: Any, following: Callable[[Any], Sequence[Any]] | None = None
) -> set[Any]:
    """All nodes that are reached from `start`, by default along the graph's own edges."""
    seen: set[Any] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(following(node) if following else [n for n, _ in node.next_functions])
    return seen


def find_leaf_names(roots: Sequence[Tensor], names: Mapping[int, str]) -> set[str]:
    """The names, by `id`, of the leaves that these tensors were computed from."""
    nodes = {node for root in roots for node in collect_reachable_nodes(root.grad_fn)}
    return {names[key] for n in nodes if (key := id(getattr(n, "variable", None))) in names}


def find_arithmetic_dtype(z: Tensor) -> torch.dtype:
    """The dtype whose round-off z has: float32 where a double was computed in it on the way."""
    if z.dtype != torch.float64:
        return z.dtype
    met = {m.dtype for node in collect_reachable_nodes(z.grad_fn) for m in node._input_metadata}
    return torch.float32 if torch.float32 in met else z.dtype


def pull_back(
    root: Root, covector: Tensor, targets: Sequence[GradientEdge | Tensor]
) -> tuple[Tensor | None, ...]:
    """The covector pulled back to these places of the graph, which is retained."""
    asked: Any = list(targets)
    start: Any = [root]
    try:
        return torch.autograd.grad(start, asked, [covector], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise _reentrant() from error


def refuse_reentrant(root: Root) -> None:
    """Raise where a reentrant checkpoint hides the parameters from the graph."""
    if any(
        "CheckpointFunction" in node.name()
        for node in collect_reachable_nodes(get_start_node(root))
    ):
        raise _reentrant()


def _reentrant() -> PullbackError:
    return PullbackError(
        "The model uses reentrant activation checkpointing",
        "its graph cannot be asked for the cotangents inside",
        "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False); in a Trainer "
        "gradient_checkpointing_kwargs={'use_reentrant': False}",
    )


def reaches_parameters(leaves: Mapping[str, Tensor]) -> bool:
    """Whether the backward pass under way is going to reach one of these parameters."""
    for p in leaves.values():
        try:
            if torch._C._will_engine_execute_node(get_gradient_edge(p).node):
                return True
        except RuntimeError:  # asked for by autograd.grad
            return True
    return False


def call_on_second_pass(node: Any, used: Callable[[], None]) -> None:
    """Call `used` where a later pass goes through the graph that the one under way has from `node`.

    A derivative by the inputs with a graph of its own may be meant for a loss, or for looking at.
    That graph begins where the covector first meets something that depends on parameters or inputs,
    and who propagates through this place uses the derivative. The hooks stay with the graph, so
    they do not hold it.
    """

    def after(found: tuple[Tensor | None, ...], given: Any) -> None:
        handle.remove()
        here = torch._C._current_autograd_node()
        for (below, _), cotangent in zip(here.next_functions, found, strict=False):
            if cotangent is None or below is None:
                continue
            if cotangent.grad_fn is None:  # nothing but the covector so far
                call_on_second_pass(below, used)
            else:
                cotangent.grad_fn.register_prehook(before)

    def before(given: Any) -> None:
        if torch.is_grad_enabled():  # a derivative of the derivative
            call_on_second_pass(torch._C._current_autograd_node(), used)
        else:
            used()

    handle = node.register_hook(after)


@contextlib.contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Neither fused attention kernels nor the inference-only path of transformer layers."""
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(before)
