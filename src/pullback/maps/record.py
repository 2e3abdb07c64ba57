"""The layers met in one forward pass: their inputs and where their output cotangents appear."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._core.capture import Call
from .layers import Layer, find


@dataclass(frozen=True)
class Entry:
    """One use of one layer."""

    path: str
    module: nn.Module
    layer: Layer
    names: dict[str, str | None]
    input: Tensor
    edge: GradientEdge
    shape: tuple[int, ...]

    @property
    def features(self) -> int:
        """Trailing axes of the output that belong to one place."""
        return self.layer.features(self.module, len(self.shape))

    @property
    def key(self) -> tuple[str | None, ...]:
        """Which parameters, in which roles, by which kind of layer."""
        return (type(self.layer).__name__, *self.names.values())


class Recorder:
    """A context in which every known layer with a trainable parameter is written down.

    The output is remembered as a gradient edge and not as a tensor: an activation that
    works in place changes the tensor, but not the edge.
    """

    def __init__(self, model: nn.Module, leaves: Mapping[str, Tensor]) -> None:
        self.entries: list[Entry] = []
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._model = model
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        for path, module in self._model.named_modules():
            if (layer := find(module)) is not None:
                hook = self._hook(path, layer)
                handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True)
                self._stack.callback(handle.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _hook(self, path: str, layer: Layer) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            names = {r: self._names.get(id(t)) for r, t in layer.parameters(module).items()}
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(output, Tensor) or not isinstance(x, Tensor):
                return None
            if not output.requires_grad or all(n is None for n in names.values()):
                return None
            if output._is_view():  # an in-place activation would replace a view's node
                output = output.clone()
            edge = get_gradient_edge(output)
            self.entries.append(
                Entry(path, module, layer, names, x.detach(), edge, tuple(output.shape))
            )
            return output

        return record

    def signature(self, call: Call) -> Any:
        """What the established structure depends on: parameters, layers, shapes and modes."""
        layers = tuple(
            (e.path, e.shape, tuple(e.input.shape), e.module.training) for e in self.entries
        )
        inputs = tuple((tuple(t.shape), t.dtype) for t in call.tensors)
        names = tuple(self._names.values())
        return names, layers, inputs, call.autocast, torch.get_default_dtype()
