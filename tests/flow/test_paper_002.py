"""Kerekes et al. (2022), Theorems 1–4, its statements and Appendix D, along flows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pullback import flow
from pullback.likelihoods import Bernoulli
from pullback.linear import DeepMatrix, DiagonalNetwork, LinearModel

DOUBLE = torch.float64
TIMES = (0.3, 0.8)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def separable(samples: int, dim: int) -> tuple[Tensor, Tensor]:
    x = draw(samples, dim)
    return x, (x @ draw(dim, seed=1)).sign()


def natural(model: nn.Module, x: Tensor, y: Tensor, end: float = 0.8) -> flow.Trajectory:
    data = flow.Supervised(x, (1 + y) / 2, Bernoulli(), "sum")
    trajectory = flow.integrate(model, data, t=(0, end), rtol=1e-7, atol=1e-9)
    assert trajectory.status == "finished"
    return trajectory


def margin(s0: float, y: float, t: float) -> float:
    """y log(e^{t+c} − 1), by math alone."""
    c = math.log1p(math.exp(y * s0))
    return y * (t + c + math.log1p(-math.exp(-(t + c))))


def shear(dim: int) -> Tensor:
    a = torch.eye(dim, dtype=DOUBLE) + 0.3 * draw(dim, dim, seed=5)
    assert float(torch.linalg.cond(a)) < 100
    return a


def test_theorem_1_logits_do_not_see_invertible_maps_of_the_data() -> None:
    x, y = separable(4, 7)
    a = shear(7)
    start = 0.3 * draw(7, seed=2)
    one = natural(LinearModel(7, start), x, y)
    two = natural(LinearModel(7, torch.linalg.solve(a.T, start)), x @ a.T, y)
    for t in TIMES:
        assert float((x @ one.flat(t) - x @ a.T @ two.flat(t)).abs().max()) < 1e-6


def test_theorem_2_the_classifier_follows_the_map() -> None:
    x, y = separable(9, 3)
    a = shear(3)
    start = 0.1 * draw(3, seed=2)
    one = natural(LinearModel(3, start), x, y)
    two = natural(LinearModel(3, torch.linalg.solve(a.T, start)), x @ a.T, y)
    for t in TIMES:
        assert float((one.flat(t) - a.T @ two.flat(t)).abs().max()) < 1e-6


def test_theorem_3_and_the_direction_of_least_squares() -> None:
    x, y = separable(4, 7)
    start = 0.3 * draw(7, seed=2)
    trajectory = natural(LinearModel(7, start), x, y)
    s0 = (x @ start).tolist()
    for t in TIMES:
        truth = [margin(s, sign, t) for s, sign in zip(s0, y.tolist(), strict=True)]
        assert float((x @ trajectory.flat(t) - x.new_tensor(truth)).abs().max()) < 1e-6
    far = natural(LinearModel(7, dtype=DOUBLE), x, y, 12.0).flat()
    assert float(torch.cosine_similarity(far, torch.linalg.pinv(x) @ y, dim=0)) > 1 - 1e-9


def test_euclidean_flow_has_none_of_this() -> None:
    x, y = separable(20, 7)
    a = shear(7)
    data = [flow.Supervised(z, (1 + y) / 2, Bernoulli(), "sum") for z in (x, x @ a.T)]
    one, two = (
        flow.integrate(
            LinearModel(7, dtype=DOUBLE), d, t=(0, 0.5), kind="euclidean", rtol=1e-6
        ).flat()
        for d in data
    )
    assert float((one - a.T @ two).norm() / one.norm()) > 0.1


@pytest.mark.parametrize("model_name", ["tanh", pytest.param("diagonal", marks=pytest.mark.slow)])
def test_theorem_4_in_models_that_are_not_linear(model_name: str) -> None:
    x, y = separable(4, 7)
    torch.manual_seed(0)
    model: nn.Module
    if model_name == "diagonal":
        model = DiagonalNetwork(7, 3, seed=0, dtype=DOUBLE)
    else:
        layers = [nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1), nn.Flatten(0)]
        model = nn.Sequential(*layers).double()
    s0 = model(x).tolist()
    trajectory = natural(model, x, y)
    for t in TIMES:
        truth = [margin(s, sign, t) for s, sign in zip(s0, y.tolist(), strict=True)]
        assert float((trajectory.values(t) - x.new_tensor(truth)).abs().max()) < 1e-6


@pytest.mark.slow
def test_reparametrization_by_depth() -> None:
    x, y = separable(9, 3)
    start = 0.2 * draw(3, seed=2)
    one = natural(LinearModel(3, start), x, y)
    factors = torch.ones(3, 3, dtype=DOUBLE)
    factors[0] = start
    two = natural(DiagonalNetwork(3, 3, factors), x, y)
    for t in TIMES:
        assert float((one.flat(t) - two.flat(t).view(3, 3).prod(0)).abs().max()) < 1e-6


@pytest.mark.slow
def test_matrix_completion_is_trivial_under_the_natural_flow() -> None:
    """β(t) = b + e^{−t}(β₀ − b) on observed entries and β₀ elsewhere."""
    mask = draw(3, 3, seed=3) > 0
    b = draw(3, 3, seed=4)
    model = DeepMatrix([3, 3, 3, 3], seed=1, dtype=DOUBLE)
    beta = model.beta.detach()
    trajectory = flow.integrate(
        lambda w: w["0"] @ w["1"] @ w["2"],
        lambda z: 0.5 * (z - b)[mask].square().sum(),
        t=(0, 0.3),
        start={str(i): w.detach() for i, w in enumerate(model.factors)},
        rtol=1e-7,
        atol=1e-9,
    )
    assert trajectory.ok
    for t in (0.1, 0.3):
        truth = torch.where(mask, b + math.exp(-t) * (beta - b), beta)
        assert float((trajectory.values(t) - truth).abs().max()) < 1e-6


def test_the_counterexample_and_what_flows_do_there() -> None:
    """X = (2, −3): the natural flow carries over to XAᵀ, the ℓ2 margin does not."""
    x = torch.tensor([[2.0, -3.0]], dtype=DOUBLE)
    y = torch.ones(1, dtype=DOUBLE)
    a = torch.tensor([[1.0, 2.0], [-1.0, 0.0]], dtype=DOUBLE)
    # of one point the least norm with margin 1
    beta, moved = (torch.linalg.pinv(z) @ y for z in (x, x @ a.T))
    torch.testing.assert_close(beta, x.new_tensor([2 / 13, -3 / 13]))
    torch.testing.assert_close(moved, x.new_tensor([-1 / 5, -1 / 10]))
    torch.testing.assert_close(a.T @ moved, x.new_tensor([-0.1, -0.4]))
    one = natural(LinearModel(2, dtype=DOUBLE), x, y)
    two = natural(LinearModel(2, dtype=DOUBLE), x @ a.T, y)
    for t in TIMES:
        assert abs(float(x @ one.flat(t) - x @ a.T @ two.flat(t))) < 1e-6
