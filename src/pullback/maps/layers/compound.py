r"""Layers that hide several affine maps z = W a + b behind one call.

K-FAC needs the inputs a and the cotangents δ = ∂L/∂z of every affine map. A fused recurrent kernel
or an attention function shows only its arguments and its results. So the layer is *replayed* by
explicit steps from the same arguments, with every z standing in the replay's graph, and the
cotangents ȳ which the loss gave to the layer's results y are pulled back to them,

    δ = (∂y/∂z)ᵀ ȳ,        ∂L/∂W = Σ δ ⊗ a,        ∂L/∂b = Σ δ        (over positions and steps).

In code: `torch.autograd.grad(outputs, tap.outputs, cotangents)`, for the outputs the loss uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..._core.space import compute_dtype


class Tap:
    """One affine map z = W a + b inside a compound layer, W and b held fixed, called at each step.

    A parameter may pack G maps of different inputs by its rows (the query, key and value of
    attention); elsewhere G = 1. The positions P_t are whatever shares the map at step t: samples,
    and for a map that does not recur also the times.

    Args:
        weight: the module's own tensor (G·O, I), or None for a bias alone (then I = 0).
        bias: the module's own tensor with G·O entries, or None.
        groups: G.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, groups: int = 1) -> None:
        self.weight = weight
        self.bias = bias
        self._groups = groups
        if weight is None:
            self._w = None
        else:
            self._w = _split(weight, groups, weight.shape[-1])
        if bias is None:
            self._b = None
        else:
            self._b = _split(bias, groups, 1)
        #: a per step, each (G, P_t, I), without a graph
        self.inputs: list[Tensor] = []
        #: z per step, each (G, P_t, O), in the replay's graph
        self.outputs: list[Tensor] = []
        #: how many of the Σ_t P_t positions are real, per group; the rest, last, have a = 0, δ = 0
        self.positions: tuple[int, ...] = ()
        #: how these are laid out, per group: samples by positions, or empty where nobody knows
        self.grids: tuple[tuple[int, ...], ...] = ()
        #: the axis of a grid that counts samples
        self.batch_dim = 0

    @property
    def form(self) -> tuple[int, int, int]:
        """Groups, rows and columns of the weight."""
        if self.weight is None:
            return 1, 0, 0
        return self._groups, len(self.weight) // self._groups, self.weight.shape[-1]

    def __call__(self, a: Tensor) -> Tensor:
        """(G, P, I) -> (G, P, O); a bias alone takes I = 0."""
        z: Tensor | None = None
        if self._w is not None:
            z = a @ self._w.mT
        if self._b is not None:
            b = self._b.mT
            if z is None:
                z = b.expand(-1, a.shape[1], -1)
            else:
                z = z + b
        assert z is not None
        if not z.requires_grad:
            z.requires_grad_()  # no earlier map stands before this one: the graph begins here
        self.inputs.append(a.detach())
        self.outputs.append(z)
        return z

    def finish(
        self, grids: Sequence[tuple[int, ...]] = (), batch_dim: int = 0, backwards: bool = False
    ) -> Tap:
        """Say how positions lie, after the last step; `backwards` puts that one first.

        Without grids all positions are real.
        """
        every = sum(a.shape[1] for a in self.inputs)
        self.positions = tuple(prod(g) for g in grids) or (every,) * self._groups
        self.grids = tuple(grids)
        self.batch_dim = batch_dim
        if backwards:
            self.inputs.reverse()
            self.outputs.reverse()
        return self


class Compound(ABC):
    """A kind of layer with affine maps inside, entered by `register`.

    `outputs` picks the tensors of the layer's result, `steps` computes the same tensors from the
    arguments through taps, and `note` says what it leaves out: a dropout that only the
    layer's own kernel knows. Then ȳ is that of the layer as it was, ∂y/∂z that of one without.
    """

    #: the kind of use, by which saved statistics name it
    use: ClassVar[str] = "compound"
    curvature: str = "compound"
    input_first: bool = False

    @abstractmethod
    def outputs(self, module: Any, output: Any) -> list[Tensor]:
        """The tensors of the layer's result that may receive gradients, in a fixed order."""

    @abstractmethod
    def steps(self, module: Any, *args: Any, **kwargs: Any) -> tuple[list[Tensor], list[Tap]]:
        """`forward`, taken apart; the arguments come without a graph, in the replay's dtype."""

    @abstractmethod
    def maps(self, module: Any) -> list[tuple[Tensor | None, Tensor | None, int]]:
        """Weight, bias and groups of every affine map inside."""

    def note(self, module: Any) -> str:
        """What the replay does not reproduce, or an empty string."""
        return ""

    def replay(
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tap]]:
        """The outputs recomputed, in the order of `outputs`, and the taps in their graph.

        Half precision and autocast are left: the replay runs in float32 at least, and cotangents
        of another dtype are the caller's to cast.
        """
        some = next(module.parameters())
        args, kwargs = _fixed((args, kwargs), compute_dtype(some.dtype))
        with torch.enable_grad(), torch.autocast(some.device.type, enabled=False):
            return self.steps(module, *args, **kwargs)

    def alone(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The outputs by the layer's own forward without dropout: what `replay` must reproduce."""
        some = next(module.parameters())
        dropout = module.dropout
        args, kwargs = _fixed((args, kwargs), some.dtype)
        module.dropout = 0.0  # not eval(): cuDNN's recurrences have gradients in training alone
        try:
            with torch.enable_grad(), torch.autocast(some.device.type, enabled=False):
                result = module.forward(*args, **kwargs)
        finally:
            module.dropout = dropout
        return self.outputs(module, result)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among a call's arguments."""
    leaves = pytree.tree_leaves(tree)
    found = [v.data if isinstance(v, PackedSequence) else v for v in leaves]
    return [v for v in found if isinstance(v, Tensor)]


def _split(parameter: Tensor, groups: int, columns: int) -> Tensor:
    """(G·O, I) -> (G, O, I)."""
    return parameter.detach().to(compute_dtype(parameter.dtype)).reshape(groups, -1, columns)


def _fixed(tree: Any, dtype: torch.dtype) -> Any:
    """Arguments without their graph, floating point tensors in `dtype`."""

    def fixed(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=fixed(value.data))
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return value.detach().to(dtype)
        return value.detach()

    return pytree.tree_map(fixed, tree)
