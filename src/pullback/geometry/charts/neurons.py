r"""Neurons in another order and on another scale, in a network of the same architecture.

For hidden units a†_i = s_i a_{π(i)} with s > 0, a layer's outgoing rows and the next layer's
incoming columns change together:

    W† = diag(s) W[π, :],   b† = s∘b[π],   W†_next = W_next[:, π] diag(s)⁻¹,

and φ(s z) = s φ(z), so the function is the same: permutations go with every activation that acts by
entry, scales with ReLU and other positively homogeneous ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from .affine import Layer, is_layer
from .twin import chain, refuse_shared

#: modules with φ(sz) = sφ(z) for s > 0 by channel
HOMOGENEOUS: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.Dropout,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.Upsample,
)  # fmt: skip
#: modules that treat all channels alike
ALIKE: tuple[type[nn.Module], ...] = (
    *HOMOGENEOUS, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU,
    nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid,
    nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold,
)  # fmt: skip


@dataclass(frozen=True)
class Neurons:
    """a†_i = s_i a_{π(i)}, with `order` π (n,) and `scale` s (n,)."""

    order: Tensor
    scale: Tensor

    def inverse(self) -> Neurons:
        """a_k = a†_j/s_j with j = π⁻¹(k)."""
        back = self.order.argsort()
        return Neurons(back, 1 / self.scale[back])


def hidden(model: nn.Module) -> list[tuple[Layer, Layer, list[nn.Module]]]:
    """Each layer with the next one and what stands between them."""
    modules = chain(model)
    places = [i for i, m in enumerate(modules) if is_layer(m)]
    found = [modules[i] for i in places]
    if len(found) < 2 or len({id(m) for m in found}) < len(found):
        raise PullbackError(
            "The model has no hidden neurons to change",
            f"{type(model).__name__} has {len(found)} linear and convolution layers in a row"
            + (", some of them used twice" if len(found) > 1 else ""),
            "Give an nn.Sequential with at least two layers",
        )
    refuse_shared(model)
    return [(modules[i], modules[j], modules[i + 1 : j]) for i, j in pairwise(places)]  # pyright: ignore[reportReturnType]


def refuse_others(model: nn.Module, allowed: Sequence[type[nn.Module]], what: str) -> None:
    """Raise where something else than the allowed modules stands between two layers."""
    for _, _, between in hidden(model):
        for module in between:
            if type(module) not in allowed:
                raise PullbackError(
                    f"The model's neurons cannot be {what}",
                    f"{type(module).__name__} between two layers does not commute with it",
                    "Use ReLU or another positively homogeneous activation"
                    if allowed is HOMOGENEOUS
                    else "Use activations that act by entry",
                )


@torch.no_grad()
def neuron_twin(model: nn.Module, changes: Sequence[Neurons]) -> nn.Module:
    """A copy whose hidden neurons have another order and scale; one change per hidden layer."""
    out = copy.deepcopy(model)
    pairs = hidden(out)
    if len(pairs) != len(changes):
        raise PullbackError(
            "The changes do not fit the model",
            f"it has {len(pairs)} hidden layers, and {len(changes)} changes were given",
            "Give one per layer but the last",
        )
    for (layer, after, between), change in zip(pairs, changes, strict=True):
        _enter(layer, change)
        _leave(after, change, flattened=any(isinstance(m, nn.Flatten) for m in between))
    return out


def _enter(layer: Layer, change: Neurons) -> None:
    size = layer.weight.shape[0]
    order = change.order.to(layer.weight.device)
    right = order.shape == change.scale.shape == (size,)
    if not right or not torch.equal(order.sort().values, torch.arange(size, device=order.device)):
        raise PullbackError(
            "A change of neurons does not fit its layer",
            f"{type(layer).__name__} has {size} of them",
            "Give a permutation of range(n) and n positive scales",
        )
    if not bool((change.scale > 0).all() and torch.isfinite(change.scale).all()):
        raise PullbackError(
            "A neuron's scale is not usable", "it is not positive and finite", "Use s > 0"
        )
    scale = change.scale.to(layer.weight)
    layer.weight.copy_(_along(layer.weight[order], scale, 0))
    if layer.bias is not None:
        layer.bias.copy_(layer.bias[order] * scale)


def _leave(layer: Layer, change: Neurons, *, flattened: bool) -> None:
    size, inputs = len(change.order), layer.weight.shape[1]
    if inputs % size or (inputs != size and not flattened):
        raise PullbackError(
            "A layer's neurons do not reach the next layer as they are",
            f"{size} of them became {inputs} inputs",
            "Put nn.Flatten between a convolution and a linear layer, nothing else",
        )
    each = inputs // size  # places of a channel after flattening, one after the other
    order = change.order.to(layer.weight.device)
    order = (order[:, None] * each + torch.arange(each, device=order.device)).flatten()
    scale = change.scale.to(layer.weight).repeat_interleave(each)
    layer.weight.copy_(_along(layer.weight[:, order], 1 / scale, 1))


def _along(weight: Tensor, scale: Tensor, dim: int) -> Tensor:
    return weight * scale.view([-1 if i == dim else 1 for i in range(weight.ndim)])
