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
class _Limits:
    """What counts as singular."""

    #: the relative error cond(M)·ε of M⁻¹ above which M counts as singular: its inverse would have
    #: fewer than two correct digits
    inverse_error: float = 1e-2
    #: smallest over largest variance of inputs that can be whitened. Its root, 10⁻⁶, is the ratio
    #: of lengths below which float32 inputs vary by round-off alone.
    variance_ratio: float = 1e-12


_LIMITS = _Limits()


@dataclass(frozen=True)
class AffineChange:
    """A change of coordinates x ↦ Mx + v, with M (n, n) and v (n,)."""

    matrix: Tensor
    shift: Tensor

    @property
    def is_identity(self) -> bool:
        """True if M = 1 and v = 0."""
        eye = torch.eye(len(self.shift), dtype=self.matrix.dtype, device=self.matrix.device)
        return bool((self.matrix == eye).all()) and not bool(self.shift.any())

    def inverse(self) -> AffineChange:
        """Return x ↦ M⁻¹(x − v); raise if M is singular to working precision."""
        inverse, info = torch.linalg.inv_ex(self.matrix)
        eps = torch.finfo(self.matrix.dtype).eps
        condition = torch.linalg.matrix_norm(self.matrix, 1) * torch.linalg.matrix_norm(inverse, 1)
        if int(info) or not bool(condition * eps < _LIMITS.inverse_error):
            raise PullbackError(
                "The change of basis is not invertible",
                f"its matrix of side {len(self.shift)} is singular to working precision",
                "Use a matrix of full rank; whiten only inputs that vary in every direction",
            )
        return AffineChange(inverse, -inverse @ self.shift)

    def without_shift(self) -> AffineChange:
        """Return x ↦ Mx."""
        return AffineChange(self.matrix, torch.zeros_like(self.shift))

    def to(self, template: Tensor) -> AffineChange:
        """Return the change on the device and in the dtype of a tensor."""
        return AffineChange(self.matrix.to(template), self.shift.to(template))


@dataclass(frozen=True)
class LayerCoordinates:
    """The coordinates of one layer z = Wa + b in a twin, z† = W†a† + b†.

    Attributes:
        to_new_inputs: a ↦ a† = Ωa + γ.
        to_old_outputs: z† ↦ z = Φz† + τ.
    """

    to_new_inputs: AffineChange
    to_old_outputs: AffineChange

    def inverse(self) -> LayerCoordinates:
        """Return the coordinates of the original seen from the twin."""
        return LayerCoordinates(self.to_new_inputs.inverse(), self.to_old_outputs.inverse())


class AffineMap(nn.Module):
    """Mx + v along one axis, without parameters."""

    matrix: Tensor
    shift: Tensor

    def __init__(self, change: AffineChange, dim: int = 1) -> None:
        super().__init__()
        self.register_buffer("matrix", change.matrix)
        self.register_buffer("shift", change.shift)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Change the coordinates of (..., n, ...) along the axis `dim`."""
        return (x.movedim(self.dim, -1) @ self.matrix.mT + self.shift).movedim(-1, self.dim)


def make_identity(size: int) -> AffineChange:
    """Return x ↦ x for x (size,)."""
    matrix = torch.eye(size, dtype=torch.float64)
    return AffineChange(matrix, torch.zeros(size, dtype=torch.float64))


def make_scaling(size: int, scale: float, shift: float = 0.0) -> AffineChange:
    """Return scale·x + shift in every coordinate."""
    identity = make_identity(size)
    return AffineChange(scale * identity.matrix, identity.shift + shift)


def draw_change(size: int, generator: torch.Generator, condition: float = 10.0) -> AffineChange:
    """Return a random change with singular values between condition^−½ and condition^½."""
    left = torch.linalg.qr(_draw_normal(generator, size, size)).Q
    right = torch.linalg.qr(_draw_normal(generator, size, size)).Q
    sigma = condition ** (torch.rand(size, dtype=torch.float64, generator=generator) - 0.5)
    return AffineChange((left * sigma) @ right, _draw_normal(generator, size))


def _draw_normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def find_whitening(x: Tensor, *, centered: bool = True) -> AffineChange:
    """Return coordinates in which the rows of (N, n) have mean zero and covariance 1.

    Not `centered`, the mean stays and E xxᵀ becomes 1: for layers that have no bias to shift.
    """
    x = x.detach().to(torch.float64)
    if centered:
        moments = torch.cov(x.T).reshape(x.shape[1], -1)
    else:
        moments = x.T @ x / len(x)
    if len(x) < 2 or not bool(torch.isfinite(moments).all()):
        moments = torch.zeros_like(moments)  # which are refused below
    eigenvalues, eigenvectors = torch.linalg.eigh(moments)
    if not bool(eigenvalues[0] > _LIMITS.variance_ratio * eigenvalues[-1]):
        raise PullbackError(
            "The inputs cannot be whitened",
            f"{len(x)} samples do not vary in all {x.shape[1]} directions, or are not finite",
            "Take more samples, or drop inputs that are constant or depend on others",
        )
    inverse_root = (eigenvectors * eigenvalues.rsqrt()) @ eigenvectors.T
    if centered:
        return AffineChange(inverse_root, -inverse_root @ x.mean(0))
    return AffineChange(inverse_root, torch.zeros_like(eigenvalues))


@torch.no_grad()
def change_coordinates(
    layer: _Layer, to_new_inputs: AffineChange, to_old_outputs: AffineChange
) -> _Layer:
    """Return the layer† for inputs a† = Ωa + γ and outputs z† with z = Φz† + τ.

    A layer without a bias cannot take up shifts: that is left to whoever adds its output.
    """
    changed = copy.deepcopy(layer)
    old_weight = layer.weight.to(torch.float64)
    to_new_inputs = to_new_inputs.to(old_weight)
    to_old_outputs = to_old_outputs.to(old_weight)
    to_new_outputs = to_old_outputs.inverse().matrix
    weight = torch.einsum("po,oi...->pi...", to_new_outputs, old_weight)
    weight = torch.einsum("pi...,ij->pj...", weight, to_new_inputs.inverse().matrix)
    changed.weight.copy_(weight)
    if layer.bias is not None:
        assert changed.bias is not None
        # a shift is the same at every position, so that a kernel's offsets add up
        summed_kernel = weight
        if weight.ndim > 2:
            summed_kernel = weight.flatten(2).sum(2)
        bias = to_new_outputs @ (layer.bias.to(old_weight) - to_old_outputs.shift)
        changed.bias.copy_(bias - summed_kernel @ to_new_inputs.shift)
    return changed


def is_layer(module: nn.Module) -> TypeGuard[Layer]:
    """Return True for linear and ungrouped convolution layers, but not for their subclasses."""
    if isinstance(module, _CONVOLUTIONS):
        return type(module) in _CONVOLUTIONS and module.groups == 1
    return type(module) is nn.Linear


def list_layers(model: nn.Module) -> list[Layer]:
    """Return the layers that can change coordinates, in the order of `model.modules()`."""
    return [m for m in model.modules() if is_layer(m)]


def _wrap_layer(
    layer: Layer, coordinates: LayerCoordinates, *, old_inputs: bool, old_outputs: bool
) -> nn.Module:
    """Return layer†, with changes before and after it if it is to see old coordinates there.

    A change that is the identity is left out. Linear layers see coordinates along the last axis,
    convolutions along the channels.
    """
    dim = -1 if isinstance(layer, nn.Linear) else 1
    to_new_inputs = coordinates.to_new_inputs
    to_old_outputs = coordinates.to_old_outputs
    template = layer.weight.detach()
    modules: list[nn.Module] = []
    if old_inputs and not to_new_inputs.is_identity:
        modules.append(AffineMap(to_new_inputs.to(template), dim))
    modules.append(change_coordinates(layer, to_new_inputs, to_old_outputs))  # pyright: ignore[reportArgumentType]
    if old_outputs and not to_old_outputs.is_identity:
        modules.append(AffineMap(to_old_outputs.to(template), dim))
    if len(modules) == 1:
        return modules[0]
    return nn.Sequential(*modules)


def make_twin(
    model: nn.Module,
    coordinates: Sequence[LayerCoordinates],
    activations: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Return the same function in other coordinates, one for each of `list_layers(model)`.

    Inputs and outputs of the model stay in the old coordinates: the first and the last change are
    applied inside.

    Args:
        model: is copied.
        coordinates: of each layer.
        activations: what computes φ†(z†) = Ωφ(Φz† + τ) + γ between the layers, by the id of the
            module that it replaces. An empty dict stands for a φ that commutes with the changes.
            Without it each layer changes back and forth, and what lies between stays as it is.
    """
    layers = list_layers(model)
    refuse_shared_weights(model)
    replacements = dict[int, object](activations or {})
    for layer, layer_coordinates in zip(layers, coordinates, strict=True):
        replacements[id(layer)] = _wrap_layer(
            layer,
            layer_coordinates,
            old_inputs=activations is None or layer is layers[0],
            old_outputs=activations is None or layer is layers[-1],
        )
    # As deepcopy's memo, replacements are taken for copies that exist already. A layer that is
    # used twice stays one layer.
    return copy.deepcopy(model, replacements)  # pyright: ignore[reportReturnType]


def list_sequence(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a (nested) `Sequential` applies one after the other."""
    if isinstance(model, nn.Sequential):
        modules: list[nn.Module] = []
        for child in model:
            modules += list_sequence(child)
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
class HiddenUnits:
    """The neurons between two layers that follow each other.

    Attributes:
        writer: the layer whose outputs they are.
        reader: the next layer.
        between: the modules between both, such as an activation.
    """

    writer: Layer
    reader: Layer
    between: list[nn.Module]


def list_hidden_units(model: nn.Module) -> list[HiddenUnits]:
    """Return the hidden neurons of a `Sequential`, from the first pair of layers to the last."""
    modules = list_sequence(model)
    indices = [i for i, m in enumerate(modules) if is_layer(m)]
    distinct = {id(modules[i]) for i in indices}
    if len(indices) < 2 or len(distinct) < len(indices):
        why = f"{type(model).__name__} has {len(indices)} linear and convolution layers in a row"
        if len(indices) > 1:
            why += ", some of them used twice"
        raise PullbackError(
            "The model has no hidden neurons to change",
            why,
            "Give an nn.Sequential with at least two layers",
        )
    refuse_shared_weights(model)
    return [
        HiddenUnits(modules[i], modules[j], modules[i + 1 : j])  # pyright: ignore[reportArgumentType]
        for i, j in pairwise(indices)
    ]


def refuse_shared_weights(model: nn.Module) -> None:
    """Raise if two layers have one weight: it would have to change in two ways.

    One layer that is used twice is allowed.
    """
    first_names: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            first_name = first_names.setdefault(id(p), name)
            if first_name != name:
                raise PullbackError(
                    "A weight is shared by two layers",
                    f"{first_name!r} and {name!r} are one tensor, and each layer has coordinates "
                    "of its own",
                    "Untie them, or use a diffeomorphism of the parameters (`reparametrize`)",
                )


def tanh_twin(model: nn.Module, first: AffineChange | None = None) -> nn.Module:
    """Return a sigmoid network as a tanh network: tanh(z) = 2σ(2z) − 1, so Φ = Ω = 2 and γ = −1.

    Luk and Grosse (2018) print the two directions swapped. `first` changes the inputs as well.
    """
    return _replace_activations(model, _Replacement(nn.Sigmoid, nn.Tanh, 2.0, -1.0), first)


def sigmoid_twin(model: nn.Module, first: AffineChange | None = None) -> nn.Module:
    """Return a tanh network as a sigmoid network: σ(z) = ½tanh(z/2) + ½, so Φ = Ω = γ = ½."""
    return _replace_activations(model, _Replacement(nn.Tanh, nn.Sigmoid, 0.5, 0.5), first)


@dataclass(frozen=True)
class _Replacement:
    """new(z) = scale·old(scale·z) + shift, for two activation functions."""

    old: type[nn.Module]
    new: type[nn.Module]
    scale: float
    shift: float


def _replace_activations(
    model: nn.Module, replacement: _Replacement, first: AffineChange | None
) -> nn.Module:
    """Return the twin of a network of `old` activations that has `new` ones."""
    # every activation becomes a module of its own, also one that stands in two places
    modules = [m if is_layer(m) else copy.deepcopy(m) for m in list_sequence(model)]
    model = nn.Sequential(*modules)
    activations: dict[int, nn.Module] = {}
    for units in list_hidden_units(model):
        activation = _find_only_activation(units, replacement.old)
        activations[id(activation)] = replacement.new()
    coordinates = _list_scaled_coordinates(model, replacement, first)
    return make_twin(model, coordinates, activations)


def _find_only_activation(units: HiddenUnits, kind: type[nn.Module]) -> nn.Module:
    """Return the activation between two layers; raise unless it is one, of this kind."""
    activations = [m for m in units.between if not isinstance(m, nn.Flatten)]
    if [type(m) for m in activations] == [kind]:
        return activations[0]
    raise PullbackError(
        f"The network is no {kind.__name__} network",
        f"between two layers stands {[type(m).__name__ for m in units.between]}",
        f"Put exactly one nn.{kind.__name__} between the layers",
    )


def _list_scaled_coordinates(
    model: nn.Module, replacement: _Replacement, first: AffineChange | None
) -> list[LayerCoordinates]:
    """Return coordinates in which hidden neurons are scaled, and the inputs change by `first`."""
    layers = list_layers(model)
    coordinates: list[LayerCoordinates] = []
    for layer in layers:
        outputs, inputs = layer.weight.shape[:2]
        to_new_inputs = make_scaling(inputs, replacement.scale, replacement.shift)
        if layer is layers[0]:
            to_new_inputs = first or make_identity(inputs)
        to_old_outputs = make_scaling(outputs, replacement.scale)
        if layer is layers[-1]:
            to_old_outputs = make_identity(outputs)
        coordinates.append(LayerCoordinates(to_new_inputs, to_old_outputs))
    return coordinates
