"""A forward pass that waits for the loss's gradient to come back to its output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ...._core.capture import Call, detached, plain
from ...._core.errors import PullbackError
from ...._core.state import RandomState
from .head import again_by, head_of
from .tape import Tape

Root = Tensor | GradientEdge

_LARGE = 2**24  # entries of an output from which on it is computed twice instead of kept


class Pending:
    """What is kept of a forward pass until its output z receives a gradient.

    The graph owns it, by a hook on z: so it must own neither z nor z's node, and is gone with a
    graph through which nobody propagates.

    Args:
        z: the output that the metric sees.
        tape: the layers on the way, or None if the pass ran in compiled code.
        call: how to run the pass again, if it ran in compiled code.
        inputs: the model's first tensor, for metrics that depend on it.
    """

    def __init__(self, z: Tensor, tape: Tape | None, call: Again | None, inputs: Any) -> None:
        self.again: Callable[[], Tensor] | None = None
        #: whether z may be kept for a while
        self.small = z.numel() < _LARGE
        if tape is not None and not self.small:
            tape.head = head_of(z, tape)
            if tape.head is not None:
                self.again = again_by(tape.entries[tape.head], z.dtype)
        if tape is not None and z.grad_fn is not None:
            tape.release(z.grad_fn)
        self.tape, self.call, self.inputs = tape, call, inputs
        self._version, self._number = z._version, z.output_nr
        # while the loss is differentiated there would be one more tensor of this size
        self._value = z.detach() if self.again is None else None
        self._leaf = z if z.grad_fn is None else None

    @property
    def empty(self) -> bool:
        """Whether it was taken already."""
        return self.tape is None and self.call is None

    def clear(self) -> None:
        """Let go of everything; a user may keep the graph for long."""
        self.tape = self.call = self.inputs = self._leaf = self._value = self.again = None

    def value(self) -> Tensor:
        """z as it was."""
        if self.again is not None:
            return self.again()
        assert self._value is not None
        if self._value._version != self._version:
            raise PullbackError(
                "The model's output was changed in place",
                "the metric at the output needs the values that the model gave",
                "Change a copy: z = z + 1, not z += 1",
            )
        return self._value

    def root(self) -> Root:
        """Where z stands in the graph; only while its hook runs."""
        if self._leaf is not None:
            return self._leaf
        return GradientEdge(torch._C._current_autograd_node(), self._number)


class Again:
    """How to repeat a forward pass outside of compiled code.

    Arguments, buffers and random numbers are those of the pass itself.
    """

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        device = next((p.device for p in plain(model).parameters()), torch.device("cpu"))
        kind = device.type
        self._model = model
        self._call = Call(detached(args), detached(kwargs), random=RandomState(device))
        self._call.output = torch.empty(0, device=device)
        if torch.is_autocast_enabled(kind):
            self._call.autocast = (kind, torch.get_autocast_dtype(kind))
        self._buffers = [(m, n, b.detach().clone()) for m, n, b in _buffers(model)]

    def __call__(self, tape: Tape) -> Any:
        """The output, with the layers on the way in `tape`."""
        call = self._call
        with torch.enable_grad(), call.replaying(), self._swapped(), tape:
            return self._model(*call.args, **call.kwargs)

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        now = list(_buffers(self._model))
        for module, name, saved in self._buffers:
            module._buffers[name] = saved
        try:
            yield
        finally:
            for module, name, buffer in now:
                module._buffers[name] = buffer


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in plain(model).modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer
