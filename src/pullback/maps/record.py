"""The layers met in one forward pass: their inputs and where their output cotangents appear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .._core.capture import Call
from .layers import Layer, find


@dataclass(frozen=True, slots=True)
class Entry:
    """One use of one layer."""

    path: str
    module: nn.Module
    layer: Layer
    names: dict[str, str | None]
    input: Tensor
    edge: GradientEdge
    shape: tuple[int, ...]
    #: mean and 1/σ of a normalization, where its forward pass left them
    kept: tuple[Tensor, Tensor] | None = None

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
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Recorder:
        for path, module in self._model.named_modules():
            if (hook := self._hook_of(path, module)) is not None:
                handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True)
                self._handles.append(handle)
        return self

    def _hook_of(self, path: str, module: nn.Module) -> Any:
        layer = find(module)
        return None if layer is None else self._hook(path, layer)

    def __exit__(self, *exc: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, path: str, layer: Layer) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            names = {r: self._names.get(id(t)) for r, t in layer.parameters(module).items()}
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(output, Tensor) or not isinstance(x, Tensor):
                return None
            if not output.requires_grad or all(n is None for n in names.values()):
                return None
            output, edge = self._placed(module, output)
            self.entries.append(self._entry(path, module, layer, names, x.detach(), edge, output))
            return output

        return record

    def _entry(
        self,
        path: str,
        module: nn.Module,
        layer: Layer,
        names: dict[str, str | None],
        x: Tensor,
        edge: GradientEdge,
        output: Tensor,
    ) -> Entry:
        """What is written down."""
        return Entry(path, module, layer, names, x, edge, tuple(output.shape))

    def _placed(self, module: nn.Module, output: Tensor) -> tuple[Tensor, GradientEdge]:
        """The output to go on with, and where its cotangent appears."""
        if output._is_view():  # an in-place activation would replace a view's node
            output = output.clone()
        return output, get_gradient_edge(output)

    def signature(self, call: Call) -> Any:
        """What the established structure depends on: parameters, layers, shapes and modes."""
        layers = tuple(
            (e.path, e.shape, tuple(e.input.shape), e.module.training) for e in self.entries
        )
        inputs = tuple((tuple(t.shape), t.dtype) for t in call.tensors)
        names = tuple(self._names.values())
        return names, layers, inputs, call.autocast, torch.get_default_dtype()
