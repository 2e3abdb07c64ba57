"""Hooks on the model: they see the forward passes that a statistics step learns from."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...._core.capture import plain


class Hook:
    """A method of a `Watch`, held weakly; copies and pickles of the model leave it behind.

    Inside `torch.compile` it is traced: a call between statistics is traced away, and one that is
    due leaves the compiled code for a moment.
    """

    def __init__(self, watch: Watch | None = None, method: str = "") -> None:
        self._watch = None if watch is None else weakref.ref(watch)
        self._method = method

    def __call__(self, *args: Any) -> None:
        watch = None if self._watch is None else self._watch()
        if watch is None:
            return
        if torch.compiler.is_compiling():
            if watch.due:
                _aside(watch, self._method, args)
            return
        getattr(watch, self._method)(*args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


@torch._disable_dynamo
def _aside(watch: Watch, method: str, args: Any) -> None:
    """The hook's work for a compiled call, outside of the compiled code."""
    watch.compiled = True
    try:
        getattr(watch, method)(*args)
    finally:
        watch.compiled = False


class Watch:
    """Two hooks on the model as it is called; layers are hooked only while it is watched.

    `owner` decides by `_begin(args, kwargs, compiled)` whether to record, gives a context to record
    in, and receives the output in `_end(output)`.
    """

    def __init__(self, owner: Any, model: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        #: whether statistics are due; compiled code is guarded by it
        self.due = True
        #: whether the hook at work belongs to compiled code, where layers cannot be hooked
        self.compiled = False
        self._depth = 0
        self._recording: contextlib.ExitStack | None = None
        handles = [
            model.register_forward_pre_hook(Hook(self, "before"), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self, "after"), always_call=True),
        ]
        #: removes the hooks, at the latest when nobody holds the watch any more
        self._finish = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Leave the model as it was."""
        self._finish()
        self.reset()

    def reset(self) -> None:
        """Forget a call that never came back."""
        self._depth = 0
        self._stop()

    @contextlib.contextmanager
    def aside(self) -> Any:
        """Within it, calls of the model are none of ours."""
        self._depth += 1
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._depth -= 1

    def _stop(self) -> None:
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        owner = self._owner()
        if self._depth > 1 or owner is None or not owner._wanted():
            return
        self._stop()
        stack, compiled = contextlib.ExitStack(), self.compiled
        if not compiled:
            try:  # what the module calls may be compiled, and its layers' hooks would not fire
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            except RuntimeError:
                compiled = True  # by the caller, whose code was left for the hook
        with stack:
            recording = owner._begin(args, kwargs, compiled)
            if recording is not None:
                stack.enter_context(recording)
                self._recording = stack.pop_all()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        owner = self._owner()
        if self._depth or self._recording is None or owner is None:
            return
        self._stop()
        if output is not None:
            owner._end(output)


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name, tied ones once."""
    return {n: p for n, p in plain(model).named_parameters() if p.requires_grad}
