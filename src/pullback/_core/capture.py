"""Capture of a model's forward calls and of the loss's cotangent while a closure runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import PullbackError
from .state import RandomState

Selector = Callable[[Any], Tensor] | str | int | None


def plain(model: nn.Module) -> nn.Module:
    """The module itself behind a `torch.compile` wrapper."""
    return getattr(model, "_orig_mod", model)


def select(output: Any, selector: Selector) -> Tensor:
    """The tensor z that the metric sees, from whatever the model returned."""
    if callable(selector):
        output = selector(output)
    elif selector is not None:
        try:
            keyed = isinstance(output, Mapping) or not hasattr(output, str(selector))
            output = output[selector] if keyed else getattr(output, str(selector))
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


def picked(output: Any, selector: Selector) -> Tensor:
    """`select` of a tensor whose gradient is awaited: the model itself must have returned it."""
    z = select(output, selector)
    if callable(selector) and selector(output) is not z:
        raise PullbackError(
            "The function output= computes a tensor",
            "the loss is made of what the model returns, so that no gradient reaches another one",
            "Let it return one of the model's tensors, and compute in the model's forward",
        )
    return z


def detached(tree: Any) -> Any:
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
    autocast: tuple[str, torch.dtype] | None = None
    buffers: dict[str, Tensor] | None = None
    #: inputs that were computed from something differentiable
    sources: list[Tensor] = field(default_factory=list)
    _output_version: int = 0
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Call:
        """A call that did not happen in a closure: other inputs for the metric."""
        return cls(args, kwargs)

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
    def replaying(self) -> Iterator[None]:
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
                stack.enter_context(torch.autocast(self.autocast[0], dtype=self.autocast[1]))
            elif self.output is not None and torch.is_autocast_enabled(self.output.device.type):
                stack.enter_context(torch.autocast(self.output.device.type, enabled=False))
            yield


class Capture:
    """A context in which `model`'s forward calls are recorded.

    Hooks stand only inside the context, so nothing leaks into the model. A call counts when
    its output received a gradient: forwards under `no_grad` and discarded ones do not.
    """

    def __init__(self, model: nn.Module, selector: Selector, device: torch.device) -> None:
        self._model = model
        self._selector = selector
        self._device = device
        self._all: list[Call] = []
        self._pending: list[Call] = []
        self._stack = contextlib.ExitStack()

    @property
    def calls(self) -> list[Call]:
        """The calls whose output received a gradient, in order."""
        return [c for c in self._all if c.cotangent is not None]

    @property
    def seen(self) -> int:
        """How many forward calls there were in all."""
        return len(self._all)

    def __enter__(self) -> Capture:
        model = self._model
        # first and last among the model's own hooks, which run again in a replay
        before = model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        self._stack.callback(before.remove)
        self._stack.callback(model.register_forward_hook(self._after).remove)
        compiled = model.__dict__.get("_compiled_call_impl")
        if compiled is not None:  # model.compile(): hooks inside a compiled call never fire
            model.__dict__["_compiled_call_impl"] = None
            self._stack.callback(model.__dict__.__setitem__, "_compiled_call_impl", compiled)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(detached(args), detached(kwargs), random=RandomState(self._device))
        leaves = pytree.tree_leaves((args, kwargs))
        call.sources = [t for t in leaves if isinstance(t, Tensor) and t.grad_fn is not None]
        call._versions = [(t, t._version) for t in call.tensors if not t.is_inference()]
        call.buffers = {n: b.detach().clone() for n, b in plain(module).named_buffers()}
        self._pending.append(call)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._pending.pop()
        if not torch.is_grad_enabled():
            return
        z = picked(output, self._selector)
        if not z.requires_grad:
            return
        call.output, kind = z.detach(), z.device.type
        call._output_version = z._version
        if torch.is_autocast_enabled(kind):
            call.autocast = (kind, torch.get_autocast_dtype(kind))
        self._all.append(call)

        def receive(gradient: Tensor) -> None:
            before = call.cotangent
            call.cotangent = gradient.detach() if before is None else before + gradient.detach()

        z.register_hook(receive)
