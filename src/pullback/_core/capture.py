"""Capture of a model's forward calls, and of the loss's cotangent at their output."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from .errors import PullbackError
from .graph import (
    call_on_second_pass,
    is_own_pass,
    reaches_parameters,
    refuse_reentrant,
    skip_dtype_casts,
)
from .state import RandomState

Selector = Callable[[Any], Tensor] | str | int | None


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module behind `torch.compile` and `DistributedDataParallel`."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def select_output(output: Any, selector: Selector) -> Tensor:
    """Return the tensor z that the metric sees, from what the model returned.

    Args:
        output: what the model returned.
        selector: a function of the output, a key, an attribute or an index of it; None takes the
            tensor itself, or the entry `logits`.
    """
    if callable(selector):
        z = selector(output)
    elif selector is not None:
        z = _look_up_entry(output, selector)
    elif isinstance(output, Mapping) and "logits" in output:
        z = output["logits"]
    else:
        z = getattr(output, "logits", output)
    if not isinstance(z, Tensor):
        raise PullbackError(
            "The model's output is not one tensor", f"got {type(z).__name__}", _NAME_THE_TENSOR
        )
    return z


_NAME_THE_TENSOR = "Name the tensor with output=..., a key, an index or a function of the output"


def _look_up_entry(output: Any, selector: str | int) -> Any:
    """Return the attribute or entry of an output that is not a tensor."""
    if isinstance(output, Tensor):
        raise PullbackError(
            f"The model's output has no entry {selector!r}",
            f"it is one tensor, of shape {tuple(output.shape)}",
            "Leave output= out, or give a function of the output",
        )
    try:
        if not isinstance(output, Mapping) and hasattr(output, str(selector)):
            return getattr(output, str(selector))
        return output[selector]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise PullbackError(
            f"The model's output has no entry {selector!r}",
            f"got {type(output).__name__}",
            _NAME_THE_TENSOR,
        ) from error


def find_trained_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of a structured output that has a batch axis and a gradient.

    In (logits, loss), {"loss": ..., "scores": ...} or (reconstruction, mean, variance) it is the
    logits, the scores and the reconstruction. None where `select_output` knows better: for a plain
    tensor and for an entry `logits`; and where there is no such tensor.
    """
    if isinstance(output, Tensor) or _has_logits(output):
        return None
    for tensor in _list_tensors(output):
        if tensor.ndim > 0 and tensor.requires_grad and tensor.is_floating_point():
            return tensor
    return None


def _has_logits(output: Any) -> bool:
    if isinstance(output, Mapping):
        return "logits" in output
    return hasattr(output, "logits")


def _list_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(tree, Tensor):
        yield tree
        return
    branches: Iterable[Any] = ()
    if isinstance(tree, Mapping):
        branches = tree.values()
    elif isinstance(tree, (tuple, list)):
        branches = tree
    elif is_dataclass(tree):
        branches = vars(tree).values()
    for branch in branches:
        yield from _list_tensors(branch)


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
    """Return the output (or a tensor of its shape) with samples first and at least two axes."""
    if z.ndim == 0:
        raise PullbackError(
            "The model's output is a single number",
            "it has no batch axis, so there are no samples to average over",
            "Return one value per sample, such as (outputs, loss); with Lightning give the "
            "optimizer the network that training_step calls, not the LightningModule",
        )
    unsupported_type = _describe_unsupported_type(z)
    if unsupported_type is not None:
        raise PullbackError(
            f"The model's output is a {unsupported_type} tensor",
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
    if z.ndim == 1:
        return z[:, None]
    return z


def _describe_unsupported_type(z: Tensor) -> str | None:
    """Return why a metric cannot measure this kind of tensor; None for dense real tensors."""
    if z.is_complex():
        return "complex"
    if z.is_nested:
        return "nested"
    if z.layout is not torch.strided:
        return str(z.layout).removeprefix("torch.")
    return None


def find_first_input(tensors: Sequence[Tensor], samples: int, batch_dim: int) -> Tensor | None:
    """Return the first tensor among a call's arguments, samples first; None if there is none.

    A tensor whose length along `batch_dim` is not the number of samples stays as it is.
    """
    if not tensors:
        return None
    x = tensors[0].detach()
    has_samples = x.ndim > batch_dim and x.shape[batch_dim] == samples
    if has_samples:
        return x.movedim(batch_dim, 0)
    return x


def detach_tensors(tree: Any) -> Any:
    """Return the same nest of arguments with every tensor cut from its graph.

    A tensor that requires gradients still does: the model may differentiate by its inputs.
    """

    def detach(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, detach, tree)


def _collect_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass
class Call:
    """One forward call: its arguments, its output, and ∂loss/∂output once it is known."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor | None = None
    cotangent: Tensor | None = None
    random: RandomState | None = None
    #: device and dtype of autocast, dtype None where it was off; None for calls not recorded
    autocast: tuple[str, torch.dtype | None] | None = None
    buffers: dict[str, Tensor] | None = None
    #: arguments that have a graph, since they were computed from something differentiable
    differentiable_inputs: list[Tensor] = field(default_factory=list)
    _output_version: int = 0
    _input_versions: list[tuple[Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Call:
        """Return a call that did not happen in a closure: other inputs for the metric."""
        return cls(args, kwargs)

    @classmethod
    def record_start(cls, model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> Call:
        """Return the call that begins now, with all that it takes to repeat it."""
        call = cls(detach_tensors(args), detach_tensors(kwargs), random=RandomState(device))
        call._input_versions = [(t, t._version) for t in call.tensors if not t.is_inference()]
        buffers = unwrap_model(model).named_buffers()
        call.buffers = {name: buffer.detach().clone() for name, buffer in buffers}
        if device.type == "meta":  # which autocast does not know
            return call
        autocast_dtype = None
        if torch.is_autocast_enabled(device.type):
            autocast_dtype = torch.get_autocast_dtype(device.type)
        call.autocast = (device.type, autocast_dtype)
        return call

    def recorded_output(self) -> Tensor | None:
        """Return the output as it was; None if the loss has overwritten it since."""
        if self.output is None or self.output._version != self._output_version:
            return None
        return self.output

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return _collect_tensors((self.args, self.kwargs))

    @contextlib.contextmanager
    def replay_context(self) -> Iterator[None]:
        """Run the body under the call's own random state and autocast mode."""
        if any(tensor._version != version for tensor, version in self._input_versions):
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
                outer_state = RandomState(self.random.device)
                stack.callback(outer_state.restore)
                self.random.restore()
            if self.autocast is not None:
                device_type, dtype = self.autocast
                autocast = torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)
                stack.enter_context(autocast)
            yield


