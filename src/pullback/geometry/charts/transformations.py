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
    hidden,
    layers,
    no_change,
    random_change,
    twin,
    whitening,
)

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


def neuron_coordinates(
    model: nn.Module, change: Callable[[int], Tensor], commuting: Sequence[type[nn.Module]]
) -> LayerCoordinates:
    """a† = M a for the neurons of each hidden layer, with M = change(n) of shape (n, n).

    What stands between two layers must be one of the commuting modules, φ(Mz) = Mφ(z).
    """
    pairs = hidden(model)
    inputs, outputs = [no_change(pairs[0][0].weight.shape[1])], list[Change]()
    for layer, after, between in pairs:
        for module in between:
            if type(module) not in commuting:
                raise PullbackError(
                    "The model's neurons cannot be changed",
                    f"{type(module).__name__} between two layers does not commute with it",
                    "Use ReLU or another positively homogeneous activation"
                    if commuting is HOMOGENEOUS
                    else "Use activations that act by entry",
                )
        n, count = layer.weight.shape[0], after.weight.shape[1]
        if count % n or (count != n and not any(isinstance(m, nn.Flatten) for m in between)):
            raise PullbackError(
                "A layer's neurons do not reach the next layer as they are",
                f"{n} of them became {count} inputs",
                "Put nn.Flatten between a convolution and a linear layer, nothing else",
            )
        matrix = change(n)
        outputs.append(Change(torch.linalg.inv(matrix), no_change(n).shift))
        # a channel has several places after flattening, one after the other
        inputs.append(
            Change(torch.kron(matrix, no_change(count // n).matrix), no_change(count).shift)
        )
    outputs.append(no_change(pairs[-1][1].weight.shape[0]))
    return list(zip(inputs, outputs, strict=True))


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

    name, about = "per-layer affine", "a† = Ωa + γ and z = Φz† + τ in every layer"

    def __init__(self, seed: int = 0, condition: float = 10.0) -> None:
        self.seed, self.condition = seed, condition

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)
        to = list[tuple[Change, Change]]()
        for layer in _some_layers(model):
            one, two = (
                random_change(n, generator, self.condition) for n in layer.weight.shape[1::-1]
            )
            one = one if _shifts(layer) else one.linear()
            to.append((one, two if layer.bias is not None else two.linear()))
        return _affine_twin(model, to)


class Whitening(Transformation):
    """The first layer sees inputs of mean zero and covariance 1 (over x, and over positions).

    Without a bias, or with zero padding, the mean stays and the second moment is 1.
    """

    name, about = "input whitening", "the inputs' covariance becomes 1"

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        every, (first, seen) = _some_layers(model), _first(model, x)
        rows = seen if isinstance(first, nn.Linear) else seen.movedim(1, -1)
        change = whitening(rows.reshape(-1, rows.shape[-1]), centered=_shifts(first))
        inputs = [change if m is first else no_change(m.weight.shape[1]) for m in every]
        outputs = [no_change(m.weight.shape[0]) for m in every]
        return _affine_twin(model, list(zip(inputs, outputs, strict=True)))


class Rotation(Transformation):
    """Orthogonal Ω of the first layer's input, or of every layer's with an orthogonal Φ."""

    def __init__(self, seed: int = 0, *, every: bool = False) -> None:
        self.seed, self.every = seed, every
        self.name = "per-layer rotation" if every else "input rotation"
        where = "z = Φz† in every layer" if every else "in the first layer"
        self.about = f"a† = Ωa with ΩᵀΩ = 1, {where}"

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)
        every, (first, _) = _some_layers(model), _first(model, x)

        def change_of(size: int, turns: bool) -> Change:
            return random_change(size, generator, 1.0).linear() if turns else no_change(size)

        inputs = [change_of(m.weight.shape[1], self.every or m is first) for m in every]
        outputs = [change_of(m.weight.shape[0], self.every) for m in every]
        return _affine_twin(model, list(zip(inputs, outputs, strict=True)))


class NeuronRescaling(Transformation):
    """Hidden neurons times s = e^u with u uniform in ±`spread`, undone by the next layer."""

    name, about = "neuron rescaling", "a†_i = s_i a_i with s > 0, in ReLU networks"

    def __init__(self, seed: int = 0, spread: float = 1.5) -> None:
        self.seed, self.spread = seed, spread

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)

        def change(n: int) -> Tensor:
            u = 2 * torch.rand(n, generator=generator, dtype=torch.float64) - 1
            return (self.spread * u).exp().diag()

        return _affine_twin(model, neuron_coordinates(model, change, HOMOGENEOUS), {})


