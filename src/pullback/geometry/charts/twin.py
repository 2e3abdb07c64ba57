"""Affine coordinates of activations and pre-activations, and layers in them.

With coordinates a† = Ωa + γ of activations and z = Φz† + τ of pre-activations, a layer
z = Wa + b becomes z† = W†a† + b† with

    W† = Φ⁻¹ W Ω⁻¹,    b† = Φ⁻¹(b − τ) − W†γ,

and the activation function φ becomes φ†(z†) = Ωφ(Φz† + τ) + γ. Convolutions change channels.
Luk and Grosse (2018) print z = Φz in place of z = Φz† + τ; the formulas above build the network.

A twin is the same network in such coordinates, with weights of its own. Its layers remain `Linear`
and `Conv` layers, whatever module holds them, so methods that know layers (K-FAC) treat both alike.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_Layer = TypeVar("_Layer", nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Change:
    """An affine change of basis x ↦ Mx + v, with M (n, n) and v (n,)."""

    matrix: Tensor
    shift: Tensor

    @property
    def trivial(self) -> bool:
        """Whether nothing changes."""
        eye = torch.eye(len(self.shift), dtype=self.matrix.dtype, device=self.matrix.device)
        return bool((self.matrix == eye).all()) and not bool(self.shift.any())

    def inverse(self) -> Change:
        """x ↦ M⁻¹(x − v); raises where M has none."""
        back, info = torch.linalg.inv_ex(self.matrix)
        eps = torch.finfo(self.matrix.dtype).eps
        size = torch.linalg.matrix_norm(self.matrix, 1) * torch.linalg.matrix_norm(back, 1)
        if int(info) or not bool(size * eps < 1e-2):
            raise PullbackError(
                "The change of basis is not invertible",
                f"its matrix of side {len(self.shift)} is singular to working precision",
                "Use a matrix of full rank; whiten only inputs that vary in every direction",
            )
        return Change(back, -back @ self.shift)

    def linear(self) -> Change:
        """Without the shift."""
        return Change(self.matrix, torch.zeros_like(self.shift))

    def to(self, like: Tensor) -> Change:
        """On the device and in the dtype of a tensor."""
        return Change(self.matrix.to(like), self.shift.to(like))


#: Ω, γ of every layer's input and Φ, τ of its output
LayerCoordinates = Sequence[tuple[Change, Change]]


class AffineMap(nn.Module):
    """Mx + v along one axis, without parameters."""

    matrix: Tensor
    shift: Tensor

    def __init__(self, change: Change, dim: int = 1) -> None:
        super().__init__()
        self.register_buffer("matrix", change.matrix)
        self.register_buffer("shift", change.shift)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Change the basis of (..., n, ...)."""
        return (x.movedim(self.dim, -1) @ self.matrix.mT + self.shift).movedim(-1, self.dim)


def no_change(size: int) -> Change:
    """No change."""
    return Change(torch.eye(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64))


def scaling(size: int, by: float, shift: float = 0.0) -> Change:
    """by·x + shift in every coordinate."""
    return Change(by * no_change(size).matrix, no_change(size).shift + shift)


def random_change(size: int, generator: torch.Generator, condition: float = 10.0) -> Change:
    """Random, with singular values within a factor `condition` of each other around 1."""
    left, right = (
        torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
        for _ in range(2)
    )
    values = condition ** (torch.rand(size, dtype=torch.float64, generator=generator) - 0.5)
    shift = torch.randn(size, dtype=torch.float64, generator=generator)
    return Change((left * values) @ right, shift)


def whitening(x: Tensor, *, centered: bool = True) -> Change:
    """Coordinates in which the rows of (N, n) have mean zero and covariance 1.

    Not `centered`, the mean stays and E xxᵀ becomes 1: for layers that have no bias to shift.
    """
    x = x.detach().to(torch.float64)
    moments = torch.cov(x.T).reshape(x.shape[1], -1) if centered else x.T @ x / len(x)
    sound = len(x) > 1 and bool(torch.isfinite(moments).all())
    values, vectors = torch.linalg.eigh(moments if sound else torch.zeros_like(moments))
    if not bool(values[0] > 1e-12 * values[-1]):
        raise PullbackError(
            "The inputs cannot be whitened",
            f"{len(x)} samples do not vary in all {x.shape[1]} directions, or are not finite",
            "Take more samples, or drop inputs that are constant or depend on others",
        )
    root = (vectors * values.rsqrt()) @ vectors.T
    return Change(root, -root @ x.mean(0) if centered else torch.zeros_like(values))


@torch.no_grad()
def change_coordinates(layer: _Layer, before: Change, after: Change) -> _Layer:
    """The layer for inputs `before`(a), whose outputs `after` maps back to the old ones.

    A layer without a bias cannot take up shifts: that is left to whoever adds its output.
    """
    out, wide = copy.deepcopy(layer), layer.weight.to(torch.float64)
    before, after = before.to(wide), after.to(wide)
    back = after.inverse().matrix
    weight = torch.einsum("po,oi...->pi...", back, wide)
    weight = torch.einsum("pi...,ij->pj...", weight, before.inverse().matrix)
    out.weight.copy_(weight)
    if layer.bias is not None:
        assert out.bias is not None
        taps = weight.flatten(2).sum(2) if weight.ndim > 2 else weight
        bias = layer.bias.to(wide) - after.shift
        out.bias.copy_(back @ bias - taps @ before.shift)
    return out