class CallHook:
    """A method of a `Watch`, referenced weakly; copies and pickles of the model do not have it.

    `torch.compile` traces it. If the watch wants calls of compiled code, the hook breaks the graph
    and runs outside of it; otherwise the compiled code contains nothing of it.
    """

    def __init__(self, watch: Watch | None = None, method: str = "") -> None:
        self._watch = None if watch is None else weakref.ref(watch)
        self._method = method

    def __call__(self, *args: Any) -> None:
        if self._watch is None:
            return
        watch = self._watch()
        if watch is None:
            return
        if torch.compiler.is_compiling():
            if watch.wants_compiled_calls:
                _call_outside_compiled_code(watch, self._method, args)
            return
        getattr(watch, self._method)(*args)

    def __deepcopy__(self, memo: Any) -> CallHook:
        return CallHook()

    def __reduce__(self) -> Any:
        return CallHook, ()


@torch._disable_dynamo
def _call_outside_compiled_code(watch: Watch, method: str, args: Any) -> None:
    """Call a method of the watch eagerly, and let it know that compiled code made the call."""
    watch.compiled = True
    try:
        getattr(watch, method)(*args)
    finally:
        watch.compiled = False


#: the watches of every model
_WATCHES: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Watch]] = weakref.WeakKeyDictionary()


