"""A rejected step has changed nothing: parameters, buffers, random state, gradients' truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.solvers import Cholesky, PseudoInverse
from pullback.steps import Backtracking, GridLineSearch, LevenbergMarquardt, Spring, TargetRatio

RULES = {
    "grid": (GridLineSearch(points=5), Cholesky(1e-3)),
    "backtracking": (Backtracking(max_trials=4), Cholesky(1e-3)),
    "levenberg-marquardt": (LevenbergMarquardt(tries=3), Cholesky(1e-3)),
    "target ratio": (TargetRatio(radii=5), PseudoInverse()),
    "spring": (Spring(0.9, GridLineSearch(points=5)), Cholesky(1e-3)),
}


class Net(nn.Module):
    """Dropout draws random numbers; one buffer is written in place, another is replaced."""

    written: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 2))
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + torch.rand(())
        return self.body(x)


def picture(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[n], two[n]) for n in one)


def make(rule: str) -> tuple[Net, pb.NaturalGradient, Tensor]:
    torch.manual_seed(0)
    model = Net().double().train()
    step, solver = RULES[rule]
    return model, pb.NaturalGradient(model, solver=solver, step=step), torch.randn(5, 3).double()


@pytest.mark.parametrize("rule", RULES)
def test_a_rejected_step_restores_everything(rule: str) -> None:
    model, opt, x = make(rule)
    anchor = [p.detach().clone() for p in model.parameters()]

    def closure() -> Tensor:
        """Any move raises this loss."""
        opt.zero_grad()
        away = sum((p - a).abs().sum() for p, a in zip(model.parameters(), anchor, strict=True))
        loss = model(x).square().mean() + 1e4 * away
        loss.backward()
        return loss

    torch.manual_seed(42)
    before = picture(model)
    random = torch.get_rng_state()
    info = opt.step(closure)
    assert not info.accepted
    assert info.reason
    assert info.step_size == 0
    assert same(picture(model), before), "parameters or buffers changed"
    assert torch.equal(torch.get_rng_state(), random), "the random state changed"


@pytest.mark.parametrize("rule", RULES)
def test_an_accepted_step_counts_one_forward_pass(rule: str) -> None:
    """Trials leave buffers and random state as the one closure call left them."""
    model, opt, x = make(rule)
    twin, other, _ = make("grid")

    def loss_of(net: Net, optimizer: pb.NaturalGradient) -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) - 1).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(42)
    info = opt.step(lambda: loss_of(model, opt))
    assert info.accepted, info.reason
    random = torch.get_rng_state()
    torch.manual_seed(42)
    loss_of(twin, other)
    assert torch.equal(torch.get_rng_state(), random), "the random state is not the closure's"
    for name in ("written", "replaced"):
        assert torch.equal(getattr(model, name), getattr(twin, name)), f"buffer {name!r}"
    assert float(model.written) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_a_clean_rejection(bad: float) -> None:
    model, opt, x = make("grid")

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean() * bad
        loss.backward()
        return loss

    torch.manual_seed(42)
    before = picture(model)
    random = torch.get_rng_state()
    info = opt.step(closure)
    assert not info.accepted
    assert "not finite" in info.reason
    assert same(picture(model), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_singular_system_is_a_clean_rejection() -> None:
    """No output feels the parameters: there is no direction, and the remedy is named."""
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.zeros(3, 2).double()
    opt = pb.NaturalGradient(model, solver=PseudoInverse())
    before = picture(model)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    info = opt.step(closure)
    assert not info.accepted
    assert info.status is pb.Status.SINGULAR
    assert "damping" in info.reason
    assert same(picture(model), before)


def test_the_next_step_after_a_rejection_is_as_if_nothing_had_been() -> None:
    """Levenberg–Marquardt only remembers its damping."""
    model, opt, x = make("levenberg-marquardt")
    anchor = [p.detach().clone() for p in model.parameters()]
    hard = [True]

    def closure() -> Tensor:
        opt.zero_grad()
        away = sum((p - a).abs().sum() for p, a in zip(model.parameters(), anchor, strict=True))
        loss = (model(x) - 1).square().mean() + (1e4 * away if hard[0] else 0)
        loss.backward()
        return loss

    torch.manual_seed(42)
    assert not opt.step(closure).accepted
    hard[0] = False
    info = opt.step(closure)
    assert info.accepted
    assert info.damping > 1e-3, "the damping that was raised is where the next step starts"
