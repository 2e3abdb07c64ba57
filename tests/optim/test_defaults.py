"""Default arguments are safe: the loss never rises, and falls faster than with Adam."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import pullback as pb

from .common import closure_of

Task = tuple[Tensor, Tensor, Callable[..., Tensor], nn.Module]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


def regression(seed: int) -> Task:
    x = torch.linspace(-1, 1, 64)[:, None]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    return x, torch.sin(6 * x), F.mse_loss, model


def classification(seed: int) -> Task:
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    torch.manual_seed(seed)
    return x, y, F.cross_entropy, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def losses(opt: Optimizer, task: Task, evaluations: int) -> list[float]:
    """The losses at the steps, and at the end, of a budget of evaluations."""
    x, y, loss, model = task
    closure = closure_of(opt, model, x, y, loss)
    count = 0
    losses_of_steps = []

    def count_and_evaluate() -> float:
        nonlocal count
        count += 1
        return float(closure().detach())

    while count < evaluations:
        losses_of_steps.append(float(opt.step(count_and_evaluate)))
    return [*losses_of_steps, float(loss(model(x), y).detach())]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [pb.NaturalGradient, pb.GaussNewton, pb.DampedGaussNewton])
def test_regression_with_default_arguments(make, seed: int) -> None:
    adam = regression(seed)
    want = losses(Adam(adam[-1].parameters(), 1e-3), adam, 60)
    task = regression(seed)
    losses_of_steps = losses(make(task[-1]), task, 60)
    assert max(losses_of_steps) == losses_of_steps[0]
    assert losses_of_steps[-1] < 0.5 * want[-1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "make",
    [
        pb.NaturalGradient,
        lambda m: pb.NaturalGradient(m, likelihood=nn.CrossEntropyLoss()),
        lambda m: pb.GaussNewton(m, F.cross_entropy),
        lambda m: pb.DampedGaussNewton(m, F.cross_entropy),
        pytest.param(lambda m: pb.HessianFree(m, F.cross_entropy), marks=pytest.mark.slow),
    ],
    ids=["Euclidean", "Fisher", "GaussNewton", "DampedGaussNewton", "HessianFree"],
)
def test_classification_with_default_arguments(make, seed: int) -> None:
    adam = classification(seed)
    want = losses(Adam(adam[-1].parameters(), 1e-3), adam, 40)
    task = classification(seed)
    losses_of_steps = losses(make(task[-1]), task, 40)
    assert max(losses_of_steps) == losses_of_steps[0]
    assert losses_of_steps[-1] < 0.5 * want[-1]


def test_a_given_learning_rate_is_a_constant_step() -> None:
    opt = pb.NaturalGradient(nn.Linear(2, 1), lr=0.1)
    assert isinstance(opt.rule, pb.steps.Constant)
    assert opt.param_groups[0]["lr"] == 0.1
    assert isinstance(pb.GaussNewton(nn.Linear(2, 1), lr=0.1).rule, pb.steps.Constant)
    search = pb.steps.GridLineSearch(3)
    assert pb.NaturalGradient(nn.Linear(2, 1), step=search, lr=0.1).rule is search


def test_trial_losses_keep_the_precision_of_the_closure() -> None:
    """A loss in double precision on a model in single precision, far from zero."""
    model = nn.Linear(2, 1)
    x = torch.randn(8, 2)
    y = torch.randn(8, 1)
    opt = pb.NaturalGradient(model, likelihood=nn.MSELoss())

    def loss() -> Tensor:
        return 1e8 + F.mse_loss(model(x).double(), y.double())

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    info = opt.step(closure)
    assert info.accepted
    assert info.new_loss is not None
    assert info.new_loss < info.loss
    assert abs(info.new_loss - float(loss().detach())) < 1e-6


def test_a_loss_beyond_single_precision_is_finite() -> None:
    model = nn.Linear(2, 1).double()
    x = torch.randn(8, 2).double()
    y = 1e100 * torch.randn(8, 1).double()
    opt = pb.DampedGaussNewton(model)
    info = opt.step(closure_of(opt, model, x, y))
    assert info.accepted
    assert info.loss > 1e190
