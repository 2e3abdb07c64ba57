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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..._core.space import compute_dtype


class AffineMap(NamedTuple):
    """The parameters of an affine map inside a compound layer."""

    weight: Tensor | None
    bias: Tensor | None
    #: how many maps with different inputs the parameters pack by their rows
    groups: int


class Tap:
    """One affine map z = W a + b inside a compound layer, W and b constant, called at each step.

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
        self._w: Tensor | None = None
        self._b: Tensor | None = None
        if weight is not None:
            self._w = _split_groups(weight, groups, weight.shape[-1])
        if bias is not None:
            self._b = _split_groups(bias, groups, 1)
        #: a per step, each (G, P_t, I), without a graph
        self.inputs: list[Tensor] = []
        #: z per step, each (G, P_t, O), in the replay's graph
        self.outputs: list[Tensor] = []
        #: how many of the Σ_t P_t positions are real, per group; padding comes last, with a = δ = 0
        self.positions: tuple[int, ...] = ()
        #: the shape of the real positions, per group: samples by positions, empty if unknown
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
        """Record the shape of the positions, after the last step, and return the tap.

        Without grids all positions are real. `backwards` reverses the order of the steps.
        """
        self.positions = tuple(prod(grid) for grid in grids)
        if not grids:
            total = sum(a.shape[1] for a in self.inputs)
            self.positions = (total,) * self._groups
        self.grids = tuple(grids)
        self.batch_dim = batch_dim
        if backwards:
            self.inputs.reverse()
            self.outputs.reverse()
        return self


class Compound(ABC):
    """A kind of layer with affine maps inside, entered by `register`.

    `select_outputs` picks the tensors of the layer's result, `replay_steps` computes the same
    tensors from the arguments through taps, and `describe_omission` names what the replay leaves
    out: a dropout that only the layer's own kernel knows. Then ȳ comes from the layer with
    dropout, and ∂y/∂z from the layer without.
    """

    #: the kind of use, by which saved statistics name it
    use: ClassVar[str] = "compound"
    curvature: str = "compound"
    input_first: bool = False

    @abstractmethod
    def select_outputs(self, module: Any, output: Any) -> list[Tensor]:
        """Return the tensors of the layer's result that may receive gradients, in a fixed order."""

    @abstractmethod
    def replay_steps(
        self, module: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[Tensor], list[Tap]]:
        """Return the outputs of `forward`, computed through taps, and the taps.

        The arguments have no graph, and they have the dtype of the replay.
        """

    @abstractmethod
    def list_affine_maps(self, module: Any) -> list[AffineMap]:
        """Return the parameters of the affine maps inside."""

    def describe_omission(self, module: Any) -> str:
        """Return in words what the replay does not reproduce, or an empty string."""
        return ""

    def replay(
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tap]]:
        """Return the recomputed outputs in the order of `select_outputs`, and their taps.

        The replay runs in float32 at least, without autocast. The caller casts cotangents of
        another dtype.
        """
        parameter = next(module.parameters())
        args, kwargs = _detach_arguments((args, kwargs), compute_dtype(parameter.dtype))
        with torch.enable_grad(), torch.autocast(parameter.device.type, enabled=False):
            return self.replay_steps(module, *args, **kwargs)

    def run_without_dropout(
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return what `replay` must reproduce: the outputs of the layer's forward, no dropout."""
        parameter = next(module.parameters())
        dropout = module.dropout
        args, kwargs = _detach_arguments((args, kwargs), parameter.dtype)
        module.dropout = 0.0  # not eval(): cuDNN's recurrences have gradients in training alone
        try:
            with torch.enable_grad(), torch.autocast(parameter.device.type, enabled=False):
                result = module.forward(*args, **kwargs)
        finally:
            module.dropout = dropout
        return self.select_outputs(module, result)


def list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among a call's arguments."""
    tensors = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, PackedSequence):
            tensors.append(leaf.data)
        elif isinstance(leaf, Tensor):
            tensors.append(leaf)
    return tensors


def _split_groups(parameter: Tensor, groups: int, columns: int) -> Tensor:
    """Return (G·O, I) as (G, O, I), without a graph."""
    return parameter.detach().to(compute_dtype(parameter.dtype)).reshape(groups, -1, columns)


def _detach_arguments(tree: Any, dtype: torch.dtype) -> Any:
    """Return the arguments without their graph, floating point tensors in `dtype`."""

    def detach(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=detach(value.data))
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return value.detach().to(dtype)
        return value.detach()

    return pytree.tree_map(detach, tree)
