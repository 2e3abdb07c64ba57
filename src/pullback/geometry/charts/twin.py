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
class ChangeThresholds:
    """Numbers that decide whether a change of basis is usable.

    Attributes:
        relative_error: of a change and its inverse, condition·ε, that is too large.
        smallest_variance: over the largest, of inputs that can be whitened.
    """

    relative_error: float = 1e-2
    smallest_variance: float = 1e-12


THRESHOLDS = ChangeThresholds()


@dataclass(frozen=True)
class Change:
    """An affine change of basis x ↦ Mx + v, with M (n, n) and v (n,)."""

    matrix: Tensor
    shift: Tensor

    @property
    def is_trivial(self) -> bool:
        """Whether nothing changes."""
        eye = torch.eye(len(self.shift), dtype=self.matrix.dtype, device=self.matrix.device)
        return bool((self.matrix == eye).all()) and not bool(self.shift.any())

    def inverse(self) -> Change:
        """x ↦ M⁻¹(x − v); raises where M has none."""
        back, info = torch.linalg.inv_ex(self.matrix)
        eps = torch.finfo(self.matrix.dtype).eps
        condition = torch.linalg.matrix_norm(self.matrix, 1) * torch.linalg.matrix_norm(back, 1)
        if int(info) or not bool(condition * eps < THRESHOLDS.relative_error):
            raise PullbackError(
                "The change of basis is not invertible",
                f"its matrix of side {len(self.shift)} is singular to working precision",
                "Use a matrix of full rank; whiten only inputs that vary in every direction",
            )
        return Change(back, -back @ self.shift)

    def linear(self) -> Change:
        """Without the shift."""
        return Change(self.matrix, torch.zeros_like(self.shift))

    def to(self, other: Tensor) -> Change:
        """Return the change on the device and in the dtype of another tensor."""
        return Change(self.matrix.to(other), self.shift.to(other))


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


def uniform_change(size: int, factor: float, shift: float = 0.0) -> Change:
    """factor·x + shift in every coordinate."""
    return Change(factor * no_change(size).matrix, no_change(size).shift + shift)


def random_change(size: int, generator: torch.Generator, condition: float = 10.0) -> Change:
    """Random, with singular values within a factor `condition` of each other around 1."""
    left = _draw_rotation(size, generator)
    right = _draw_rotation(size, generator)
    values = condition ** (torch.rand(size, dtype=torch.float64, generator=generator) - 0.5)
    shift = torch.randn(size, dtype=torch.float64, generator=generator)
    return Change((left * values) @ right, shift)


