"""Capture of a model's forward calls, and of the loss's cotangent at their output."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from .errors import PullbackError
from .graph import call_on_second_pass, reaches_parameters, refuse_reentrant
from .state import RandomState

Selector = Callable[[Any], Tensor] | str | int | None


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module itself behind `torch.compile` and `DistributedDataParallel`."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def select_output(output: Any, selector: Selector) -> Tensor:
    """The tensor z that the metric sees, from what the model returned; its logits by default."""
    if selector is None and not isinstance(output, Tensor):
        named = isinstance(output, Mapping) and "logits" in output
        output = output["logits"] if named else getattr(output, "logits", output)
    elif callable(selector):
        output = selector(output)
    elif selector is not None:
        try:
            keyed = isinstance(output, Mapping) or not hasattr(output, str(selector))
            given: Any = output
            output = given[selector] if keyed else getattr(given, str(selector))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise PullbackError(
                f"The model's output has no entry {selector!r}",
                f"got {type(output).__name__}",
                "Name the tensor with output=..., a key, an index or a function of the output",
            ) from error
    if not isinstance(output, Tensor):
        raise PullbackError(
            "The model's output is not one tensor",
            f"got {type(output).__name__}",
            "Name the tensor with output=..., a key, an index or a function of the output",
        )
    return output


def select_returned_output(output: Any, selector: Selector) -> Tensor:
    """Return `select_output`; raise if the model itself did not return that tensor."""
    z = select_output(output, selector)
    if callable(selector) and selector(output) is not z:
        raise PullbackError(
            "The function output= computes a tensor",
            "the loss is made of what the model returns, so that no gradient reaches another one",
            "Let it return one of the model's tensors, and compute in the model's forward",
        )
    return z


def move_samples_first(z: Tensor, batch_dim: int) -> Tensor:
    """The model's output, or a tensor beside it: samples first, at least one event axis."""
    if z.ndim == 0:
        raise PullbackError(
            "The model's output is a single number",
            "it has no batch axis, so there are no samples to average over",
            "Return one value per sample; with Lightning give the optimizer the network that "
            "training_step calls, not the LightningModule",
        )
    odd = "complex" if z.is_complex() else "nested" if z.is_nested else ""
    if not odd and z.layout is not torch.strided:
        odd = str(z.layout).removeprefix("torch.")
    if odd:
        raise PullbackError(
            f"The model's output is a {odd} tensor",
            "a metric measures dense real function values",
            "Return a dense real tensor: torch.view_as_real(z), z.to_dense() or z.to_padded_tensor",
        )
    if not -z.ndim <= batch_dim < z.ndim:
        raise PullbackError(
            f"The model's output has no axis {batch_dim}",
            f"its shape is {tuple(z.shape)}",
            "Set batch_dim= to the output's axis of samples",
        )
    z = z.movedim(batch_dim, 0)
    if not z.numel():
        raise PullbackError(
            "The batch is empty", f"the output has shape {tuple(z.shape)}", "Skip empty batches"
        )
    return z[:, None] if z.ndim == 1 else z


def find_first_input(tensors: Sequence[Tensor], samples: int, batch_dim: int) -> Tensor | None:
    """The first tensor among a call's arguments, samples first where it has as many."""
    if not tensors:
        return None
    x = tensors[0].detach()
    fits = x.ndim > batch_dim and x.shape[batch_dim] == samples
    return x.movedim(batch_dim, 0) if fits else x


def detach_tensors(tree: Any) -> Any:
    """The same nest of arguments with every tensor cut from its graph.

    A tensor that requires gradients still does: the model may differentiate by its inputs.
    """
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), tree)