def is_layer(module: nn.Module) -> TypeGuard[Layer]:
    """Whether a module is a linear or an ungrouped convolution layer, and no more than that."""
    if isinstance(module, _CONVOLUTIONS):
        return type(module) in _CONVOLUTIONS and module.groups == 1
    return type(module) is nn.Linear


def layers(model: nn.Module) -> list[Layer]:
    """The layers that can change coordinates, in the order in which the model holds them."""
    return [m for m in model.modules() if is_layer(m)]


def wrap_layer(
    layer: Layer, before: Change, after: Change, *, enter: bool = True, leave: bool = True
) -> nn.Module:
    """[Ω·+γ, layer†, Φ·+τ]: the same function of old coordinates; what does not change is left out.

    Without `enter` or `leave` inputs or outputs are in the new coordinates. Linear layers see
    coordinates along the last axis, convolutions along the channels.
    """
    dim = -1 if isinstance(layer, nn.Linear) else 1
    like = layer.weight.detach()
    inner: list[nn.Module] = [change_coordinates(layer, before, after)]  # pyright: ignore[reportArgumentType]
    if enter and not before.trivial:
        inner.insert(0, AffineMap(before.to(like), dim))
    if leave and not after.trivial:
        inner.append(AffineMap(after.to(like), dim))
    return inner[0] if len(inner) == 1 else nn.Sequential(*inner)


def twin(
    model: nn.Module, to: LayerCoordinates, activations: dict[int, nn.Module] | None = None
) -> nn.Module:
    """The same function in other coordinates; what lies between layers belongs to φ.

    Inputs and outputs stay in the old coordinates: the first and the last change are applied
    inside. The others are too, unless `activations` compute φ† by themselves: modules by the id of
    those that they replace. An empty dict stands for a φ that commutes with the changes.
    """
    found, memo = layers(model), dict[int, object](activations or {})
    refuse_shared(model)
    for layer, (before, after) in zip(found, to, strict=True):
        memo[id(layer)] = wrap_layer(
            layer,
            before,
            after,
            enter=activations is None or layer is found[0],
            leave=activations is None or layer is found[-1],
        )
    # a copy finds the layers already copied; one that is used in two places stays one layer
    return copy.deepcopy(model, memo)  # pyright: ignore[reportReturnType]


def chain(model: nn.Module) -> list[nn.Module]:
    """The modules that a (nested) `Sequential` applies one after the other."""
    if isinstance(model, nn.Sequential):
        return [m for child in model for m in chain(child)]
    if is_layer(model) or not any(is_layer(m) for m in model.modules()):
        return [model]
    raise PullbackError(
        "The order of the model's layers is not known",
        f"{type(model).__name__} holds layers in a way of its own",
        "Write the network as an nn.Sequential, or use a transformation that changes layers one by "
        "one (transformations.Affine, Whitening)",
    )


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


def refuse_shared(model: nn.Module) -> None:
    """Raise where a layer's weight also serves elsewhere: it would have to change in two ways."""
    slots: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            before = slots.setdefault(id(p), name)
            if before != name:
                raise PullbackError(
                    "A weight is shared by two layers",
                    f"{before!r} and {name!r} are one tensor, and each layer has coordinates "
                    "of its own",
                    "Untie them, or use a diffeomorphism of the parameters (`reparametrize`)",
                )


def tanh_twin(model: nn.Module, first: Change | None = None) -> nn.Module:
    """A sigmoid network as a tanh network: tanh(z) = 2σ(2z) − 1, so Φ = 2, Ω = 2 and γ = −1.

    Luk and Grosse (2018) print the two directions swapped. `first` changes the inputs as well.
    """
    return _replace_activations(model, nn.Sigmoid, nn.Tanh, 2.0, -1.0, first)


def sigmoid_twin(model: nn.Module, first: Change | None = None) -> nn.Module:
    """A tanh network as a sigmoid network: σ(z) = ½tanh(z/2) + ½, so Φ = Ω = γ = ½."""
    return _replace_activations(model, nn.Tanh, nn.Sigmoid, 0.5, 0.5, first)


def _replace_activations(
    model: nn.Module,
    old: type[nn.Module],
    new: type[nn.Module],
    by: float,
    shift: float,
    first: Change | None,
) -> nn.Module:
    """φ†(z†) = by·φ(by·z†) + shift is `new`, where φ is `old`."""
    # with activations of their own, also where one module stands in two places
    model = nn.Sequential(*(m if is_layer(m) else copy.deepcopy(m) for m in chain(model)))
    activations: dict[int, nn.Module] = {}
    for *_, between in hidden(model):
        if [type(m) for m in between if not isinstance(m, nn.Flatten)] != [old]:
            raise PullbackError(
                f"The network is no {old.__name__} network",
                f"between two layers stands {[type(m).__name__ for m in between]}",
                f"Put exactly one nn.{old.__name__} between the layers",
            )
        activations |= {id(m): new() for m in between if isinstance(m, old)}
    sizes = [m.weight.shape for m in layers(model)]
    start = no_change(sizes[0][1]) if first is None else first
    inputs = [start, *(scaling(s[1], by, shift) for s in sizes[1:])]
    outputs = [*(scaling(s[0], by) for s in sizes[:-1]), no_change(sizes[-1][0])]
    return twin(model, list(zip(inputs, outputs, strict=True)), activations)
