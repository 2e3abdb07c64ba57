"""The quadratic model in the exact natural gradient; in K-FAC: tests/optim/kfac/test_control.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pullback as pb
from pullback.solvers import Cholesky
from pullback.steps import (
    Constant,
    LevenbergMarquardt,
    Need,
    QuadraticModel,
    Spring,
    TargetRatio,
    TrustNorm,
)
from tests.steps.helpers import bowl


def test_a_quadratic_problem_is_solved_although_the_damping_is_large() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    y = torch.randn(30, 2, dtype=torch.float64)
    opt = pb.NaturalGradient(
        model, pb.metrics.Fisher(pb.likelihoods.MSE()),
        solver=pb.solvers.Cholesky(damping=1e-1), step=pb.steps.QuadraticModel(),
    )  # fmt: skip

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    infos = [opt.step(closure) for _ in range(12)]
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    best = F.mse_loss(inputs @ torch.linalg.lstsq(inputs, y).solution, y)
    assert float(infos[-1].loss) <= float(best) * (1 + 1e-6)


@pytest.mark.parametrize("gram", ["rows", "kernel", "dense", "matrix_free"])
def test_the_clip_of_a_parameter_that_is_added_to_the_inputs(gram: str) -> None:
    """Position embeddings of shape (1, T, d) are shared by all samples."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(1, 5, 4, dtype=torch.float64))
            self.head = nn.Linear(4, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(x + self.positions)).mean(1)

    torch.manual_seed(0)
    model = Positions()
    x = torch.randn(7, 5, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (7,))
    limit = 1e-3
    opt = pb.NaturalGradient(
        model, likelihood=nn.CrossEntropyLoss(), step=pb.steps.TrustNorm(limit), gram=gram
    )

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    log_p = model(x).log_softmax(1).detach()
    opt.step(closure)
    log_q = model(x).log_softmax(1).detach()
    divergence = (log_p.exp() * (log_p - log_q)).sum(1).mean()
    assert float(divergence) == pytest.approx(limit / 2, rel=0.1)


@pytest.mark.parametrize("damping", [1e-3, 1.0, 100.0])
def test_levenberg_marquardt_around_the_quadratic_model(damping: float) -> None:
    """Its first direction is the damped one times the best factor; later ones use the last move."""
    problem = bowl(solver=Cholesky())
    rule = LevenbergMarquardt(damping, QuadraticModel())
    x = problem.local().direction(damping).x
    move = rule.take(problem.local())
    gram = problem.a.T @ problem.a
    gradient = problem.local().gradient
    alpha = (gradient @ x) / (x @ (gram + damping * torch.eye(4).double()) @ x)
    assert move.accepted
    torch.testing.assert_close(move.direction, alpha * x)
    problem.w = problem.w - move.direction
    second = rule.take(problem.local())
    assert problem.state["inner"]["count"] == 2
    assert second.loss is not None
    assert move.loss is not None
    assert second.loss < move.loss


def test_a_rejected_move_leaves_the_memory_of_the_quadratic_model_alone() -> None:
    problem = bowl(solver=Cholesky())
    rule = LevenbergMarquardt(1.0, QuadraticModel(), tries=1)
    rule.take(problem.local())
    last = problem.state["inner"]["move"].clone()
    where = problem.w.clone()
    problem.extra = lambda w: 1e6 * (w - where).abs().sum()
    assert not rule.take(problem.local()).accepted
    assert torch.equal(problem.state["inner"]["move"], last)
    assert problem.state["inner"]["count"] == 1
    assert problem.state["damping"] > 1 / 3


def test_needs_of_a_step_include_those_of_the_inner_one() -> None:
    rule = TrustNorm(1.0, LevenbergMarquardt(1.0, QuadraticModel()))
    assert rule.needs == {Need.PRODUCTS, Need.LOSSES, Need.DAMPINGS}
    assert Constant().needs == set()
    assert Need.PATH in TargetRatio().needs
    assert Need.CENTER in Spring().needs
