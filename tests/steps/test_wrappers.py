"""Wrappers: TrustNorm, Clip and Spring change the direction that the inner step sees."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pullback as pb
from pullback.likelihoods import Categorical
from pullback.metrics import Fisher
from pullback.solvers import Cholesky
from pullback.steps import Clip, Constant, GridLineSearch, LevenbergMarquardt, Spring, TrustNorm
from pullback.testing import assert_close
from tests.laws.models import mlp
from tests.steps.helpers import bowl


@pytest.mark.parametrize("limit", [1e-4, 0.1, 1e6])
@pytest.mark.parametrize("lr", [1.0, 0.2])
def test_trust_norm_bounds_the_move_in_the_metric(limit: float, lr: float) -> None:
    problem = bowl(lr=lr)
    free = Constant().take(problem.local()).direction
    x = TrustNorm(limit).take(problem.local()).direction
    length = float((problem.a @ (lr * x)).square().sum())
    unbounded = float((problem.a @ (lr * free)).square().sum())
    assert length <= limit * (1 + 1e-12)
    assert length == pytest.approx(min(limit, unbounded), rel=1e-10), "and no shorter than needed"
    assert_close(x / x.norm(), free / free.norm(), 1e-12, "only the length changes")


def test_trust_norm_bounds_the_divergence() -> None:
    """With the Fisher metric it is the KL clip: KL(new ‖ old) ≈ ½·limit."""
    torch.manual_seed(0)
    model = mlp(3, 6, 3).double()
    x = torch.randn(20, 3).double()
    y = torch.arange(20) % 3
    before = torch.log_softmax(model(x), -1).detach()
    limit = 1e-8
    opt = pb.NaturalGradient(model, Fisher(Categorical()), Cholesky(1e-4), TrustNorm(limit))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert opt.step(closure).accepted
    after = torch.log_softmax(model(x), -1).detach()
    kl = float((before.exp() * (before - after)).sum(-1).mean())
    assert kl == pytest.approx(0.5 * limit, rel=0.02)


def test_clip_cuts_every_entry() -> None:
    problem = bowl()
    free = Constant().take(problem.local()).direction
    bound = float(free.abs().median())
    x = Clip(bound).take(problem.local()).direction
    assert torch.equal(x, free.clamp(-bound, bound))
    assert float(x.abs().max()) == bound


@pytest.mark.parametrize("damping", [1e-3, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.99])
def test_spring_is_its_minimization_problem(damping: float, momentum: float) -> None:
    """x = argmin ‖A x − r‖² + λ‖x − μ x_prev‖², solved as one stacked least squares."""
    state: dict = {}
    previous = torch.zeros(7).double()
    rule = Spring(momentum)
    for seed in range(4):  # four batches of three samples each: A has a null space
        problem = bowl(seed=seed, n=3, p=7, solver=Cholesky(damping), state=state)
        r = problem.a @ problem.w - problem.b
        eye = damping**0.5 * torch.eye(7).double()
        stacked = torch.cat([problem.a, eye])
        rhs = torch.cat([r, momentum * (eye @ previous)])
        want = torch.linalg.lstsq(stacked, rhs[:, None]).solution[:, 0]
        move = rule.take(problem.local())
        assert_close(move.direction, want, 1e-8, f"batch {seed}")
        previous = move.direction


def test_spring_keeps_what_the_batch_says_nothing_about() -> None:
    state: dict = {}
    rule = Spring(0.9)
    one = rule.take(bowl(seed=0, n=2, p=5, solver=Cholesky(1e-9), state=state).local()).direction
    problem = bowl(seed=1, n=2, p=5, solver=Cholesky(1e-9), state=state)
    two = rule.take(problem.local()).direction
    null = torch.eye(5).double() - torch.linalg.pinv(problem.a) @ problem.a
    assert_close(null @ two, 0.9 * (null @ one), 1e-5, "μ x_prev in the null space")


def test_spring_remembers_only_what_was_accepted() -> None:
    state: dict = {}
    problem = bowl(state=state)
    where = problem.w.clone()
    problem.extra = lambda w: 1e3 * (w - where).abs().sum()
    assert not Spring(0.9, GridLineSearch()).take(problem.local()).accepted
    assert state["count"] == 0
    assert not state["previous"].any()


def test_spring_through_the_optimizer() -> None:
    """Two steps of the optimizer, whitened, in sample space, against the explicit minimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1, bias=False).double()
    opt = pb.NaturalGradient(model, solver=Cholesky(0.1), step=Spring(0.8), gram="kernel")
    previous = torch.zeros(6).double()
    for _ in range(3):
        x = torch.randn(4, 6).double()
        t = torch.randn(4, 1).double()
        w = model.weight.detach().flatten().clone()

        def closure(x=x, t=t) -> Tensor:
            opt.zero_grad()
            loss = 0.5 * (model(x) - t).square().sum(1).mean()
            loss.backward()
            return loss

        info = opt.step(closure)
        assert info.whitened
        # 1/√4 each
        a = x / 2
        r = (x @ w - t[:, 0]) / 2
        eye = 0.1**0.5 * torch.eye(6).double()
        rhs = torch.cat([r, eye @ (0.8 * previous)])
        previous = torch.linalg.lstsq(torch.cat([a, eye]), rhs[:, None]).solution[:, 0]
        assert_close(w - model.weight.detach().flatten(), previous, 1e-10, "SPRING")


def test_wrappers_nest() -> None:
    """Each sees what the next one out has left: clip first, then bound the length."""
    problem = bowl()
    free = Constant().take(problem.local()).direction
    inner = Clip(0.1).take(problem.local()).direction
    x = Clip(0.1, TrustNorm(1e-3)).take(problem.local()).direction
    assert_close(
        x, inner * (1e-3 / (problem.a @ inner).square().sum()) ** 0.5, 1e-12, "clip, bound"
    )
    searched = TrustNorm(1e-3, GridLineSearch()).take(problem.local())
    assert searched.accepted
    assert float((problem.a @ searched.direction).square().sum()) <= 1e-3 * (1 + 1e-12)
    assert Clip(1.0, Constant(0.3)).initial_lr == 0.3
    assert not torch.equal(free, inner)


def test_an_inner_rule_has_its_own_memory() -> None:
    problem = bowl(solver=Cholesky())
    Spring(0.5, LevenbergMarquardt(0.3)).take(problem.local())
    assert problem.state["inner"]["damping"] == pytest.approx(0.1)
    assert problem.state["count"] == 1