def _draw_rotation(size: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(size, size, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(normal)[0]


def make_whitening(x: Tensor, *, centered: bool = True) -> Change:
    """Return coordinates in which the rows of (N, n) have mean zero and covariance 1.

    Not `centered`, the mean stays and E xxᵀ becomes 1: for layers that have no bias to shift.
    """
    x = x.detach().to(torch.float64)
    if centered:
        moments = torch.cov(x.T).reshape(x.shape[1], -1)
    else:
        moments = x.T @ x / len(x)
    if len(x) < 2 or not bool(torch.isfinite(moments).all()):
        moments = torch.zeros_like(moments)
    values, vectors = torch.linalg.eigh(moments)
    if not bool(values[0] > THRESHOLDS.smallest_variance * values[-1]):
        raise PullbackError(
            "The inputs cannot be whitened",
            f"{len(x)} samples do not vary in all {x.shape[1]} directions, or are not finite",
            "Take more samples, or drop inputs that are constant or depend on others",
        )
    root = (vectors * values.rsqrt()) @ vectors.T
    if not centered:
        return Change(root, torch.zeros_like(values))
    return Change(root, -root @ x.mean(0))


@torch.no_grad()
def change_coordinates(layer: _Layer, before: Change, after: Change) -> _Layer:
    """The layer for inputs `before`(a), whose outputs `after` maps back to the old ones.

    A layer without a bias cannot take up shifts: that is left to whoever adds its output.
    """
    changed = copy.deepcopy(layer)
    weight = layer.weight.to(torch.float64)
    before = before.to(weight)
    after = after.to(weight)
    inverse_after = after.inverse().matrix
    new_weight = torch.einsum("po,oi...->pi...", inverse_after, weight)
    new_weight = torch.einsum("pi...,ij->pj...", new_weight, before.inverse().matrix)
    changed.weight.copy_(new_weight)
    if layer.bias is not None:
        assert changed.bias is not None
        response = new_weight  # to a constant input, (out, in)
        if new_weight.ndim > 2:
            response = new_weight.flatten(2).sum(2)
        bias = layer.bias.to(weight) - after.shift
        changed.bias.copy_(inverse_after @ bias - response @ before.shift)
    return changed


def is_layer(module: nn.Module) -> TypeGuard[Layer]:
    """Whether a module is a linear or an ungrouped convolution layer, and no more than that."""
    if isinstance(module, _CONVOLUTIONS):
        return type(module) in _CONVOLUTIONS and module.groups == 1
    return type(module) is nn.Linear


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the layers that can change coordinates, in the order in which the model holds them."""
    return [m for m in model.modules() if is_layer(m)]


def wrap_layer(
    layer: Layer, before: Change, after: Change, *, enter: bool = True, leave: bool = True
) -> nn.Module:
    """[Ω·+γ, layer†, Φ·+τ]: the same function of old coordinates; what does not change is left out.

    Without `enter` or `leave` inputs or outputs are in the new coordinates. Linear layers see
    coordinates along the last axis, convolutions along the channels.
    """
    dim = -1 if isinstance(layer, nn.Linear) else 1
    weight = layer.weight.detach()
    inner: list[nn.Module] = [change_coordinates(layer, before, after)]  # pyright: ignore[reportArgumentType]
    if enter and not before.is_trivial:
        inner.insert(0, AffineMap(before.to(weight), dim))
    if leave and not after.is_trivial:
        inner.append(AffineMap(after.to(weight), dim))
    if len(inner) == 1:
        return inner[0]
    return nn.Sequential(*inner)


def make_twin(
    model: nn.Module, coordinates: LayerCoordinates, activations: dict[int, nn.Module] | None = None
) -> nn.Module:
    """Return the same function in other coordinates; modules between layers belong to φ.

    Inputs and outputs stay in the old coordinates: the first and the last change are applied
    inside. The others are too, unless `activations` compute φ† by themselves: modules by the id of
    those that they replace. An empty dict stands for a φ that commutes with the changes.
    """
    layers = find_layers(model)
    memo = dict[int, object](activations or {})
    refuse_shared(model)
    for layer, (before, after) in zip(layers, coordinates, strict=True):
        memo[id(layer)] = wrap_layer(
            layer,
            before,
            after,
            enter=activations is None or layer is layers[0],
            leave=activations is None or layer is layers[-1],
        )
    # A copy with this memo takes the wrapped layers. A layer that is used twice stays one layer.
    return copy.deepcopy(model, memo)  # pyright: ignore[reportReturnType]


def list_chain(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a (nested) `Sequential` applies one after the other."""
    if isinstance(model, nn.Sequential):
        modules: list[nn.Module] = []
        for child in model:
            modules.extend(list_chain(child))
        return modules
    if is_layer(model) or not any(is_layer(m) for m in model.modules()):
        return [model]
    raise PullbackError(
        "The order of the model's layers is not known",
        f"{type(model).__name__} holds layers in a way of its own",
        "Write the network as an nn.Sequential, or use a transformation that changes layers one by "
        "one (transformations.Affine, Whitening)",
    )


@dataclass(frozen=True)
class HiddenLayer:
    """A layer whose outputs are hidden neurons.

    Attributes:
        layer: that computes them.
        following: the next layer, which reads them.
        between: the modules between the two.
    """

    layer: Layer
    following: Layer
    between: list[nn.Module]


def find_hidden_layers(model: nn.Module) -> list[HiddenLayer]:
    """Return each layer with the next one and what stands between them."""
    modules = list_chain(model)
    positions = [i for i, module in enumerate(modules) if is_layer(module)]
    layers = [modules[i] for i in positions]
    if len(layers) < 2 or len({id(layer) for layer in layers}) < len(layers):
        count = f"{len(layers)} linear and convolution layers in a row"
        if len(layers) > 1:
            count += ", some of them used twice"
        raise PullbackError(
            "The model has no hidden neurons to change",
            f"{type(model).__name__} has {count}",
            "Give an nn.Sequential with at least two layers",
        )
    refuse_shared(model)
    hidden_layers = []
    for i, j in pairwise(positions):
        layer = modules[i]
        following = modules[j]
        assert is_layer(layer)
        assert is_layer(following)
        hidden_layers.append(HiddenLayer(layer, following, modules[i + 1 : j]))
    return hidden_layers


def refuse_shared(model: nn.Module) -> None:
    """Raise where a layer's weight also serves elsewhere: it would have to change in two ways."""
    slots: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            first_name = slots.setdefault(id(p), name)
            if first_name != name:
                raise PullbackError(
                    "A weight is shared by two layers",
                    f"{first_name!r} and {name!r} are one tensor, and each layer has coordinates "
                    "of its own",
                    "Untie them, or use a diffeomorphism of the parameters (`reparametrize`)",
                )


def tanh_twin(model: nn.Module, first: Change | None = None) -> nn.Module:
    """A sigmoid network as a tanh network: tanh(z) = 2σ(2z) − 1, so Φ = 2, Ω = 2 and γ = −1.

    Luk and Grosse (2018) print the two directions swapped. `first` changes the inputs as well.
    """
    return _exchange_activations(model, nn.Sigmoid, nn.Tanh, uniform_change(1, 2.0, -1.0), first)


def sigmoid_twin(model: nn.Module, first: Change | None = None) -> nn.Module:
    """A tanh network as a sigmoid network: σ(z) = ½tanh(z/2) + ½, so Φ = Ω = γ = ½."""
    return _exchange_activations(model, nn.Tanh, nn.Sigmoid, uniform_change(1, 0.5, 0.5), first)


def _exchange_activations(
    model: nn.Module,
    old: type[nn.Module],
    new: type[nn.Module],
    change: Change,
    first: Change | None,
) -> nn.Module:
    """Return the network with new activations φ†(z†) = s φ(s z†) + v, where φ are the old ones.

    Args:
        model: a chain of layers with the old activations between them.
        old, new: the activations.
        change: s and v, of one coordinate.
        first: changes the inputs, too.
    """
    factor = float(change.matrix)
    shift = float(change.shift)
    # Each activation becomes a module of its own, also where one stands in two positions.
    modules: list[nn.Module] = []
    for module in list_chain(model):
        if not is_layer(module):
            module = copy.deepcopy(module)
        modules.append(module)
    model = nn.Sequential(*modules)
    activations: dict[int, nn.Module] = {}
    for hidden in find_hidden_layers(model):
        activation = _require_activation(hidden.between, old)
        activations[id(activation)] = new()
    sizes = [layer.weight.shape for layer in find_layers(model)]
    inputs = [no_change(sizes[0][1]) if first is None else first]
    inputs.extend(uniform_change(size[1], factor, shift) for size in sizes[1:])
    outputs = [uniform_change(size[0], factor) for size in sizes[:-1]]
    outputs.append(no_change(sizes[-1][0]))
    return make_twin(model, list(zip(inputs, outputs, strict=True)), activations)


def _require_activation(modules: Sequence[nn.Module], expected: type[nn.Module]) -> nn.Module:
    """Return the one activation between two layers; raise unless it is of the expected type."""
    activations = [module for module in modules if not isinstance(module, nn.Flatten)]
    if [type(module) for module in activations] != [expected]:
        raise PullbackError(
            f"The network is no {expected.__name__} network",
            f"between two layers stands {[type(module).__name__ for module in modules]}",
            f"Put exactly one nn.{expected.__name__} between the layers",
        )
    return activations[0]
