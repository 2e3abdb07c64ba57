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
from . import diffeomorphism
from .diffeomorphism import Diffeomorphism, EntryPermutation, Params
from .reparametrize import Reparametrized, reparametrize
from .twin import (
    Change,
    Layer,
    LayerCoordinates,
    change_coordinates,
    find_hidden_layers,
    find_layers,
    make_twin,
    make_whitening,
    no_change,
    random_change,
)

#: modules with φ(sz) = sφ(z) for s > 0 by channel
HOMOGENEOUS: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.Dropout,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.Upsample,
)  # fmt: skip
#: modules that do the same to all channels
CHANNELWISE: tuple[type[nn.Module], ...] = (
    *HOMOGENEOUS, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU,
    nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid,
    nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold,
)  # fmt: skip


def neuron_coordinates(
    model: nn.Module, change: Callable[[int], Tensor], commuting: Sequence[type[nn.Module]]
) -> LayerCoordinates:
    """a† = M a for the neurons of each hidden layer, with M = change(n) of shape (n, n).

    What stands between two layers must be one of the commuting modules, φ(Mz) = Mφ(z).
    """
    hidden_layers = find_hidden_layers(model)
    inputs = [no_change(hidden_layers[0].layer.weight.shape[1])]
    outputs: list[Change] = []
    for hidden in hidden_layers:
        _refuse_noncommuting(hidden.between, commuting)
        n = hidden.layer.weight.shape[0]
        count = hidden.following.weight.shape[1]
        has_flatten = any(isinstance(module, nn.Flatten) for module in hidden.between)
        if count % n or (count != n and not has_flatten):
            raise PullbackError(
                "A layer's neurons do not reach the next layer as they are",
                f"{n} of them became {count} inputs",
                "Put nn.Flatten between a convolution and a linear layer, nothing else",
            )
        matrix = change(n)
        outputs.append(Change(torch.linalg.inv(matrix), no_change(n).shift))
        # After flattening a channel has several positions, one after the other.
        repeated = torch.kron(matrix, no_change(count // n).matrix)
        inputs.append(Change(repeated, no_change(count).shift))
    outputs.append(no_change(hidden_layers[-1].following.weight.shape[0]))
    return list(zip(inputs, outputs, strict=True))


def _refuse_noncommuting(
    modules: Sequence[nn.Module], commuting: Sequence[type[nn.Module]]
) -> None:
    """Raise where a module between two layers is none of the commuting ones."""
    remedy = "Use activations that act by entry"
    if commuting is HOMOGENEOUS:
        remedy = "Use ReLU or another positively homogeneous activation"
    for module in modules:
        if type(module) not in commuting:
            raise PullbackError(
                "The model's neurons cannot be changed",
                f"{type(module).__name__} between two layers does not commute with it",
                remedy,
            )


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
        coordinates: list[tuple[Change, Change]] = []
        for layer in _require_layers(model):
            inputs = random_change(layer.weight.shape[1], generator, self.condition)
            outputs = random_change(layer.weight.shape[0], generator, self.condition)
            if not _can_shift_inputs(layer):
                inputs = inputs.linear()
            if layer.bias is None:
                outputs = outputs.linear()
            coordinates.append((inputs, outputs))
        return _make_affine_twin(model, coordinates)


class Whitening(Transformation):
    """The first layer sees inputs of mean zero and covariance 1 (over x, and over positions).

    Without a bias, or with zero padding, the mean stays and the second moment is 1.
    """

    name = "input whitening"
    about = "the inputs' covariance becomes 1"

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        layers = _require_layers(model)
        first, rows = _find_first_layer(model, x)
        if not isinstance(first, nn.Linear):
            rows = rows.movedim(1, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        change = make_whitening(rows, centered=_can_shift_inputs(first))
        coordinates: list[tuple[Change, Change]] = []
        for layer in layers:
            outputs, inputs = (no_change(size) for size in layer.weight.shape[:2])
            if layer is first:
                inputs = change
            coordinates.append((inputs, outputs))
        return _make_affine_twin(model, coordinates)


class Rotation(Transformation):
    """Orthogonal Ω of the first layer's input, or of every layer's with an orthogonal Φ."""

    def __init__(self, seed: int = 0, *, all_layers: bool = False) -> None:
        self.seed = seed
        self.all_layers = all_layers
        if all_layers:
            self.name = "per-layer rotation"
            self.about = "a† = Ωa with ΩᵀΩ = 1, z = Φz† in every layer"
        else:
            self.name = "input rotation"
            self.about = "a† = Ωa with ΩᵀΩ = 1, in the first layer"

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)
        layers = _require_layers(model)
        first, _ = _find_first_layer(model, x)

        def rotate(size: int, is_rotated: bool) -> Change:
            if is_rotated:
                return random_change(size, generator, 1.0).linear()
            return no_change(size)

        inputs = [rotate(m.weight.shape[1], self.all_layers or m is first) for m in layers]
        outputs = [rotate(m.weight.shape[0], self.all_layers) for m in layers]
        return _make_affine_twin(model, list(zip(inputs, outputs, strict=True)))


class NeuronRescaling(Transformation):
    """Hidden neurons times s = e^u with u uniform in ±`spread`, undone by the next layer."""

    name = "neuron rescaling"
    about = "a†_i = s_i a_i with s > 0, in ReLU networks"

    def __init__(self, seed: int = 0, spread: float = 1.5) -> None:
        self.seed = seed
        self.spread = spread

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)

        def change(n: int) -> Tensor:
            u = 2 * torch.rand(n, generator=generator, dtype=torch.float64) - 1
            return (self.spread * u).exp().diag()

        return _make_affine_twin(model, neuron_coordinates(model, change, HOMOGENEOUS), {})


class NeuronPermutation(Transformation):
    """Hidden neurons in a random order."""

    name = "neuron permutation"
    about = "rows and the next layer's columns in another order"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)

        def change(n: int) -> Tensor:
            return no_change(n).matrix[torch.randperm(n, generator=generator)]

        return _make_affine_twin(model, neuron_coordinates(model, change, CHANNELWISE), {})


