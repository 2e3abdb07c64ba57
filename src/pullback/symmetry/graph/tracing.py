"""A model's call as a graph of plain tensor operations, and an input for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call, functionalize
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..._core.capture import Selector, select_output, unwrap_model
from ..._core.checks import refuse_values
from ..._core.errors import PullbackError, reraise_fatal
from ..._core.graph import collect_reachable_nodes, disable_fused_attention
from ...maps.module import in_every_slot

BY_HAND = "Name the actions by hand: find(model, example, actions=[symmetry.Scaling(...)])"


class Example:
    """A model with arguments: w ↦ every floating-point output as one matrix (1, n).

    Arithmetic is in float64 whatever the model's own is, since round-off decides what is a
    symmetry.

    Args:
        model: any module.
        args: a tensor, a tuple of positional or a dict of keyword arguments.
        output: which tensor of a structured output counts; by default all of them.
    """

    def __init__(self, model: nn.Module, args: Any, output: Selector = None) -> None:
        _refuse(model)
        self.model, self._output = unwrap_model(model), output
        if isinstance(args, Mapping):
            given = (), dict(args)
        else:
            given = (args if isinstance(args, tuple) else (args,)), {}
        #: positional arguments, and keyword arguments
        self.inputs: tuple[Any, Any] = pytree.tree_map_only(Tensor, _wide, given)
        if any(t.numel() == 0 for t in pytree.tree_leaves(given) if isinstance(t, Tensor)):
            raise PullbackError("The example is empty", "a tensor has no entries", "Pass samples")
        trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        #: the parameters that may move, as they were, in float64
        self.params = {n: _wide(p) for n, p in trainable.items()}
        frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        self.fixed = {n: _wide(b) for n, b in (*frozen.items(), *self.model.named_buffers())}

    def call(self, tensors: Mapping[str, Tensor], inputs: tuple[Any, Any]) -> list[Tensor]:
        """The tensors that count in what the model returns, with these parameters and buffers."""
        slots = in_every_slot(self.model, tensors)
        with _attributes_kept(self.model), _differentiable():
            out = functional_call(self.model, slots, *inputs, tie_weights=False, strict=False)
        if self._output is not None:
            return [select_output(out, self._output)]
        return [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]

    def outputs(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        """The floating-point tensors that the model returns."""
        fixed = {n: b.clone() for n, b in self.fixed.items()}
        found = [t for t in self.call({**fixed, **params}, self.inputs) if t.is_floating_point()]
        if not found:
            raise PullbackError(
                "The model has no outputs to differentiate",
                "it returns no floating-point tensor",
                "Let it return logits or features, not classes",
            )
        return found

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([t.flatten() for t in self.outputs(params)])[None]

    def small(self) -> tuple[Any, Any]:
        """The arguments with two samples, where all have the same number of them."""
        tensors = [t for t in pytree.tree_leaves(self.inputs) if isinstance(t, Tensor)]
        if any(t.ndim == 0 for t in tensors) or len({len(t) for t in tensors}) != 1:
            return self.inputs
        return pytree.tree_map_only(Tensor, lambda t: t[:2], self.inputs)


def trace(example: Example) -> tuple[Graph, bool]:
    """The graph of the call, with composite operations taken apart and none in place.

    Its placeholders are the parameters, then other parameters and buffers, then inputs. The flag
    says whether it holds for the given inputs alone, at whose values the model looked (for a mask
    that masks nothing).

    Raises:
        PullbackError: where which operations run depends on the values of tensors.
    """
    failure: Exception | None = None
    # few samples suffice to see the operations; a model that minds gets all of them
    for inputs in (example.small(), example.inputs):
        try:
            return _trace(example, inputs)
        except Exception as error:
            reraise_fatal(error)
            failure = error
    _refuse_example(example)
    why = str(failure).split("\n")[0][:200]
    if "get value out of a tracing tensor" in str(failure):
        why = "which operations run depends on the values of tensors (control flow or .item())"
    raise PullbackError("The model cannot be traced", why, BY_HAND) from failure


def _trace(example: Example, inputs: tuple[Any, Any]) -> tuple[Graph, bool]:
    reading = _Reading(len(example.params))

    def call(params: dict[str, Tensor], fixed: dict[str, Tensor], inputs: Any) -> list[Tensor]:
        with reading:
            return example.call({**fixed, **params}, inputs)

    fixed = {n: b.clone() for n, b in example.fixed.items()}
    # cuDNN's recurrent layers would be one operation each
    apart = torch.backends.cudnn.flags(enabled=False)
    with torch.no_grad(), disable_fused_attention(), warnings.catch_warnings(), apart:
        warnings.simplefilter("ignore")
        module = make_fx(functionalize(call, remove="mutations"))(example.params, fixed, inputs)
    module.graph.eliminate_dead_code()  # what outputs that do not count were made of
    return module.graph, reading.looked


class _Reading(TorchDispatchMode):
    """Lets a traced model look at values on which no parameter has an influence.

    The parameters are the graph's first `count` placeholders.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.looked = count, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        if known and not any(self._depends(t) for t in args):
            self.looked = True
            with disable_proxy_modes_tracing():
                return func(*args)
        return func(*args, **(kwargs or {}))

    def _depends(self, t: Tensor) -> bool:
        """Whether a parameter enters a tensor."""
        mode = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(t, mode.tracer, None)
        if slot is None:
            return False
        node = slot.proxy.node
        placed = [n for n in node.graph.nodes if n.op == "placeholder"]
        return not collect_reachable_nodes(node, lambda n: n.all_input_nodes).isdisjoint(
            placed[: self.count]
        )


class _Grouped(TorchFunctionMode):
    """Grouped products in float64, for which torch has no kernel: each row by its own matrix."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            x, w, offsets = args[0], args[1], kwargs.get("offs", args[2] if args[2:] else None)
            if x.dtype == torch.float64 and (x.ndim, w.ndim) == (2, 3) and offsets is not None:
                rows = torch.arange(len(x), device=x.device, dtype=offsets.dtype)
                index = (rows[:, None] >= offsets).sum(1).clamp(max=len(w) - 1)
                return torch.bmm(x[:, None], w[index])[:, 0]
        return func(*args, **kwargs)


class _Context:
    """What an `autograd.Function` takes notes on for its backward pass, which is not used."""

    needs_input_grad = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def _differentiable() -> Iterator[None]:
    """Derivatives are those of what is computed: an `autograd.Function` is its forward pass."""

    def forward(cls: Any, *args: Any, **kwargs: Any) -> Any:
        apart = cls.setup_context is not Function.setup_context
        return cls.forward(*args, **kwargs) if apart else cls.forward(_Context(), *args, **kwargs)

    owner: Any = Function
    before = owner.__dict__["apply"]
    owner.apply = classmethod(forward)
    try:
        with _Grouped():
            yield
    finally:
        owner.apply = before


def _refuse(model: Any) -> None:
    """Raise unless this is a module with real parameters that have values."""
    if not isinstance(model, nn.Module):
        raise PullbackError(
            "Symmetries are those of a network", f"got {type(model).__name__}", "Pass an nn.Module"
        )
    for name, p in model.named_parameters():
        if p.requires_grad:
            refuse_values(f"Parameter {name!r}", p)


def _refuse_example(example: Example) -> None:
    """Raise where it is the call itself that fails, and not its trace."""
    try:
        with torch.no_grad(), disable_fused_attention():
            example.outputs(example.params)
    except Exception as error:
        reraise_fatal(error)
        raise PullbackError(
            "The model does not run on the example",
            str(error).split("\n")[0][:200],
            "Pass what the model takes: a tensor, a tuple of arguments or a dict of keywords",
        ) from error


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Tensors that modules leave on themselves, as a weight normalization's hook does, go back."""
    before = {
        m: {n: v for n, v in vars(m).items() if isinstance(v, Tensor)} for m in model.modules()
    }
    try:
        yield
    finally:
        for module, held in before.items():
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and name not in held:
                    delattr(module, name)
            for name, value in held.items():
                object.__setattr__(module, name, value)


def _wide(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t.detach()


_SIDES = (8, 16, 28, 32, 64, 96, 224)


def guess_input(model: nn.Module) -> Tensor:
    """Random numbers that the model takes."""
    first = next(
        (m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None
    )
    for x in _candidates(first):
        try:
            buffers = {n: b.clone() for n, b in model.named_buffers()}
            with torch.no_grad(), disable_fused_attention():
                functional_call(model, buffers, (x,))
        except Exception:
            continue
        return x
    raise PullbackError(
        "The model's input is not known",
        "no example was given, and its first layer does not say what it takes",
        "Pass an example: find(model, x)",
    )


def _candidates(first: Any) -> list[Tensor]:
    if first is None:
        return []
    weight = next(first.parameters(recurse=False))
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    if isinstance(first, nn.Linear):
        return [normal(16, first.in_features), normal(4, 6, first.in_features)]
    if isinstance(first, nn.RNNBase):
        return [normal(4, 6, first.input_size)]
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        tokens = torch.randint(first.num_embeddings, (4, 6), generator=generator)
        return [tokens.to(weight.device)]
    if isinstance(first, nn.modules.conv._ConvNd):
        ndim = len(first.kernel_size)
        return [normal(2, first.in_channels, *[side] * ndim) for side in _SIDES]
    if isinstance(first, (nn.LayerNorm, nn.RMSNorm)):
        return [normal(4, 6, *first.normalized_shape), normal(4, *first.normalized_shape)]
    return []
