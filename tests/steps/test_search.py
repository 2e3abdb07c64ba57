"""Constant, GridLineSearch and Backtracking on problems that can be worked by hand."""

from __future__ import annotations

import pytest
import torch

from pullback.steps import Backtracking, Constant, GridLineSearch
from pullback.testing import assert_close
from tests.steps.helpers import Bowl, bowl


def stretched_bowl(factor: float, **options) -> Bowl:
    """The model is `factor`² too flat, so the best step size along x is 1/factor²."""
    problem = bowl(**options)
    a = problem.a
    b = problem.b
    problem.extra = lambda w: 0.5 * (factor**2 - 1) * (a @ w - b).square().sum()
    return problem


def test_constant_is_the_natural_gradient() -> None:
    problem = bowl()
    move = Constant(0.3).take(problem.local())
    want = problem.w - torch.linalg.lstsq(problem.a, problem.b[:, None]).solution[:, 0]
    assert move.accepted
    assert move.size == 1.0, "lr lives in the param groups"
    assert Constant(0.3).initial_lr == 0.3
    assert_close(move.direction, want, 1e-12, "w − x is the minimizer")


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 10.0])
def test_grid_takes_the_best_point_of_the_grid(factor: float) -> None:
    problem = stretched_bowl(factor)
    local = problem.local()
    move = GridLineSearch(points=12).take(local)
    sizes = [0.5**k for k in range(12)]
    losses = [float(problem.loss(problem.w - s * move.direction)) for s in sizes]
    best = min(range(12), key=losses.__getitem__)
    assert move.accepted
    assert move.size == sizes[best]
    assert move.loss == pytest.approx(losses[best], rel=1e-12)
    assert move.loss is not None
    assert move.loss < local.loss
    assert problem.trials == move.trials == 12
    # the parabola has its minimum where the gradient's true curvature says
    g = local.gradient
    x = move.direction
    exact = float(g @ x / (factor**2 * (problem.a @ x).square().sum()))
    assert abs(torch.log2(torch.tensor(move.size / exact))) <= 1


def test_grid_rejects_if_nothing_improves() -> None:
    """At the minimum of the loss the model still points somewhere: no size helps."""
    problem = bowl()
    where = problem.w.clone()
    problem.extra = lambda w: 1e3 * (w - where).abs().sum()  # a kink: every move raises it
    move = GridLineSearch().take(problem.local())
    assert not move.accepted
    assert move.size == 0.0
    assert move.loss is None
    assert "lowers the loss" in move.reason


def test_grid_steps_over_what_is_not_finite() -> None:
    problem = bowl()
    local = problem.local()
    true = local.losses
    local.losses = lambda moves: true(moves).index_fill(0, torch.tensor([0, 1]), float("nan"))
    move = GridLineSearch(points=6).take(local)
    assert move.accepted
    assert move.size == 0.25


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("c", [1e-4, 0.3])
@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_backtracking_satisfies_armijo(factor: float, c: float, lr: float) -> None:
    """The first size of the sequence that does: the one before it does not."""
    problem = stretched_bowl(factor, lr=lr)
    local = problem.local()
    rule = Backtracking(initial=2.0, shrink=0.5, c=c)
    move = rule.take(local)
    assert move.accepted
    slope = lr * float(local.gradient @ move.direction)

    def armijo(size: float) -> bool:
        loss = float(problem.loss(problem.w - lr * size * move.direction))
        return loss <= local.loss - c * size * slope

    sizes = [2.0 * 0.5**k for k in range(move.trials)]
    assert move.size == sizes[-1]
    assert [armijo(s) for s in sizes] == [False] * (len(sizes) - 1) + [True]
    assert move.loss == pytest.approx(
        float(problem.loss(problem.w - lr * move.size * move.direction)), rel=1e-12
    )


def test_backtracking_rejects_an_ascent_direction() -> None:
    problem = bowl()
    local = problem.local()
    true = local.solve

    def backwards(damping, about):
        direction = true(damping, about)
        return type(direction)(-direction.x, direction.damping)

    local.solve = backwards
    move = Backtracking(max_trials=5).take(local)
    assert not move.accepted
    assert problem.trials == 5
    assert "descend" in move.reason


@pytest.mark.parametrize("rule", [Constant(), GridLineSearch(), Backtracking()], ids=repr)
def test_a_failed_solve_is_a_rejection_with_its_sentence(rule) -> None:
    problem = Bowl(torch.zeros(2, 3).double(), torch.ones(2).double(), torch.ones(3).double())
    move = rule.take(problem.local())
    assert not move.accepted
    assert "damping" in move.reason
    assert problem.trials == 0
