"""The networks with their twins, their data, and what they are compared by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from pullback import likelihoods, metrics
from pullback.geometry.charts.twin import (
    AffineChange,
    AffineMap,
    LayerCoordinates,
    change_coordinates,
    draw_change,
    find_whitening,
    list_layers,
    make_identity,
    make_twin,
    tanh_twin,
)


class Recurrent(nn.Module):
    r"""a_t = φ(W a_{t−1} + b + V x_t), y_t = U a_t + c, over (N, T, inputs).

    In a twin, φ is Ωtanh(Φz + τ) + γ, inputs and outputs change inside, and a_0 is given.
    """

    start: Tensor

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.recurrent = nn.Linear(hidden, hidden, dtype=torch.float64)
        self.entry = nn.Linear(inputs, hidden, bias=False, dtype=torch.float64)
        self.exit = nn.Linear(hidden, outputs, dtype=torch.float64)
        self.register_buffer("start", torch.zeros(hidden, dtype=torch.float64))
        self.enter = AffineMap(make_identity(inputs), -1)
        self.before = AffineMap(make_identity(hidden), -1)
        self.after = AffineMap(make_identity(hidden), -1)
        self.leave = AffineMap(make_identity(outputs), -1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, inputs) -> (N, T, outputs)."""
        a = self.start.expand(len(x), -1)
        out = []
        for x_t in self.enter(x).unbind(1):
            z = self.recurrent(a) + self.entry(x_t)
            a = self.after(torch.tanh(self.before(z)))
            out.append(self.leave(self.exit(a)))
        return torch.stack(out, 1)


def recurrent_twin(
    model: Recurrent,
    generator: torch.Generator,
    *,
    keep_start: bool = False,
    shift_inputs: bool = False,
) -> Recurrent:
    r"""Random coordinates: W† = Φ⁻¹WΩ⁻¹ and so on, V† = Φ⁻¹VΩ_x⁻¹, and a_0† = Ωa_0 + γ.

    Args:
        model: the network.
        generator: of the coordinates.
        keep_start: take a_0† = a_0, although a_t† = Ωa_t + γ for t > 0.
        shift_inputs: shift x_t too, and let b† take it up; V has no bias of its own.
    """
    inputs = model.entry.in_features
    hidden = model.recurrent.in_features
    entering = draw_change(inputs, generator)
    state = draw_change(hidden, generator)
    inner = draw_change(hidden, generator)
    leaving = draw_change(model.exit.out_features, generator)
    if not shift_inputs:
        entering = entering.without_shift()
    out = Recurrent(inputs, hidden, model.exit.out_features)
    out.recurrent = change_coordinates(model.recurrent, state, inner)
    out.entry = change_coordinates(model.entry, entering, inner)
    out.exit = change_coordinates(model.exit, state, leaving)
    with torch.no_grad():
        out.recurrent.bias.sub_(out.entry.weight @ entering.shift)
    out.enter = AffineMap(entering, -1)
    out.leave = AffineMap(leaving, -1)
    out.before = AffineMap(inner, -1)
    out.after = AffineMap(state, -1)
    if keep_start:
        out.start = model.start.clone()
    else:
        out.start = _at(state, model.start)
    return out


def _at(change: AffineChange, x: Tensor) -> Tensor:
    return change.matrix @ x + change.shift


@dataclass(frozen=True)
class TwinSide:
    """One of the two networks.

    Attributes:
        model: the network.
        metric: on its outputs.
        loss: (outputs, targets) ↦ the loss.
        readout: what counts as the function, from the outputs.
    """

    model: nn.Module
    metric: metrics.Metric
    loss: Callable[[Tensor, Tensor], Tensor]
    readout: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TwinPair:
    """A network and its twin before training.

    Attributes:
        one, two: the network, and the twin.
        batch: draws the next batch, always a fresh one.
        probe_inputs: inputs at which the functions are compared, none of them trained on.
    """

    one: TwinSide
    two: TwinSide
    batch: Callable[[], tuple[Tensor, Tensor]]
    probe_inputs: Tensor


@dataclass(frozen=True)
class Net:
    """A kind of network: its name, what is special about it, and how a seed makes the pair."""

    name: str
    about: str
    make: Callable[[int], TwinPair]


Inputs = Callable[[int], Tensor]
Reparametrize = Callable[[nn.Sequential, torch.Generator, Inputs], nn.Module]


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@torch.no_grad()
def _initialize(model: nn.Module, generator: torch.Generator, gain: float) -> nn.Module:
    """Weights of variance gain²/fan-in: large enough for units to differ, so factors are sound."""
    for p in model.parameters():
        if p.ndim > 1:
            scale = gain * p[0].numel() ** -0.5
        else:
            scale = 0.3
        p.copy_(scale * _normal(tuple(p.shape), generator))
    return model


