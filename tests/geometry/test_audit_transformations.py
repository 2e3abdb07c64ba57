"""Twins of networks: one function, ordinary layers, weights that map back; what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError
from pullback.geometry.charts.reparametrize import Reparametrized
from pullback.geometry.charts.transformations import (
    Affine,
    NeuronPermutation,
    NeuronRescaling,
    Parameters,
    Transformation,
    Whitening,
    as_transformation,
    standard,
)
from pullback.geometry.charts.twin import (
    AffineChange,
    change_coordinates,
    draw_change,
    find_whitening,
    list_layers,
    make_identity,
    sigmoid_twin,
    tanh_twin,
)
from tests.geometry.charts import shear
from tests.pairs import all_pairs


class Residual(nn.Module):
    """Layers in a way of their own, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 5)
        self.inner = nn.Linear(5, 5)
        self.leave = nn.Linear(5, 2)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.enter(x))
        a = self.norm(a + torch.relu(self.inner(a)))
        return self.leave(a + torch.relu(self.inner(a)))


def mlp(activation: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6, bias=bias), activation(),
        nn.Sequential(nn.Linear(6, 5, bias=bias), activation()), nn.Linear(5, 2, bias=bias),
    )  # fmt: skip


def convnet(padding: int = 1, mode: str = "zeros") -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=padding, padding_mode=mode), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 2, stride=1, bias=False), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(3 * (1 + padding) ** 2, 2),
    )  # fmt: skip


def flat(count: int = 40) -> Tensor:
    return torch.randn(count, 4) @ torch.randn(4, 4) + 1


def images(count: int = 40) -> Tensor:
    return torch.randn(count, 2, 6, 6) + 0.5


def sequences(count: int = 40) -> Tensor:
    return torch.randn(count, 3, 4)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "relu": (mlp, flat),
    "tanh": (lambda: mlp(nn.Tanh), flat),
    "no bias": (lambda: mlp(bias=False), flat),
    "over sequences": (mlp, sequences),
    "padded conv": (convnet, images),
    "conv": (lambda: convnet(0), images),
    "circular conv": (lambda: convnet(1, "circular"), images),
    "residual": (Residual, flat),
    "one layer": (lambda: nn.Linear(4, 2), flat),
}
NEURONS = ("neuron rescaling", "neuron permutation")
REFUSED = {
    *product(("residual", "one layer"), NEURONS),
    ("tanh", "neuron rescaling"),
}


