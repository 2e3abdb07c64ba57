"""The damped system of a step: r beside e, its status, and the direction without the step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.testing import assert_close, jacobian

DOUBLE = torch.float64


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def problem(decay: float = 0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).to(DOUBLE)
    x = torch.randn(5, 3, dtype=DOUBLE)
    y = torch.randn(5, 2, dtype=DOUBLE)

    def closure() -> Tensor:
        model.zero_grad()
        loss = 0.5 * (model(x) - y).square().sum(-1).mean()
        loss = loss + 0.5 * decay * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    return model, x, closure


def test_direction_is_the_damped_solve_and_moves_nothing() -> None:
    model, x, closure = problem(decay=0.3)
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(0.1))
    before = vector(model)
    random = torch.get_rng_state()
    direction = opt.direction(closure)
    j = jacobian(model(x), list(model.parameters()))
    closure()
    g = torch.cat([p.grad.flatten() for p in model.parameters()])
    want = torch.linalg.solve(j.T @ j / 5 + 0.1 * torch.eye(len(g), dtype=DOUBLE), g)
    assert_close(direction.x, want, 1e-10, "direction")
    assert torch.equal(vector(model), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_direction_refuses_a_loss_that_is_not_finite() -> None:
    model = nn.Linear(2, 1)
    opt = pb.NaturalGradient(model)

    def closure() -> Tensor:
        loss = model(torch.full((3, 2), torch.nan)).sum()
        loss.backward()
        return loss

    with pytest.raises(pb.PullbackError, match="no natural gradient here"):
        opt.direction(closure)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_the_path_of_a_regularized_loss(damping: float) -> None:
    """TargetRatio sees the same solutions as a plain damped solve, the regularizer included."""
    model, _, closure = problem(decay=0.3)
    observed = {}

    class Look(pb.steps.Constant):
        def take(self, local: pb.steps.Local) -> pb.steps.Move:
            path = local.path()
            assert path is not None
            observed["path"] = path.at(torch.tensor(damping, dtype=DOUBLE))
            observed["solve"] = local.direction(damping).x
            return super().take(local)

    opt = pb.NaturalGradient(model, solver=pb.solvers.PseudoInverse(), step=Look(0.0))
    info = opt.step(closure)
    assert not info.whitened
    assert_close(observed["path"], observed["solve"], 1e-10, "path")


def test_an_r_that_is_not_representable_is_reported() -> None:
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.mul_(1e4)
    x = torch.randn(6, 2)
    y = torch.randint(0, 3, (6,))
    fisher = pb.metrics.Fisher(pb.likelihoods.Categorical())
    opt = pb.NaturalGradient(model, fisher, pb.solvers.PseudoInverse(), lr=0.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), (model(x).argmin(-1) + 0 * y))
        loss.backward()
        return loss

    info = opt.step(closure)
    assert info.status is pb.Status.NOT_REPRESENTABLE
    assert "damping" in info.status.value


def test_replaced_parameters_are_noticed() -> None:
    model, _, closure = problem()
    opt = pb.NaturalGradient(model)
    model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
    with pytest.raises(pb.PullbackError, match="parameters were replaced"):
        opt.step(closure)


def test_an_objective_refuses_a_metric_it_would_not_use() -> None:
    model = nn.Linear(2, 1)
    weighted = pb.metrics.Weighted(pb.metrics.Euclidean(), 100.0)
    opt = pb.NaturalGradient(model, weighted)
    with pytest.raises(pb.PullbackError, match="does not go with an objective"):
        opt.step(objective=lambda p: p["weight"].sum(-1))


def test_spring_forgets_when_the_parameters_change() -> None:
    """Momentum of one layer is not applied to another of the same size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(DOUBLE)
    x = torch.randn(4, 2, dtype=DOUBLE)
    y = torch.randn(4, 2, dtype=DOUBLE)

    def step(opt: pb.NaturalGradient) -> None:
        def closure() -> Tensor:
            model.zero_grad()
            loss = 0.5 * (model(x) - y).square().sum(-1).mean()
            loss.backward()
            return loss

        opt.step(closure)

    with_memory = pb.NaturalGradient(
        model, solver=pb.solvers.Cholesky(0.1), step=pb.steps.Spring(0.9)
    )
    model[2].requires_grad_(False)
    step(with_memory)
    model[0].requires_grad_(False)
    model[2].requires_grad_(True)
    start = vector(model)
    step(with_memory)
    moved = vector(model)
    with torch.no_grad():
        for p, value in zip(model.parameters(), start.split([4, 2, 4, 2]), strict=True):
            p.copy_(value.view_as(p))
    step(pb.NaturalGradient(model, solver=pb.solvers.Cholesky(0.1)))
    assert_close(moved, vector(model), 1e-12, "step")


def test_the_stages_are_in_the_repr() -> None:
    text = repr(pb.NaturalGradient(nn.Linear(2, 1)))
    assert "Euclidean()" in text
    assert "Cholesky" in text
    assert "Backtracking" in text