class Watch:
    """Two hooks on a model, which report its outermost forward calls.

    `owner.begin_call(args, kwargs, compiled)` returns a context in which the call runs, or None to
    pass over it; `owner.end_call(output)` receives the output of a call that began. The watch has
    a weak reference to its owner.
    """

    def __init__(self, owner: Any, model: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        #: whether calls in compiled code are reported; such code is guarded by this flag
        self.wants_compiled_calls = True
        #: whether the hook at work belongs to compiled code, where layers cannot be hooked
        self.compiled = False
        #: whether the model was called since this was last set to False
        self.called = False
        self._depth = 0
        self._context: Any = None
        self._watches_of_model = _WATCHES.setdefault(model, weakref.WeakSet())
        self._watches_of_model.add(self)
        # the hooks run before and after all others of the model
        before = CallHook(self, "before")
        after = CallHook(self, "after")
        pre_handle = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        handle = model.register_forward_hook(after, always_call=True)
        hooks = contextlib.ExitStack()
        hooks.callback(pre_handle.remove)
        hooks.callback(handle.remove)
        self._finish = weakref.finalize(self, hooks.close)

    def close(self) -> None:
        """Remove the hooks; garbage collection of the watch does so too."""
        self._finish()
        self.reset()

    def reset(self) -> None:
        """Forget a call that raised and did not return."""
        self._depth = 0
        self._exit_context()

    @contextlib.contextmanager
    def pause_all(self) -> Iterator[None]:
        """Context in which no capture records the model's calls."""
        watches = list(self._watches_of_model)
        for watch in watches:
            watch._depth += 1
        try:
            yield
        finally:
            for watch in watches:
                watch._depth -= 1

    def _exit_context(self) -> None:
        """Leave the context in which the running call was made, if there is one."""
        context = self._context
        self._context = None
        if context is not None:
            context.__exit__(None, None, None)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook before a forward pass."""
        self._depth += 1
        self.called = True
        owner = self._owner()
        if self._depth > 1 or owner is None:
            return
        self._exit_context()
        context = owner.begin_call(args, kwargs, self.compiled)
        if context is not None:
            context.__enter__()
            self._context = context

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook after a forward pass; `output` is None if the pass raised."""
        self._depth = max(0, self._depth - 1)
        owner = self._owner()
        if self._depth or self._context is None or owner is None:
            return
        self._exit_context()
        if output is not None:
            owner.end_call(output)


class Capture:
    """A context in which `model`'s forward calls are recorded.

    Hooks stand only inside the context, so nothing leaks into the model. A call counts when
    its output received a gradient: forwards under `no_grad` and discarded ones do not.
    """

    def __init__(self, model: nn.Module, selector: Selector, device: torch.device) -> None:
        self._model = model
        self._selector = selector
        self._device = device
        self._recorded: list[Call] = []
        self._running: Call | None = None
        self._stack = contextlib.ExitStack()
        self._leaves = {n: p for n, p in unwrap_model(model).named_parameters() if p.requires_grad}
        #: one entry per backward pass through a derivative by the inputs
        self._input_derivatives: list[bool] = []

    @property
    def has_input_derivatives(self) -> bool:
        """Return True if the loss has terms in derivatives of an output by the inputs."""
        return bool(self._input_derivatives)

    @property
    def calls(self) -> list[Call]:
        """The calls whose output received a gradient, in order."""
        return [call for call in self._recorded if call.cotangent is not None]

    @property
    def call_count(self) -> int:
        """The number of forward calls, with and without a gradient."""
        return len(self._recorded)

    def __enter__(self) -> Capture:
        self._stack.callback(Watch(self, self._model).close)
        compiled = self._model.__dict__.get("_compiled_call_impl")
        if compiled is not None:  # model.compile(): hooks inside a compiled call never fire
            attributes = self._model.__dict__
            attributes["_compiled_call_impl"] = None
            self._stack.callback(attributes.__setitem__, "_compiled_call_impl", compiled)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def begin_call(self, args: Any, kwargs: Any, compiled: bool) -> Any:
        """Record what it takes to repeat the call."""
        self._running = Call.record_start(self._model, args, kwargs, self._device)
        tensors = _collect_tensors((args, kwargs))
        self._running.differentiable_inputs = [t for t in tensors if t.grad_fn is not None]
        return contextlib.nullcontext()

    def end_call(self, output: Any) -> None:
        """Record the output, and let a hook record the gradient that arrives there."""
        call = self._running
        self._running = None
        if not torch.is_grad_enabled() or call is None:
            return
        z = select_returned_output(output, self._selector)
        if not z.requires_grad:
            return
        call.output = z.detach()
        call._output_version = z._version
        self._recorded.append(call)

        leaves = self._leaves
        input_derivatives = self._input_derivatives

        def receive(gradient: Tensor) -> None:
            if is_input_derivative(leaves, lambda: input_derivatives.append(True)):
                return
            if call.cotangent is None:
                call.cotangent = gradient.detach()
            else:
                call.cotangent = call.cotangent + gradient.detach()

        await_cotangent(z, receive)


def await_cotangent(z: Tensor, receive: Callable[[Tensor], None]) -> None:
    """Call `receive` with ∂loss/∂z in every backward pass of the user's that arrives at z.

    If z is a copy in another dtype, `receive` gets the cotangent of the original: a wrapper may
    convert outputs after the model has computed its loss from them. The graph refers to
    `receive`, which must not refer to the graph.
    """
    node, number = skip_dtype_casts(z)

    def receive_users(cotangent: Tensor | None) -> None:
        if cotangent is not None and not is_own_pass():
            receive(cotangent)

    if node is None or node is z.grad_fn:
        z.register_hook(receive_users)
        return
    node.register_prehook(lambda cotangents: receive_users(cotangents[number]))


def is_input_derivative(leaves: Mapping[str, Tensor], note_second_pass: Callable[[], None]) -> bool:
    """Return True if the running backward pass differentiates by inputs only, so is no loss's.

    It is called in a hook of that pass. Such a pass, of a penalty or an attack, reaches none of the
    parameters. `note_second_pass` is called when a later pass differentiates this one, which shows
    that the loss contains it.
    """
    if reaches_parameters(leaves):
        return False
    node = torch._C._current_autograd_node()
    refuse_reentrant(GradientEdge(node, 0))  # it would hide the parameters
    if torch.is_grad_enabled():
        call_on_second_pass(node, note_second_pass)
    return True