def _mlp(sizes: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for one, two in pairwise(sizes):
        modules += [nn.Linear(one, two, dtype=torch.float64), activation()]
    return nn.Sequential(*modules[:-1])


def _convnet(padding: int, *, explicit: bool = False) -> nn.Sequential:
    """Two convolutions and a linear layer on 2 × 6 × 6; `explicit` padding belongs to φ."""
    inner = 0 if explicit else padding
    if explicit:
        pads = [nn.ZeroPad2d(padding)]
    else:
        pads = []
    side = 6 + 4 * padding - 4
    return nn.Sequential(
        *copy.deepcopy(pads), nn.Conv2d(2, 4, 3, padding=inner, dtype=torch.float64), nn.Tanh(),
        *copy.deepcopy(pads), nn.Conv2d(4, 3, 3, padding=inner, dtype=torch.float64), nn.Tanh(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3 * (side // 2) ** 2, 3, dtype=torch.float64),
    )  # fmt: skip


def _targets(likelihood: likelihoods.Likelihood, z: Tensor, generator: torch.Generator) -> Tensor:
    """Return targets drawn from a teacher with outputs z."""
    if isinstance(likelihood, likelihoods.Gaussian):
        return z + 0.1 * _normal(tuple(z.shape), generator)
    return likelihood.sample(z, generator)


def _pair(
    seed: int,
    build: Callable[[], nn.Module],
    other: Callable[..., nn.Module],
    shape: tuple[int, ...],
    likelihood: likelihoods.Likelihood,
    *,
    gain: float = 1.5,
    dead: int = 0,
    readout: Callable[[Tensor], Tensor] = lambda z: z,
) -> TwinPair:
    """Inputs with correlated channels and a mean; a teacher of the same kind as the network."""
    generator = _random(seed)
    model, teacher = (_initialize(build(), generator, gain) for _ in range(2))
    axis = -1 if isinstance(model, Recurrent) else 1
    if isinstance(model, Recurrent):
        channels = shape[-1]
    else:
        channels = shape[0]
    mixed = AffineMap(draw_change(channels, generator), axis)

    def inputs(count: int) -> Tensor:
        x = mixed(_normal((count, *shape), generator))
        if dead:
            x[:, :dead] = 0
        return x

    def batch() -> tuple[Tensor, Tensor]:
        x = inputs(128)
        with torch.no_grad():
            return x, _targets(likelihood, teacher(x), generator)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return likelihood.nll(z, y).sum() / len(z)

    twin_of = other(model, _random(1000 + seed), inputs)
    metric = metrics.Fisher(likelihood)
    one, two = (TwinSide(m, metric, loss, readout) for m in (model, twin_of))
    return TwinPair(one, two, batch, inputs(200))  # which are not trained on


def _reparametrize(
    model: nn.Sequential, generator: torch.Generator, inputs: Inputs, *, shifted: bool = True
) -> nn.Module:
    """In random coordinates of every layer; without γ if not `shifted`."""
    layers = list_layers(model)
    to_new_inputs = [draw_change(m.weight.shape[1], generator) for m in layers]
    to_old_outputs = [draw_change(m.weight.shape[0], generator) for m in layers]
    if not shifted:
        to_new_inputs = [change.without_shift() for change in to_new_inputs]
    pairs = zip(to_new_inputs, to_old_outputs, strict=True)
    return make_twin(model, [LayerCoordinates(*pair) for pair in pairs])


def _reparametrize_without_shift(
    model: nn.Sequential, generator: torch.Generator, inputs: Inputs
) -> nn.Module:
    return _reparametrize(model, generator, inputs, shifted=False)


def _whitened_tanh(model: nn.Sequential, generator: torch.Generator, inputs: Inputs) -> nn.Module:
    return tanh_twin(model, find_whitening(inputs(1000)))


def _mlp_pair(
    sizes: tuple[int, ...],
    likelihood: likelihoods.Likelihood,
    activation: type[nn.Module] = nn.Tanh,
    other: Reparametrize = _reparametrize,
    **options: object,
) -> Callable[[int], TwinPair]:
    def make(seed: int) -> TwinPair:
        shape = sizes[:1]
        return _pair(seed, lambda: _mlp(sizes, activation), other, shape, likelihood, **options)  # pyright: ignore[reportArgumentType]

    return make


def _conv_pair(
    padding: int, other: Reparametrize = _reparametrize, *, explicit: bool = False
) -> Callable[[int], TwinPair]:
    def make(seed: int) -> TwinPair:
        def build() -> nn.Sequential:
            return _convnet(padding, explicit=explicit)

        return _pair(seed, build, other, (2, 6, 6), likelihoods.Gaussian())

    return make


def _recurrent_pair(**options: bool) -> Callable[[int], TwinPair]:
    def other(model: Recurrent, generator: torch.Generator, inputs: Inputs) -> nn.Module:
        return recurrent_twin(model, generator, **options)

    def make(seed: int) -> TwinPair:
        return _pair(seed, lambda: Recurrent(4, 4, 2), other, (6, 4), likelihoods.Gaussian())

    return make


def _output_pair(metric: str) -> Callable[[int], TwinPair]:
    """Return a pair for Gauss–Newton: the twin's outputs are Ωy + γ, and its loss inverts this.

    "euclidean" measures the twin's outputs in its own coordinates, "carried" carries the metric
    over, "inner" changes no output.
    """

    def make(seed: int) -> TwinPair:
        mlp_pair = _mlp_pair((5, 7, 6, 3), likelihoods.Gaussian())(seed)
        flat = metrics.Euclidean()
        one = TwinSide(mlp_pair.one.model, flat, mlp_pair.one.loss, mlp_pair.one.readout)
        if metric == "inner":
            two = TwinSide(mlp_pair.two.model, flat, mlp_pair.two.loss, mlp_pair.two.readout)
            return TwinPair(one, two, mlp_pair.batch, mlp_pair.probe_inputs)
        change = draw_change(3, _random(2000 + seed))
        back = AffineMap(change.inverse())
        two = TwinSide(
            nn.Sequential(mlp_pair.two.model, AffineMap(change)),
            flat if metric == "euclidean" else _pull_back_metric(change),
            lambda z, y: mlp_pair.two.loss(back(z), y),
            back,
        )
        return TwinPair(one, two, mlp_pair.batch, mlp_pair.probe_inputs)

    return make


def _pull_back_metric(change: AffineChange) -> metrics.Metric:
    """Return the metric of ½‖y‖² of the old outputs, as a function of the new ones."""
    back = change.inverse()
    return metrics.Bregman(lambda z: 0.5 * (back.matrix @ z + back.shift).square().sum())


def _probabilities(z: Tensor) -> Tensor:
    return torch.softmax(z, -1)


_GAUSSIAN = likelihoods.Gaussian()
_BERNOULLI = likelihoods.Bernoulli()

#: networks on which every method is compared
NETS = (
    Net("tanh MLP", "6-8-7-3, Gaussian", _mlp_pair((6, 8, 7, 3), _GAUSSIAN)),
    Net(
        "sigmoid MLP",
        "4-3-2, Bernoulli",
        _mlp_pair((4, 3, 2), _BERNOULLI, nn.Sigmoid, gain=2.0),
    ),
    Net(
        "sigmoid → tanh",
        "4-3-2, Bernoulli, the twin has tanh units and whitened inputs",
        _mlp_pair((4, 3, 2), _BERNOULLI, nn.Sigmoid, _whitened_tanh, gain=2.0),
    ),
    Net("conv, valid", "two 3 × 3 convolutions, Gaussian", _conv_pair(0)),
    Net(
        "conv, padded, γ = 0",
        "zero padding, unshifted activations",
        _conv_pair(1, _reparametrize_without_shift),
    ),
    Net("conv, padded by γ", "the twin pads with its own zero, γ", _conv_pair(1, explicit=True)),
    Net("RNN", "4-4-2 over 6 steps, Gaussian, a₀ changes too", _recurrent_pair()),
    Net(
        "dead inputs",
        "6-8-7-3, Gaussian, two inputs are always zero",
        _mlp_pair((6, 8, 7, 3), _GAUSSIAN, dead=2),
    ),
    Net(
        "softmax",
        "5-6-4, Categorical, compared by probabilities",
        _mlp_pair((5, 6, 4), likelihoods.Categorical(), readout=_probabilities),
    ),
)

#: where theory says no, or says yes by a hair
EXHIBITS = (
    Net("zero padding with a shift", "the twin pads with 0, not γ", _conv_pair(1)),
    Net("RNN, a₀ kept", "a₀† = a₀, although a† = Ωa + γ", _recurrent_pair(keep_start=True)),
    Net("RNN, inputs shifted", "V has no bias to shift", _recurrent_pair(shift_inputs=True)),
    Net(
        "softmax, logits",
        "5-6-4, Categorical, compared by logits",
        _mlp_pair((5, 6, 4), likelihoods.Categorical()),
    ),
    Net("Gauss–Newton, inside", "Euclidean metric, outputs unchanged", _output_pair("inner")),
    Net("Gauss–Newton, output", "Euclidean metric, outputs changed", _output_pair("euclidean")),
    Net("metric carried over", "Bregman metric of the same potential", _output_pair("carried")),
)
