"""Levenberg–Marquardt: the damping follows ρ = actual/predicted reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pullback import PullbackError
from pullback.solvers import Cholesky
from pullback.steps import LevenbergMarquardt
from pullback.testing import assert_close
from tests.steps.helpers import Bowl, bowl


def ratio(problem: Bowl, damping: float) -> float:
    """ρ at this damping, from scratch."""
    a = problem.a
    w = problem.w
    g = torch.func.grad(problem.loss)(w)
    x = torch.linalg.solve(a.T @ a + damping * torch.eye(len(w)).double(), g)
    predicted = g @ x - 0.5 * x @ (a.T @ a) @ x
    return float((problem.loss(w) - problem.loss(w - x)) / predicted)


def harder(strength: float) -> Bowl:
    """A quartic the model knows nothing of."""
    problem = bowl(solver=Cholesky(1e-3))
    problem.extra = lambda w: strength * w.pow(4).sum()
    return problem


def test_a_perfect_model_lowers_the_damping() -> None:
    problem = bowl(solver=Cholesky())
    rule = LevenbergMarquardt(0.3)
    move = rule.take(problem.local())
    assert move.accepted
    assert move.trials == 1
    assert problem.state["damping"] == pytest.approx(0.1)
    g = torch.func.grad(problem.loss)(problem.w)
    want = torch.linalg.solve(problem.a.T @ problem.a + 0.3 * torch.eye(4).double(), g)
    assert_close(move.direction, want, 1e-12, "the damped direction")
    assert move.loss == pytest.approx(float(problem.loss(problem.w - want)), rel=1e-12)


@pytest.mark.parametrize("strength", [1e-3, 0.03, 0.1, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("damping", [1e-3, 1.0, 30.0])
def test_the_damping_follows_the_ratio(strength: float, damping: float) -> None:
    problem = harder(strength)
    move = LevenbergMarquardt(damping).take(problem.local())
    expected = damping
    growth = 2.0
    trials = 1
    while not ratio(problem, expected) > 1e-4:
        expected = expected * growth
        growth = growth * 2
        trials = trials + 1
    rho = ratio(problem, expected)
    if rho > 0.75:
        factor = 1 / 3
    elif rho < 0.25:
        factor = growth
    else:
        factor = 1.0
    assert move.accepted
    assert move.trials == trials
    assert move.solution.damping == pytest.approx(expected, rel=1e-12)
    assert problem.state["damping"] == pytest.approx(expected * factor, rel=1e-12)
    assert move.loss is not None
    assert move.loss < float(problem.loss(problem.w))


@pytest.mark.parametrize("strength", [1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("target", [0.01, 0.5])
def test_with_a_target_the_least_damping_that_reaches_it_is_taken(
    strength: float, target: float
) -> None:
    problem = harder(strength)
    rule = LevenbergMarquardt(1e-3, decrease=1 / 16, target=target, tries=40)
    move = rule.take(problem.local())
    tried = [1e-3 * 2.0**i for i in range(40)]
    trials = next(i for i, damping in enumerate(tried) if ratio(problem, damping) > target)
    assert move.accepted
    assert move.trials == trials + 1
    assert move.solution.damping == pytest.approx(tried[trials], rel=1e-12)
    assert problem.state["damping"] == pytest.approx(tried[trials] / 16, rel=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [{"target": v} for v in (0.0, -1.0, float("nan"), 1.0, True)]
    + [{"tries": 2.5}, {"tries": 0}, {"bounds": (1,)}, {"bounds": None}],
)
def test_what_is_not_usable_is_named(arguments: Any) -> None:
    with pytest.raises(PullbackError, match=next(iter(arguments))):
        LevenbergMarquardt(**arguments)


def test_the_cases_above_meet_every_branch() -> None:
    branches = {
        "rejected" if rho <= 1e-4 else "bad" if rho < 0.25 else "fair" if rho <= 0.75 else "good"
        for s in (1e-3, 0.03, 0.1, 0.3, 1.0, 10.0)
        for d in (1e-3, 1.0, 30.0)
        for rho in [ratio(harder(s), d)]
    }
    assert branches == {"rejected", "bad", "fair", "good"}


def test_it_gives_up_and_keeps_the_raised_damping() -> None:
    problem = bowl(solver=Cholesky())
    where = problem.w.clone()
    problem.extra = lambda w: 1e6 * (w - where).abs().sum()
    rule = LevenbergMarquardt(1.0, tries=4)
    move = rule.take(problem.local())
    assert not move.accepted
    assert move.trials == problem.trials == 4
    assert problem.state["damping"] == 1.0 * 2 * 4 * 8 * 16
    assert "did not fall" in move.reason


def test_damping_stays_in_its_bounds() -> None:
    problem = bowl(solver=Cholesky())
    LevenbergMarquardt(1e-3, bounds=(1e-3, 1.0)).take(problem.local())
    assert problem.state["damping"] == 1e-3


def test_it_converges_on_rosenbrock() -> None:
    """Residuals (1 − x, 10(y − x²)): the classical valley, in a few dozen steps."""
    w = torch.tensor([-1.2, 1.0]).double()
    state = {}
    rule = LevenbergMarquardt(1e-2)
    for _ in range(60):

        def residual(v: torch.Tensor) -> torch.Tensor:
            return torch.stack([1 - v[0], 10 * (v[1] - v[0] ** 2)])

        a = torch.func.jacrev(residual)(w)
        problem = Bowl(a, a @ w - residual(w), w, solver=Cholesky(), state=state)
        problem.loss = lambda v: 0.5 * residual(v).square().sum()
        move = rule.take(problem.local())
        if move.accepted:
            w = w - move.direction
    assert_close(w, torch.ones(2).double(), 1e-8, "the minimum (1, 1)")
