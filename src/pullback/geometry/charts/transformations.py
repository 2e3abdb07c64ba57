"""Transformations of a model that keep its function, which an audit tries one by one.

Each gives a *twin*: a module with parameters θ of its own and w = f(θ), so ψ = φ∘f at θ₀ = f⁻¹(w₀).
Changes of activations and of neurons give ordinary networks of `Linear` and `Conv` layers; a
diffeomorphism of the parameters gives a `Reparametrized` module, in which no layer has a weight of
its own.

Neurons in another order or on another scale, a† = M a with a permutation M or a diagonal M > 0, are
affine coordinates with which φ commutes: permutations go with every activation that acts by entry,
scales with ReLU and other positively homogeneous ones.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError, require
from .diffeomorphism import Diffeomorphism, EntryPermutation, Params, cubic
from .reparametrize import Reparametrized, reparametrize
from .twin import (
    AffineChange,
    HiddenUnits,
    Layer,
    LayerCoordinates,
    change_coordinates,
    draw_change,
    find_whitening,
    list_hidden_units,
    list_layers,
    make_identity,
    make_twin,
)

#: modules with φ(sz) = sφ(z) for s > 0 by channel
POSITIVELY_HOMOGENEOUS: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.Dropout,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.Upsample,
)  # fmt: skip
#: modules with φ(Pz) = Pφ(z) for permutations P of the channels
PERMUTATION_EQUIVARIANT: tuple[type[nn.Module], ...] = (
    *POSITIVELY_HOMOGENEOUS,
    nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU,
    nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid,
    nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold,
)  # fmt: skip


def make_neuron_coordinates(
    model: nn.Module, draw_matrix: Callable[[int], Tensor], commuting: Sequence[type[nn.Module]]
) -> list[LayerCoordinates]:
    """Return coordinates a† = M a of each hidden layer's n neurons, with M = draw_matrix(n).

    What stands between two layers must be one of the commuting modules, φ(Mz) = Mφ(z).
    """
    hidden_layers = list_hidden_units(model)
    input_count = hidden_layers[0].writer.weight.shape[1]
    output_count = hidden_layers[-1].reader.weight.shape[0]
    to_new_inputs = [make_identity(input_count)]
    to_old_outputs = list[AffineChange]()
    for units in hidden_layers:
        _refuse_others(units, commuting)
        entries_per_neuron = _count_entries_per_neuron(units)
        matrix = draw_matrix(units.writer.weight.shape[0])
        to_old_outputs.append(_as_change(torch.linalg.inv(matrix)))
        # after flattening, a channel's positions are inputs one after the other
        positions = torch.eye(entries_per_neuron, dtype=matrix.dtype)
        to_new_inputs.append(_as_change(torch.kron(matrix, positions)))
    to_old_outputs.append(make_identity(output_count))
    pairs = zip(to_new_inputs, to_old_outputs, strict=True)
    return [LayerCoordinates(inputs, outputs) for inputs, outputs in pairs]


def _as_change(matrix: Tensor) -> AffineChange:
    return AffineChange(matrix, matrix.new_zeros(len(matrix)))


def _refuse_others(units: HiddenUnits, commuting: Sequence[type[nn.Module]]) -> None:
    """Raise if a module between two layers is not one of these."""
    for module in units.between:
        if type(module) in commuting:
            continue
        remedy = "Use activations that act by entry"
        if commuting is POSITIVELY_HOMOGENEOUS:
            remedy = "Use ReLU or another positively homogeneous activation"
        raise PullbackError(
            "The model's neurons cannot be changed",
            f"{type(module).__name__} between two layers does not commute with it",
            remedy,
        )


def _count_entries_per_neuron(units: HiddenUnits) -> int:
    """Return how many inputs of the reader a neuron becomes: more than one after flattening."""
    neurons = units.writer.weight.shape[0]
    inputs = units.reader.weight.shape[1]
    is_flattened = any(isinstance(module, nn.Flatten) for module in units.between)
    if inputs % neurons or (inputs != neurons and not is_flattened):
        raise PullbackError(
            "A layer's neurons do not reach the next layer as they are",
            f"{neurons} of them became {inputs} inputs",
            "Put nn.Flatten between a convolution and a linear layer, nothing else",
        )
    return inputs // neurons


@dataclass(frozen=True)
class Twin:
    """A model's twin.

    Attributes:
        model: ψ, with its own parameters θ.
        weights: w = f(θ) of (a copy of) the twin, trained parameters by the original's names.
        push: (θ, v) ↦ df_θ v, by the twin's and the original's names; None where f is affine.
    """

    model: nn.Module
    weights: Callable[[nn.Module], Params]
    push: Callable[[Params, Params], Params] | None = None


class Transformation(ABC):
    """A way to make a twin.

    Attributes:
        name: as tables show it.
        about: what changes, in one line.
    """

    name: str
    about: str

    @abstractmethod
    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        """The twin of a model; x are inputs, for transformations that depend on them."""

    def __repr__(self) -> str:
        return f"<{self.name}: {self.about}>"


class Affine(Transformation):
    """Random Ω, γ of each layer's input and Φ, τ of its output, of condition at most `condition`.

    Shifts are left out where the function would change: of layers without a bias, and of the
    inputs of zero-padded convolutions, since the padding would have to be γ.
    """

    name = "per-layer affine"
    about = "a† = Ωa + γ and z = Φz† + τ in every layer"

    def __init__(self, seed: int = 0, condition: float = 10.0) -> None:
        self.seed = seed
        self.condition = condition

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)
        coordinates = list[LayerCoordinates]()
        for layer in _require_layers(model):
            outputs, inputs = layer.weight.shape[:2]
            to_new_inputs = draw_change(inputs, generator, self.condition)
            to_old_outputs = draw_change(outputs, generator, self.condition)
            if not _can_absorb_input_shift(layer):
                to_new_inputs = to_new_inputs.without_shift()
            if layer.bias is None:
                to_old_outputs = to_old_outputs.without_shift()
            coordinates.append(LayerCoordinates(to_new_inputs, to_old_outputs))
        return _make_affine_twin(model, coordinates)


class Whitening(Transformation):
    """The first layer sees inputs of mean zero and covariance 1 (over x, and over positions).

    Without a bias, or with zero padding, the mean stays and the second moment is 1.
    """

    name = "input whitening"
    about = "the inputs' covariance becomes 1"

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        layers = _require_layers(model)
        first, layer_input = _find_first_layer(model, x)
        if not isinstance(first, nn.Linear):
            layer_input = layer_input.movedim(1, -1)
        rows = layer_input.reshape(-1, layer_input.shape[-1])
        whitening = find_whitening(rows, centered=_can_absorb_input_shift(first))
        coordinates = list[LayerCoordinates]()
        for layer in layers:
            outputs, inputs = layer.weight.shape[:2]
            to_new_inputs = whitening if layer is first else make_identity(inputs)
            coordinates.append(LayerCoordinates(to_new_inputs, make_identity(outputs)))
        return _make_affine_twin(model, coordinates)


class Rotation(Transformation):
    """Orthogonal Ω of the first layer's input, or of every layer's with an orthogonal Φ."""

    def __init__(self, seed: int = 0, *, in_every_layer: bool = False) -> None:
        self.seed = seed
        self.in_every_layer = in_every_layer
        if in_every_layer:
            self.name = "per-layer rotation"
            self.about = "a† = Ωa with ΩᵀΩ = 1, z = Φz† in every layer"
        else:
            self.name = "input rotation"
            self.about = "a† = Ωa with ΩᵀΩ = 1, in the first layer"

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)
        layers = _require_layers(model)
        first, _ = _find_first_layer(model, x)
        to_new_inputs = list[AffineChange]()
        for layer in layers:
            is_rotated = self.in_every_layer or layer is first
            to_new_inputs.append(_draw_rotation(layer.weight.shape[1], generator, is_rotated))
        to_old_outputs = [
            _draw_rotation(layer.weight.shape[0], generator, self.in_every_layer)
            for layer in layers
        ]
        pairs = zip(to_new_inputs, to_old_outputs, strict=True)
        return _make_affine_twin(model, [LayerCoordinates(*pair) for pair in pairs])


def _draw_rotation(size: int, generator: torch.Generator, is_rotated: bool) -> AffineChange:
    """Return a random orthogonal change, or the identity."""
    if is_rotated:
        return draw_change(size, generator, condition=1.0).without_shift()
    return make_identity(size)


class NeuronRescaling(Transformation):
    """Hidden neurons times s = e^u with u uniform in ±`spread`, undone by the next layer."""

    name = "neuron rescaling"
    about = "a†_i = s_i a_i with s > 0, in ReLU networks"

    def __init__(self, seed: int = 0, spread: float = 1.5) -> None:
        self.seed = seed
        self.spread = spread

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)

        def draw_scales(n: int) -> Tensor:
            u = 2 * torch.rand(n, generator=generator, dtype=torch.float64) - 1
            return (self.spread * u).exp().diag()

        coordinates = make_neuron_coordinates(model, draw_scales, POSITIVELY_HOMOGENEOUS)
        return _make_affine_twin(model, coordinates, {})


class NeuronPermutation(Transformation):
    """Hidden neurons in a random order."""

    name = "neuron permutation"
    about = "rows and the next layer's columns in another order"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)

        def draw_permutation(n: int) -> Tensor:
            return make_identity(n).matrix[torch.randperm(n, generator=generator)]

        coordinates = make_neuron_coordinates(model, draw_permutation, PERMUTATION_EQUIVARIANT)
        return _make_affine_twin(model, coordinates, {})


class Parameters(Transformation):
    """w = f(θ) for a diffeomorphism of all parameters, or what `reparametrize` takes for one."""

    def __init__(self, f: Any, name: str | None = None, about: str | None = None) -> None:
        self.f = f
        self.name = name or getattr(f, "__name__", None) or type(f).__name__
        self.about = about or "w = f(θ)"

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        reparametrized = reparametrize(model, self.f)
        return Twin(reparametrized, Reparametrized.weights, reparametrized.push)  # pyright: ignore[reportArgumentType]


def standard(seed: int = 0) -> list[Transformation]:
    """Return the eight transformations that an audit runs through by default."""
    return [
        Rotation(seed),
        Whitening(),
        Rotation(seed, in_every_layer=True),
        Affine(seed),
        NeuronRescaling(seed),
        NeuronPermutation(seed),
        Parameters(EntryPermutation(seed), "entry permutation", "each tensor's entries reordered"),
        Parameters(cubic(), "elementwise", "w = θ + θ³"),
    ]


def as_transformation(transformation: Any, name: str | None = None) -> Transformation:
    """Return the transformation itself, or `Parameters` of a diffeomorphism under this name."""
    if isinstance(transformation, Transformation):
        return transformation
    is_diffeomorphism = isinstance(transformation, (Diffeomorphism, tuple))
    remedy = "Give a Transformation or a Diffeomorphism"
    require(is_diffeomorphism, "The transformation", transformation, remedy)
    return Parameters(transformation, name)


def _require_layers(model: nn.Module) -> list[Layer]:
    """Return the layers that can change coordinates; raise if there are none."""
    layers = list_layers(model)
    if not layers:
        raise PullbackError(
            "The model has no layers to transform",
            f"{type(model).__name__} has no linear and no ungrouped convolution layer",
            "Use a diffeomorphism of the parameters instead (transformations.Parameters)",
        )
    return layers


def _can_absorb_input_shift(layer: Layer) -> bool:
    """Return True if the bias can take up a shift of the inputs: there is one, and no zero padding.

    A shift of padded inputs would have to shift the padding as well.
    """
    if layer.bias is None:
        return False
    if isinstance(layer, nn.Linear):
        return True
    is_padded = layer.padding == "same" or (layer.padding != "valid" and any(layer.padding))
    return not is_padded or layer.padding_mode != "zeros"


def _find_first_layer(model: nn.Module, x: Tensor) -> tuple[Layer, Tensor]:
    """Return the layer that is called first for inputs x, and what it sees."""
    trial = copy.deepcopy(model)  # whose buffers may change
    calls: list[tuple[int, Tensor]] = []
    for index, layer in enumerate(list_layers(trial)):
        layer.register_forward_pre_hook(
            lambda _, args, index=index: calls.append((index, args[0].detach()))  # pyright: ignore[reportArgumentType]
        )
    with torch.no_grad():
        trial(x)
    if not calls:
        raise PullbackError(
            "The model has no first layer",
            "none of its linear and convolution layers was called",
            "Call layers as modules: their hooks must run",
        )
    first_index, layer_input = calls[0]
    return list_layers(model)[first_index], layer_input


def _make_affine_twin(
    model: nn.Module,
    coordinates: Sequence[LayerCoordinates],
    activations: dict[int, nn.Module] | None = None,
) -> Twin:
    """Return the twin of `make_twin` with w = f(θ), which undoes the changes."""
    names = [name for name, _ in model.named_parameters()]

    def find_original_weights(twin: nn.Module) -> Params:
        """Return W = ΦW†Ω and b = Φ(b† + W†γ) + τ by the original's names."""
        originals: dict[int, Tensor] = {}
        for layer, layer_coordinates in zip(list_layers(twin), coordinates, strict=True):
            back = layer_coordinates.inverse()
            original = change_coordinates(layer, back.to_new_inputs, back.to_old_outputs)  # pyright: ignore[reportArgumentType]
            for p, original_p in zip(layer.parameters(), original.parameters(), strict=True):
                originals[id(p)] = original_p
        named = zip(names, twin.parameters(), strict=True)
        return {name: originals.get(id(p), p) for name, p in named if p.requires_grad}

    return Twin(make_twin(model, coordinates, activations), find_original_weights)