class NeuronPermutation(Transformation):
    """Hidden neurons in a random order."""

    name, about = "neuron permutation", "rows and the next layer's columns in another order"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def twin(self, model: nn.Module, x: Tensor) -> Twin:
        generator = torch.Generator().manual_seed(self.seed)

        def change(n: int) -> Tensor:
            return no_change(n).matrix[torch.randperm(n, generator=generator)]

        return _affine_twin(model, neuron_coordinates(model, change, ALIKE), {})


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
        Rotation(seed, every=True),
        Affine(seed),
        NeuronRescaling(seed),
        NeuronPermutation(seed),
        Parameters(EntryPermutation(seed), "entry permutation", "each tensor's entries reordered"),
        Parameters(diffeomorphism.cubic(), "elementwise", "w = θ + θ³"),
    ]


def as_transformation(given: Any, name: str | None = None) -> Transformation:
    """The transformation itself, or `Parameters` of a diffeomorphism."""
    if isinstance(given, Transformation):
        return given
    usable = isinstance(given, (Diffeomorphism, tuple))
    require(usable, "The transformation", given, "Give a Transformation or a Diffeomorphism")
    return Parameters(given, name)


def _some_layers(model: nn.Module) -> list[Layer]:
    found = layers(model)
    if not found:
        raise PullbackError(
            "The model has no layers to transform",
            f"{type(model).__name__} has no linear and no ungrouped convolution layer",
            "Use a diffeomorphism of the parameters instead (transformations.Parameters)",
        )
    return found


def _shifts(layer: Layer) -> bool:
    """Whether the layer can take up a shift of its inputs."""
    if layer.bias is None or isinstance(layer, nn.Linear):
        return layer.bias is not None
    padded = layer.padding == "same" or (layer.padding != "valid" and any(layer.padding))
    return not padded or layer.padding_mode != "zeros"


def _first(model: nn.Module, x: Tensor) -> tuple[Layer, Tensor]:
    """The layer that is called first, and what it sees."""
    trial = copy.deepcopy(model)  # whose buffers may change
    seen: list[tuple[int, Tensor]] = []
    for number, layer in enumerate(layers(trial)):
        layer.register_forward_pre_hook(
            lambda _, args, number=number: seen.append((number, args[0].detach()))  # pyright: ignore[reportArgumentType]
        )
    with torch.no_grad():
        trial(x)
    if not seen:
        raise PullbackError(
            "The model has no first layer",
            "none of its linear and convolution layers was called",
            "Call layers as modules: their hooks must run",
        )
    number, inputs = seen[0]
    return layers(model)[number], inputs


def _affine_twin(
    model: nn.Module, to: LayerCoordinates, activations: dict[int, nn.Module] | None = None
) -> Twin:
    names = [n for n, _ in model.named_parameters()]

    def weights(module: nn.Module) -> Params:
        """W = ΦW†Ω and b = Φ(b† + W†γ) + τ: the changes undone."""
        back: dict[int, Tensor] = {}
        for layer, (one, two) in zip(layers(module), to, strict=True):
            old = change_coordinates(layer, one.inverse(), two.inverse())  # pyright: ignore[reportArgumentType]
            pairs = zip(layer.parameters(), old.parameters(), strict=True)
            back |= {id(p): q for p, q in pairs}
        values = zip(names, module.parameters(), strict=True)
        return {n: back.get(id(p), p) for n, p in values if p.requires_grad}

    return Twin(twin(model, to, activations), weights)