class Parameters(Transformation):
    """w = f(θ) for a diffeomorphism of all parameters, or what `reparametrize` takes for one."""

    def __init__(self, f: Any, name: str | None = None, about: str | None = None) -> None:
        self.f = f
        self.name = name or getattr(f, "__name__", None) or type(f).__name__
        self.about = about or "w = f(θ)"

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        twin = reparametrize(model, self.f)
        return Twin(twin, Reparametrized.weights, twin.push)  # pyright: ignore[reportArgumentType]


def standard(seed: int = 0) -> list[Transformation]:
    """The eight that an audit runs through by default."""
    return [
        Rotation(seed),
        Whitening(),
        Rotation(seed, all_layers=True),
        Affine(seed),
        NeuronRescaling(seed),
        NeuronPermutation(seed),
        Parameters(EntryPermutation(seed), "entry permutation", "each tensor's entries reordered"),
        Parameters(diffeomorphism.cubic(), "elementwise", "w = θ + θ³"),
    ]


def as_transformation(transformation: Any, name: str | None = None) -> Transformation:
    """Return the transformation itself, or `Parameters` of a diffeomorphism."""
    if isinstance(transformation, Transformation):
        return transformation
    is_diffeomorphism = isinstance(transformation, (Diffeomorphism, tuple))
    remedy = "Give a Transformation or a Diffeomorphism"
    require(is_diffeomorphism, "The transformation", transformation, remedy)
    return Parameters(transformation, name)


def _require_layers(model: nn.Module) -> list[Layer]:
    """Return the layers that can change coordinates; raise if there are none."""
    layers = find_layers(model)
    if not layers:
        raise PullbackError(
            "The model has no layers to transform",
            f"{type(model).__name__} has no linear and no ungrouped convolution layer",
            "Use a diffeomorphism of the parameters instead (transformations.Parameters)",
        )
    return layers


def _can_shift_inputs(layer: Layer) -> bool:
    """Return True if the layer's bias can take up a shift of its inputs."""
    if layer.bias is None or isinstance(layer, nn.Linear):
        return layer.bias is not None
    is_padded = layer.padding == "same" or (layer.padding != "valid" and any(layer.padding))
    return not is_padded or layer.padding_mode != "zeros"


def _find_first_layer(model: nn.Module, x: Tensor) -> tuple[Layer, Tensor]:
    """Return the layer that is called first, and its input."""
    trial = copy.deepcopy(model)  # whose buffers may change
    calls: list[tuple[int, Tensor]] = []
    for number, layer in enumerate(find_layers(trial)):
        layer.register_forward_pre_hook(
            lambda _, args, number=number: calls.append((number, args[0].detach()))  # pyright: ignore[reportArgumentType]
        )
    with torch.no_grad():
        trial(x)
    if not calls:
        raise PullbackError(
            "The model has no first layer",
            "none of its linear and convolution layers was called",
            "Call layers as modules: their hooks must run",
        )
    number, inputs = calls[0]
    return find_layers(model)[number], inputs


def _make_affine_twin(
    model: nn.Module, coordinates: LayerCoordinates, activations: dict[int, nn.Module] | None = None
) -> Twin:
    """Return the twin in other coordinates of each layer's input and output."""
    names = [name for name, _ in model.named_parameters()]

    def weights(module: nn.Module) -> Params:
        """W = ΦW†Ω and b = Φ(b† + W†γ) + τ: the changes undone."""
        originals: dict[int, Tensor] = {}
        for layer, (inputs, outputs) in zip(find_layers(module), coordinates, strict=True):
            original = change_coordinates(layer, inputs.inverse(), outputs.inverse())  # pyright: ignore[reportArgumentType]
            for p, original_p in zip(layer.parameters(), original.parameters(), strict=True):
                originals[id(p)] = original_p
        values = zip(names, module.parameters(), strict=True)
        return {name: originals.get(id(p), p) for name, p in values if p.requires_grad}

    return Twin(make_twin(model, coordinates, activations), weights)
