"""Hooks on the model: they see the forward passes that a statistics step learns from."""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.capture import plain


class Hook:
    """A bound method, held weakly; copies and pickles of the model leave it behind."""

    def __init__(self, owner: Any = None, method: str = "") -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._method = method

    def __call__(self, *args: Any) -> Any:
        owner = None if self._owner is None else self._owner()
        return None if owner is None else getattr(owner, self._method)(*args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


class Watch:
    """Two hooks on the model as it is called; layers are hooked only while it is watched.

    `owner` decides by `_begin(args, kwargs)` whether to record, gets a context to record in, and
    receives the output in `_end(output)`.
    """

    def __init__(self, owner: Any, model: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._model = model
        self._depth = 0
        self._recording: contextlib.ExitStack | None = None
        self._handles = [
            model.register_forward_pre_hook(Hook(self, "before"), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self, "after"), always_call=True),
        ]

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._stop()

    def _stop(self) -> None:
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        owner = self._owner()
        if self._depth > 1 or owner is None:
            return
        self._stop()
        tape = owner._begin(args, kwargs)
        if tape is None:
            return
        stack = contextlib.ExitStack()
        if plain(module) is not module or "torch._dynamo" in sys.modules:
            # inside a compiled call the layers' hooks would not fire
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(tape)
        self._recording = stack

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        owner = self._owner()
        if self._depth or self._recording is None or owner is None:
            return
        self._stop()
        if output is not None:
            owner._end(output)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name, tied ones once."""
    return {n: p for n, p in plain(model).named_parameters() if p.requires_grad}