@dataclass
class Call:
    """One forward call: what went in, what came out, and ∂loss/∂output once known."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor | None = None
    cotangent: Tensor | None = None
    random: RandomState | None = None
    #: device and dtype of autocast, dtype None where it was off; None for calls not recorded
    autocast: tuple[str, torch.dtype | None] | None = None
    buffers: dict[str, Tensor] | None = None
    #: inputs that were computed from something differentiable
    sources: list[Tensor] = field(default_factory=list)
    _output_version: int = 0
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Call:
        """A call that did not happen in a closure: other inputs for the metric."""
        return cls(args, kwargs)

    @classmethod
    def record_start(cls, model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> Call:
        """A call that begins now, with all that it takes to repeat it."""
        call = cls(detach_tensors(args), detach_tensors(kwargs), random=RandomState(device))
        call._versions = [(t, t._version) for t in call.tensors if not t.is_inference()]
        call.buffers = {n: b.detach().clone() for n, b in unwrap_model(model).named_buffers()}
        kind = device.type
        enabled = torch.is_autocast_enabled(kind)
        call.autocast = kind, torch.get_autocast_dtype(kind) if enabled else None
        return call

    def recorded_output(self) -> Tensor | None:
        """The output as it was, unless the loss has overwritten it since."""
        if self.output is None or self.output._version != self._output_version:
            return None
        return self.output

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

    @contextlib.contextmanager
    def replay_context(self) -> Iterator[None]:
        """Run the body under the call's own random state and autocast mode."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise PullbackError(
                    "An input changed after the forward pass",
                    "it was modified in place, so the call cannot be replayed",
                    "Pass a copy to the model",
                )
        with contextlib.ExitStack() as stack:
            # hooks and swapped parameters would make a compiled module compile again every time
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self.random is not None:
                now = RandomState(self.random.device)
                stack.callback(now.restore)
                self.random.restore()
            if self.autocast is not None:
                kind, dtype = self.autocast
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield


class CallHook:
    """A method of a `Watch`, held weakly; copies and pickles of the model leave it behind.

    Inside `torch.compile` it is traced: a call that is not due is traced away, and one that is
    leaves the compiled code for a moment.
    """

    def __init__(self, watch: Watch | None = None, method: str = "") -> None:
        self._watch = None if watch is None else weakref.ref(watch)
        self._method = method

    def __call__(self, *args: Any) -> None:
        watch = None if self._watch is None else self._watch()
        if watch is None:
            return
        if torch.compiler.is_compiling():
            if watch.wants_compiled_calls:
                _outside_compiled_code(watch, self._method, args)
            return
        getattr(watch, self._method)(*args)

    def __deepcopy__(self, memo: Any) -> CallHook:
        return CallHook()

    def __reduce__(self) -> Any:
        return CallHook, ()


@torch._disable_dynamo
def _outside_compiled_code(watch: Watch, method: str, args: Any) -> None:
    watch.compiled = True
    try:
        getattr(watch, method)(*args)
    finally:
        watch.compiled = False


#: who watches a model
_WATCHES: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Watch]] = weakref.WeakKeyDictionary()