@pytest.mark.parametrize(
    ("name", "transformation", "dtype"),
    all_pairs(MODELS, standard(), [torch.float64, torch.float32]),
)
def test_twins_are_one_function(
    name: str, transformation: Transformation, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model = build().to(dtype)
    x = draw().to(dtype)
    before = copy.deepcopy(model.state_dict())
    if (name, transformation.name) in REFUSED:
        with pytest.raises(PullbackError):
            transformation.twin(model, x)
        return
    twin_network = transformation.twin(model, x)
    limit = 1e-11 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(twin_network.model(x), model(x), rtol=limit, atol=limit)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    back = twin_network.weights(twin_network.model)
    assert set(back) == {n for n, _ in model.named_parameters()}
    for n, p in model.named_parameters():
        torch.testing.assert_close(back[n], p, rtol=limit, atol=limit)
    pairs = zip(twin_network.model.parameters(), model.parameters(), strict=True)
    assert not all(torch.allclose(p, q) for p, q in pairs)
    ordinary = not isinstance(twin_network.model, Reparametrized)
    assert ordinary == (transformation.name not in {"entry permutation", "elementwise"})
    if ordinary:
        assert [type(m) for m in list_layers(twin_network.model)] == [
            type(m) for m in list_layers(model)
        ]


def test_whitening_whitens_what_the_first_layer_sees() -> None:
    torch.manual_seed(1)
    for build, draw, centered in ((mlp, flat, True), (lambda: mlp(bias=False), flat, False)):
        model = build().double()
        x = draw().double()
        twin_network = Whitening().twin(model, x).model
        observed = []
        list_layers(twin_network)[0].register_forward_pre_hook(
            lambda _, args, inputs=observed: inputs.append(args[0])
        )
        twin_network(x)
        (a,) = observed
        want = torch.eye(4, dtype=torch.float64)
        torch.testing.assert_close(torch.cov(a.T) if centered else a.T @ a / len(a), want)


@pytest.mark.parametrize("transformation", [NeuronRescaling(2), NeuronPermutation(2)], ids=str)
def test_neurons_against_explicit_matrices(transformation: Transformation) -> None:
    """W† = M W, b† = M b and W†_next = W_next M⁻¹ for M diagonal, or a permutation."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    twin_network = transformation.twin(model, x).model
    assert [type(m) for m in twin_network] == [type(m) for m in model]  # pyright: ignore[reportGeneralTypeIssues]
    one, two = list_layers(model)
    new, last = list_layers(twin_network)
    joined = [torch.cat([n.weight, n.bias[:, None]], 1) for n in (one, new)]
    m = torch.linalg.lstsq(joined[0].T, joined[1].T).solution.T
    order = m.abs().argmax(1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    if isinstance(transformation, NeuronPermutation):
        assert torch.equal(new.weight, one.weight[order])
    torch.testing.assert_close(m, m * torch.nn.functional.one_hot(order, 4))
    torch.testing.assert_close(last.weight, two.weight @ torch.linalg.inv(m))
    torch.testing.assert_close(last.bias, two.bias)
    torch.testing.assert_close(twin_network(x), model(x))


def test_sigmoid_and_tanh_are_each_other() -> None:
    torch.manual_seed(3)
    x = flat().double()
    model = mlp(nn.Sigmoid).double()
    other = tanh_twin(model, find_whitening(x))
    torch.testing.assert_close(other(x), model(x))
    assert not any(isinstance(m, nn.Sigmoid) for m in other.modules())
    repeated = sigmoid_twin(tanh_twin(model))
    assert not any(isinstance(m, nn.Tanh) for m in repeated.modules())
    for p, q in zip(repeated.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    torch.testing.assert_close(sigmoid_twin(mlp(nn.Tanh).double())(x).shape, model(x).shape)
    act = nn.Sigmoid()
    one, two = (nn.Linear(4, 4).double() for _ in range(2))
    shared = nn.Sequential(one, act, two, act)  # the last one is no hidden unit
    torch.testing.assert_close(tanh_twin(shared)(x), shared(x))
    with pytest.raises(PullbackError, match="no Sigmoid network"):
        tanh_twin(mlp(nn.ReLU))
    with pytest.raises(PullbackError, match="no hidden neurons"):
        tanh_twin(nn.Sequential(nn.Sigmoid()))


def test_a_layer_in_other_coordinates_against_explicit_matrices() -> None:
    torch.manual_seed(4)
    layer = nn.Linear(3, 2).double()
    generator = torch.Generator().manual_seed(1)
    one = draw_change(3, generator)
    two = draw_change(2, generator)
    new = change_coordinates(layer, one, two)
    back = torch.linalg.inv(two.matrix)
    w = back @ layer.weight @ torch.linalg.inv(one.matrix)
    torch.testing.assert_close(new.weight, w)
    torch.testing.assert_close(new.bias, back @ (layer.bias - two.shift) - w @ one.shift)


SINGULAR = AffineChange(torch.ones(4, 4).double(), torch.zeros(4).double())
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "singular": (
        lambda: change_coordinates(nn.Linear(4, 2), SINGULAR, make_identity(2)),
        "not invertible",
    ),
    "few samples": (lambda: Whitening().twin(mlp(), flat(3)), "cannot be whitened"),
    "constant": (lambda: Whitening().twin(mlp(), torch.ones(9, 4)), "cannot be whitened"),
    "nan inputs": (lambda: Whitening().twin(mlp(), flat() * torch.nan), "cannot be whitened"),
    "no layers": (lambda: Affine().twin(nn.LayerNorm(4), flat()), "no layers"),
    "grouped": (
        lambda: Affine().twin(nn.Conv2d(2, 2, 1, groups=2), images()),
        "no ungrouped convolution",
    ),
    "smooth": (lambda: NeuronRescaling().twin(mlp(nn.GELU), flat()), "GELU"),
    "norm": (
        lambda: NeuronPermutation().twin(
            nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1)), flat()
        ),
        "LayerNorm",
    ),
    "order": (lambda: NeuronPermutation().twin(Residual(), flat()), "nn.Sequential"),
    "pooled": (
        lambda: NeuronPermutation().twin(
            nn.Sequential(nn.Linear(4, 3), nn.AdaptiveAvgPool1d(2), nn.Linear(2, 1)), flat()
        ),
        "do not reach",
    ),
    "no transformation": (lambda: as_transformation(3), "transformation is not usable"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    make, words = BAD[name]
    with pytest.raises(PullbackError, match=words):
        make()


def test_shared_weights_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight  # pyright: ignore[reportArgumentType]
    for transformation in (Affine(), NeuronRescaling(), NeuronPermutation()):
        with pytest.raises(PullbackError, match="shared"):
            transformation.twin(model, torch.randn(9, 3))
    twin_network = Parameters(shear(), "shear").twin(model, torch.randn(9, 3)).model
    x = torch.randn(5, 3)
    torch.testing.assert_close(twin_network(x), model(x), rtol=1e-4, atol=1e-5)
