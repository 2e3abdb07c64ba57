"""Rules of `steps/` along K-FAC's direction, against the dense Fisher matrix."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Adaptive
from pullback.steps import (
    Backtracking,
    Clip,
    Constant,
    GridLineSearch,
    LevenbergMarquardt,
    QuadraticModel,
    RatioDamping,
    Spring,
    Step,
    TargetRatio,
    TrustNorm,
)
from tests.kfac_options import kfac_of

from ..common import flat
from ..common import gram as dense
from .common import DOUBLE, batch, net, vector

LAMBDA = 1e-2


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)


def make(model: nn.Module, **options: Any) -> pb.KFAC:
    always = {"fisher": "exact", "statistics_every": 1, "invert_every": 1, "damping": LAMBDA}
    return kfac_of(model, likelihood=pb.likelihoods.Categorical(), **{**always, **options})


def loss_of(model: nn.Module) -> Tensor:
    x, y = batch(20)
    return F.cross_entropy(model(x), y)


def step(optimizer: pb.KFAC) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(optimizer.model)
        loss.backward()
        return loss

    optimizer.step(closure)


def direction_at(model: nn.Module, damping: float) -> Tensor:
    """K-FAC's direction without momentum, clip and step rule."""
    other = copy.deepcopy(model)
    before = vector(other)
    optimizer = make(other, lr=1.0, momentum=0.0, kl_clip=None, damping=damping)
    step(optimizer)
    optimizer.close()
    return before - vector(other)


def fisher(model: nn.Module) -> Tensor:
    z = model(batch(20)[0])
    p = z.detach().softmax(1)
    metric = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return dense(z, list(model.parameters()), metric / len(z))


def moved_loss(model: nn.Module, move: Tensor) -> float:
    other = copy.deepcopy(model)
    nn.utils.vector_to_parameters(vector(other) - move, other.parameters())
    return float(loss_of(other).detach())


def gradient(model: nn.Module) -> Tensor:
    return flat(torch.autograd.grad(loss_of(model), list(model.parameters())))


def take(model: nn.Module, rule: Step, **options: Any) -> tuple[Tensor, pb.KFAC]:
    before = vector(model)
    optimizer = make(model, step=rule, **options)
    step(optimizer)
    return before - vector(model), optimizer


def test_levenberg_marquardt_follows_the_dense_ratio() -> None:
    model = net()
    d = direction_at(model, LAMBDA)
    predicted = gradient(model) @ d - 0.5 * d @ fisher(model) @ d
    ratio = float((moved_loss(model, torch.zeros_like(d)) - moved_loss(model, d)) / predicted)
    move, optimizer = take(model, LevenbergMarquardt(LAMBDA, increase=3.0, decrease=0.5))
    torch.testing.assert_close(move, d)
    expected = RatioDamping(increase=3.0, decrease=0.5, smallest=1e-16, largest=1e8)
    assert optimizer.info.damping == pytest.approx(expected.next(LAMBDA, ratio, 3.0), rel=1e-9)


def test_levenberg_marquardt_inverts_again_where_the_loss_rises() -> None:
    """The direction that is taken is that of the larger damping."""
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    start = copy.deepcopy(model)
    rule = LevenbergMarquardt(1e-9, increase=10.0)
    move, optimizer = take(model, rule, damping=1.0, lr=3.0)
    assert optimizer.info.accepted
    used = optimizer._step_memory.inverted_damping  # pyright: ignore[reportOptionalMemberAccess]
    assert used > 1e-9
    torch.testing.assert_close(move, 3 * direction_at(start, used), rtol=1e-6, atol=1e-9)
    assert moved_loss(start, move) < moved_loss(start, 0 * move)


def test_a_trust_region_has_the_dense_length() -> None:
    model = net()
    d = direction_at(model, LAMBDA)
    matrix = fisher(model)
    move, _ = take(model, TrustNorm(1e-4))
    torch.testing.assert_close(move, d * (1e-4 / (d @ matrix @ d)) ** 0.5)


def test_a_line_search_takes_the_best_point_of_its_grid() -> None:
    model = net()
    start = copy.deepcopy(model)
    d = direction_at(model, LAMBDA)
    move, optimizer = take(model, GridLineSearch(6))
    size = optimizer.info.step_size
    assert size is not None
    torch.testing.assert_close(move, size * d)
    losses = [moved_loss(start, 2.0**-i * d) for i in range(6)]
    assert moved_loss(start, move) <= min(losses) + 1e-12


def test_backtracking_never_raises_the_loss() -> None:
    model = net()
    optimizer = make(model, step=Backtracking(), damping=1e-6)
    losses = [float(loss_of(model).detach())]
    for _ in range(5):
        step(optimizer)
        losses.append(float(loss_of(model).detach()))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("rule", [Constant(0.5), Clip(1e-2, Constant(0.5))])
def test_plain_steps(rule: Step) -> None:
    model = net()
    d = direction_at(model, LAMBDA)
    if isinstance(rule, Clip):
        d = d.clamp(-1e-2, 1e-2)
    move, _ = take(model, rule)
    torch.testing.assert_close(move, 0.5 * d)


def test_a_rejected_move_changes_no_parameter() -> None:
    model = net()
    before = vector(model)
    rule = LevenbergMarquardt(1e-9, tries=1)
    optimizer = make(model, step=rule, lr=1e4)
    step(optimizer)
    assert not optimizer.info.accepted
    assert torch.equal(vector(model), before)
    assert optimizer.info.damping > 1e-9


@pytest.mark.parametrize(
    ("rule", "need"), [(TargetRatio(), "one factorization"), (Spring(0.5), "nearest")]
)
def test_steps_that_need_more_are_refused(rule: Step, need: str) -> None:
    with pytest.raises(pb.PullbackError, match=need):
        make(net(), step=rule)


def test_two_controls_of_damping_are_refused() -> None:
    with pytest.raises(pb.PullbackError, match="both choose"):
        make(net(), step=LevenbergMarquardt(), damping=Adaptive(0.1))


@pytest.mark.parametrize(
    "rule",
    [LevenbergMarquardt(LAMBDA, QuadraticModel()), QuadraticModel(), TrustNorm(1e-3)],
    ids=["levenberg", "quadratic", "trust"],
)
def test_memory_is_saved(rule: Step) -> None:
    model = net()
    optimizer = make(model, step=rule, statistics_every=2, invert_every=4)
    for _ in range(3):
        step(optimizer)
    other_model = copy.deepcopy(model)
    other = make(other_model, step=copy.deepcopy(rule), statistics_every=2, invert_every=4)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        step(optimizer)
        step(other)
        assert torch.equal(vector(model), vector(other_model))
        assert optimizer.info.damping == other.info.damping
