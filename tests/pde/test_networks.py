"""Networks for PDEs: shapes, seeds, exact constraints, and that jets go through all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, pde
from pullback.maps.jets import Jet, Scheme, differentiate_nested
from pullback.maps.jets.axes import has_separate_axes
from pullback.pde.networks.field_sizes import choose_units
from pullback.pde.networks.modules import ACTIVATIONS
from pullback.pde.networks.state import InUnits

X = torch.rand(6, 2, generator=torch.Generator().manual_seed(0)).double()
BOX = pde.Box([(0, 1), (0, 2)])
SCHEME = Scheme.of([(0, 0, 1), (1, 1)], laplacian=(0, 1))


def jets(network: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        channels = network(Jet.input(x, SCHEME)).stack_channels()
        want = differentiate_nested(network, x, SCHEME)
    torch.testing.assert_close(channels, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, nn.Mish])
def test_every_activation_carries_jets(activation: Any) -> None:
    network = pde.mlp(2, 5, 4, 3, activation=activation, seed=1)
    assert network(X).shape == (6, 3)
    assert network(X).dtype == torch.float64
    jets(network)


def test_seeds() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one = pde.mlp(2, 4, 1, seed=5)
    two = pde.mlp(2, 4, 1, seed=5)
    three = pde.mlp(2, 4, 1, seed=6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one(X), two(X))
    assert not torch.equal(one(X), three(X))
    assert pde.mlp(1, 2, dtype=torch.float32)(torch.ones(1, 1)).dtype == torch.float32


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((), {}), ((2,), {}), ((2, 0, 1), {}), ((2, 3.0, 1), {}), ((2, 3, 1), {"activation": "rule"})],
)
def test_unusable_networks(sizes: Any, options: Any) -> None:
    with pytest.raises(PullbackError):
        pde.mlp(*sizes, **options)


def test_rescaled() -> None:
    network = pde.Rescaled(pde.mlp(2, 3, 1, seed=0), BOX)
    corners = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.5, 1.0]]).double()
    inner = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]).double()
    torch.testing.assert_close(network(corners), network.network(inner))
    jets(network)


def test_fourier_features() -> None:
    features = pde.FourierFeatures(2, 3, scale=2.0, seed=4)
    out = features(X)
    assert out.shape == (6, 6)
    phase = X @ features.frequencies.T
    torch.testing.assert_close(out, torch.cat([phase.sin(), phase.cos()], 1))
    jets(nn.Sequential(features, pde.mlp(6, 4, 2, seed=0)))


def test_periodic_embedding() -> None:
    for axis, harmonics in ((0, 1), (1, 3)):
        embed = pde.PeriodicEmbedding(2, axis, 2.0, harmonics)
        network = nn.Sequential(embed, pde.mlp(1 + 2 * harmonics, 4, 1, seed=0))
        shift = torch.zeros(2).double()
        shift[axis] = 2.0
        torch.testing.assert_close(network(X + shift), network(X), rtol=1e-12, atol=1e-12)
        jets(network)
    waves = pde.PeriodicEmbedding(1, 0, 1.0, 2)(X[:, :1])
    angle = 2 * math.pi * X[:, 0]
    want = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], 1)
    torch.testing.assert_close(waves, want)
    unusable: list[tuple[Any, ...]] = [(2, 2, 1.0), (2, 0, 0.0), (2, 0, 1.0, 0)]
    for wrong in unusable:
        with pytest.raises(PullbackError, match="periodic embedding"):
            pde.PeriodicEmbedding(*wrong)


def test_hard_constraints() -> None:
    inner = pde.mlp(2, 5, 2, seed=0)
    network = pde.Hard(
        inner,
        BOX,
        distance=lambda x, y: (x * (1 - x), y),
        lift=lambda x, y: (torch.sin(y) + torch.zeros_like(x), torch.ones_like(x) * 3),
    )
    x = X[:, :1]
    y = X[:, 1:]
    out = inner(X)
    want = torch.cat([y.sin() + x * (1 - x) * out[:, :1], 3 + y * out[:, 1:]], 1)
    torch.testing.assert_close(network(X), want)
    jets(network)
    one = pde.Hard(inner, BOX, distance=lambda points: points[:, :1] * points[:, 1:])
    torch.testing.assert_close(one(X), x * y * out)
    jets(one)
    with pytest.raises(PullbackError, match="The distance asks for 'z'"):
        pde.Hard(inner, BOX, distance=lambda z: z)(X)


def test_separable_networks() -> None:
    """Their jets are the derivatives of sums and products, and products begin near 1."""
    network = pde.Separable(4, 2, rank=3, width=5, pairs=2, seed=0)
    assert sum(p.numel() for p in network.parameters()) == 4 * (10 + 7 * 9) + 2 * 5
    x = torch.rand(6, 4, dtype=torch.float64)
    scheme = Scheme.of([(0, 1), (2, 2)])
    with torch.no_grad():
        channels = network(Jet.input(x, scheme)).stack_channels()
    torch.testing.assert_close(channels, differentiate_nested(network, x, scheme))
    high_dimensional = pde.Separable(100, rank=4, width=4, seed=0)
    values = high_dimensional(torch.rand(50, 100, dtype=torch.float64))
    assert bool(torch.isfinite(values).all())
    assert float(values.abs().max()) < 1e3
    with pytest.raises(PullbackError, match="sizes"):
        pde.Separable(0)
    with pytest.raises(PullbackError, match="products"):
        pde.Separable(2, rank=-1)
    with pytest.raises(PullbackError, match="dtype="):
        pde.Separable(2, dtype=torch.int64)
    with pytest.raises(PullbackError, match="dtype="):
        pde.Separable(2, dtype="float64")  # pyright: ignore[reportArgumentType]


def test_a_separable_network_refuses_points_of_other_dimensions() -> None:
    network = pde.Separable(2, seed=0)
    with pytest.raises(PullbackError, match="they have 3 coordinates, the network has 2"):
        network(torch.rand(4, 3, dtype=torch.float64))
    with pytest.raises(PullbackError, match="they have 3 coordinates"):
        pde.solve(pde.Poisson(3), network, steps=1, points=20)
    with pytest.raises(PullbackError, match="The box"):
        network.average_over(pde.Box([(0, 1)] * 3))
    with pytest.raises(PullbackError, match="The box"):
        network.average_over(pde.Disk())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("rank", "pairs"), [(2, 0), (0, 2), (3, 1), (0, 0)])
def test_the_average_of_a_separable_network_is_that_of_a_rule_in_all_dimensions(
    rank: int, pairs: int
) -> None:
    network = pde.Separable(3, 2, rank=rank, width=3, pairs=pairs, seed=1)
    box = pde.Box([(0, 2), (-1, 0.5), (3, 4)])
    average = network.average_over(box, nodes=12)
    points = box.sample(12**3, "gauss")
    exact = points.weights @ network(points.x) / points.weights.sum()
    torch.testing.assert_close(average, exact, rtol=0, atol=1e-13)
    average.sum().backward()
    gradients = [p.grad for p in network.parameters()]
    assert all(gradient is not None for gradient in gradients)
    cube = pde.Box([(-1, 1)] * 100)
    assert bool(pde.Separable(100, rank=2, seed=0).average_over(cube).isfinite())


@pytest.mark.slow
def test_a_separable_network_solves_in_ten_dimensions() -> None:
    """Products of two sums hold x₁x₂ + x₃x₄ + … without an error of approximation."""
    problem = pde.Poisson(10, boundary_weight=100)
    network = pde.Rescaled(pde.Separable(10, rank=0, width=2, pairs=6, seed=0), problem.domain)
    options = {"points": {"equation": 700, "dirichlet": 500}, "steps": 45, "progress": False}
    solution = pde.solve(problem, network, **options)
    assert solution.error < 1e-10
    assert not solution.nested


def transport(largest: float) -> pde.Problem:
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 1)),
        [
            pde.Equation(lambda u: u.t + u.x),
            pde.Dirichlet(lambda t: largest * t, on=lambda d: d.face("x", "low")),
            pde.Initial(0.0),
        ],
    )


@pytest.mark.parametrize(("largest", "unit"), [(1e3, 1e3), (20.0, 1.0), (1e-5, 1.0)])
def test_large_data_give_fields_units(largest: float, unit: float) -> None:
    units = choose_units(transport(largest))
    assert float(units) == pytest.approx(unit, rel=0.01)
    network = pde.network_for(transport(largest))
    assert isinstance(network.network, InUnits) == (unit != 1)
    jets(network)


@pytest.mark.parametrize("source", [1e-4, 1.0, 1e6])
def test_sources_of_linear_steady_problems_give_units(source: float) -> None:
    domain = pde.Box([(0, 1), (0, 1)])
    equation = pde.Equation(lambda u: u.laplacian + 2 * math.pi**2 * source)
    units = choose_units(pde.Problem(domain, [equation, pde.Dirichlet(0.0)]))
    assert float(units) == pytest.approx(source)


def test_an_oscillating_source_gives_no_units() -> None:
    assert choose_units(pde.Multiscale(50)).tolist() == [1.0]


def test_small_data_of_what_may_grow_give_no_units() -> None:
    def slope(u: Any) -> Any:
        return u.t - u * (1 - u)

    start = pde.Dirichlet(1e-6, on=lambda domain: domain.face("t", "low"))
    problem = pde.Problem(pde.Interval(0, 1, name="t"), [pde.Equation(slope), start])
    assert choose_units(problem).tolist() == [1.0]


SCHEMES = {
    "Laplacian": Scheme.of([], range(4)),
    "time and Laplacian": Scheme.of([(3,)], range(3)),
    "third derivatives": Scheme.of([(0, 0, 0), (1, 1)], (2,)),
    "values": Scheme.of([]),
    "mixed derivatives": Scheme.of([(0, 1)]),
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize(("rank", "pairs"), [(2, 0), (0, 2), (3, 1)])
def test_separable_network_has_the_derivatives_of_autograd(
    scheme: Scheme, rank: int, pairs: int
) -> None:
    inner = pde.Separable(4, 2, rank=rank, width=3, pairs=pairs, seed=1)
    network = pde.Rescaled(inner, pde.Box([(0, 2)] * 4))
    x = torch.rand(5, 4, dtype=torch.float64)
    jet = network(Jet.input(x, scheme))
    with torch.no_grad():
        exact = differentiate_nested(network, x, scheme)
        assert torch.allclose(jet.expand_channels().stack_channels(), exact, atol=1e-14)


def test_separate_axes_are_recognized() -> None:
    """Scaled coordinates are separate; rotated ones are not."""
    x = torch.rand(5, 2, dtype=torch.float64)
    coordinates = Jet.input(x, Scheme.of([], range(2)))
    assert has_separate_axes(2 * (coordinates - 1.0))
    assert not has_separate_axes(coordinates @ torch.ones(2, 2, dtype=torch.float64))
    assert not has_separate_axes(coordinates.sin())
    assert not has_separate_axes(x)


def test_separable_network_of_rotated_coordinates() -> None:
    turn = torch.nn.Linear(2, 2, dtype=torch.float64)
    network = torch.nn.Sequential(turn, pde.Separable(2, rank=2, width=3, seed=0))
    x = torch.rand(5, 2, dtype=torch.float64)
    scheme = Scheme.of([], range(2))
    jet = network(Jet.input(x, scheme))
    with torch.no_grad():
        exact = differentiate_nested(network, x, scheme)
        assert torch.allclose(jet.expand_channels().stack_channels(), exact, atol=1e-14)