class Watch:
    """Two hooks on a model, which report its outermost forward calls.

    `owner.begin_call(args, kwargs, compiled)` returns a context in which the call runs, or None to
    pass over it; `owner.end_call(output)` receives the output of a call that began. The owner is
    held weakly.
    """

    def __init__(self, owner: Any, model: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        #: whether calls in compiled code are of interest; such code is guarded by it
        self.wants_compiled_calls = True
        #: whether the hook at work belongs to compiled code, where layers cannot be hooked
        self.compiled = False
        #: whether the model was called since this was last set to False
        self.called = False
        self._depth = 0
        self._context: Any = None
        self._all = _WATCHES.setdefault(model, weakref.WeakSet())
        self._all.add(self)
        hooks = contextlib.ExitStack()  # first and last among the model's own
        before, after = CallHook(self, "before"), CallHook(self, "after")
        first = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        hooks.callback(first.remove)
        hooks.callback(model.register_forward_hook(after, always_call=True).remove)
        self._finish = weakref.finalize(self, hooks.close)

    def close(self) -> None:
        """Remove the hooks; garbage collection of the watch does so too."""
        self._finish()
        self.reset()

    def reset(self) -> None:
        """Forget a call that never came back."""
        self._depth = 0
        self._leave()

    @contextlib.contextmanager
    def pause_all(self) -> Iterator[None]:
        """Pass over the model's calls inside, whoever watches it."""
        every = list(self._all)
        for watch in every:
            watch._depth += 1
        try:
            yield
        finally:
            for watch in every:
                watch._depth -= 1

    def _leave(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook before a forward pass."""
        self._depth += 1
        self.called = True
        owner = self._owner()
        if self._depth > 1 or owner is None:
            return
        self._leave()
        context = owner.begin_call(args, kwargs, self.compiled)
        if context is not None:
            context.__enter__()
            self._context = context

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook after a forward pass; `output` is None where it raised."""
        self._depth = max(0, self._depth - 1)
        owner = self._owner()
        if self._depth or self._context is None or owner is None:
            return
        self._leave()
        if output is not None:
            owner.end_call(output)


class Capture:
    """A context in which `model`'s forward calls are recorded.

    Hooks stand only inside the context, so nothing leaks into the model. A call counts when
    its output received a gradient: forwards under `no_grad` and discarded ones do not.
    """

    def __init__(self, model: nn.Module, selector: Selector, device: torch.device) -> None:
        self._model, self._selector, self._device = model, selector, device
        self._all: list[Call] = []
        self._begun: Call | None = None
        self._stack = contextlib.ExitStack()
        self._leaves = {n: p for n, p in unwrap_model(model).named_parameters() if p.requires_grad}
        self._derived: list[bool] = []

    @property
    def has_input_derivatives(self) -> bool:
        """Whether the loss has terms in derivatives of an output by the inputs."""
        return bool(self._derived)

    @property
    def calls(self) -> list[Call]:
        """The calls whose output received a gradient, in order."""
        return [c for c in self._all if c.cotangent is not None]

    @property
    def call_count(self) -> int:
        """How many forward calls there were in all."""
        return len(self._all)

    def __enter__(self) -> Capture:
        self._stack.callback(Watch(self, self._model).close)
        compiled = self._model.__dict__.get("_compiled_call_impl")
        if compiled is not None:  # model.compile(): hooks inside a compiled call never fire
            held = self._model.__dict__
            held["_compiled_call_impl"] = None
            self._stack.callback(held.__setitem__, "_compiled_call_impl", compiled)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def begin_call(self, args: Any, kwargs: Any, compiled: bool) -> Any:
        """Keep what the call can be repeated from."""
        self._begun = Call.record_start(self._model, args, kwargs, self._device)
        leaves = pytree.tree_leaves((args, kwargs))
        given = [t for t in leaves if isinstance(t, Tensor)]
        self._begun.sources = [t for t in given if t.grad_fn is not None]
        return contextlib.nullcontext()

    def end_call(self, output: Any) -> None:
        """Wait for the gradient at the output."""
        call, self._begun = self._begun, None
        if not torch.is_grad_enabled() or call is None:
            return
        z = select_returned_output(output, self._selector)
        if not z.requires_grad:
            return
        call.output, call._output_version = z.detach(), z._version
        self._all.append(call)

        # the graph holds this function, so it must not hold the graph
        leaves, derived = self._leaves, self._derived

        def receive(gradient: Tensor) -> None:
            if not reaches_parameters(leaves):  # a derivative by the inputs
                node = torch._C._current_autograd_node()
                refuse_reentrant(GradientEdge(node, 0))  # whose rows would be zero
                if torch.is_grad_enabled():
                    call_on_second_pass(node, lambda: derived.append(True))
                return
            before = call.cotangent
            call.cotangent = gradient.detach() if before is None else before + gradient.detach()

        z.register_hook(receive)
