"""The layers met in one forward pass: their inputs and where their output cotangents appear."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .._core.capture import Call
from .layers import Layer, find


@dataclass(slots=True, eq=False)
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


class Sites:
    """What is to be written down of a model's modules, found once: `by` a path, a module, its kind.

    Args:
        model: whose modules they are.
        kind: what is known of a module, None where it is of no interest.
    """

    def __init__(self, model: nn.Module, kind: Callable[[nn.Module], Any]) -> None:
        named = list(model.named_modules())
        kinds = [(path, module, kind(module)) for path, module in named]
        self.by = [site for site in kinds if site[2] is not None]
        self.modules = dict(named)
        self._held = [(m, type(m), dict(m._modules)) for _, m in named]

    @property
    def current(self) -> bool:
        """Whether the modules are still the same."""
        return all([type(m) is kind and m._modules == below for m, kind, below in self._held])


class Recorder:
    """A context in which every known layer with a trainable parameter is written down.

    The output is remembered as a gradient edge and not as a tensor: an activation that
    works in place changes the tensor, but not the edge.
    """

    def __init__(
        self, model: nn.Module, leaves: Mapping[str, Tensor], sites: Sites | None = None
    ) -> None:
        self.entries: list[Entry] = []
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._sites = Sites(model, self.kind) if sites is None else sites
        self._number = -1

    @staticmethod
    def kind(module: nn.Module) -> Any:
        """What is known of a module that is written down."""
        return find(module)

    def __enter__(self) -> Recorder:
        # as `register_forward_hook` does it, with one number for all instead of a handle each
        self._number = RemovableHandle(OrderedDict()).id
        for path, module, kind in self._sites.by:
            hooks: Any = module._forward_hooks
            hooks[self._number] = self._hook(path, kind)
            hooks.move_to_end(self._number, last=False)  # first of all
            module._forward_hooks_with_kwargs[self._number] = True
        return self

    def __exit__(self, *exc: object) -> None:
        for _, module, _ in self._sites.by:
            module._forward_hooks.pop(self._number, None)
            module._forward_hooks_with_kwargs.pop(self._number, None)

    def _hook(self, path: str, layer: Layer) -> Any:
        known = self._names

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(output, Tensor) or not isinstance(x, Tensor):
                return None
            if not output.requires_grad:
                return None
            names = {r: known.get(id(t)) for r, t in layer.parameters(module).items()}
            if not any(names.values()):
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
