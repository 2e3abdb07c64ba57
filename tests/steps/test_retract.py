"""Retractions: Bounds, Sphere, PositiveDefinite, and what the optimizer does with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.steps import Bounds, GridLineSearch, PositiveDefinite, Sphere, retraction
from pullback.testing import assert_close


def test_box_clips_and_is_idempotent() -> None:
    w = torch.tensor([-2.0, 0.1, 3.0])
    assert Bounds(-1, 1)(w).tolist() == pytest.approx([-1, 0.1, 1])
    assert torch.equal(Bounds(-1, 1)(Bounds(-1, 1)(w)), Bounds(-1, 1)(w))
    assert Bounds(lower=0)(w).tolist() == pytest.approx([0, 0.1, 3])
    assert torch.equal(Bounds()(w), w)


def test_sphere_projects_back() -> None:
    w = torch.tensor([[3.0, 0.0], [0.0, 4.0]]).double()
    assert_close(Sphere(2.0)(w), w * 2 / 5, 1e-15, "w · radius/‖w‖")
    assert bool(torch.isfinite(Sphere()(torch.zeros(3))).all())


def test_positive_definite_keeps_what_is_inside_to_the_bit() -> None:
    w = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    assert torch.equal(PositiveDefinite()(w), w)
    batch = torch.stack([w, 3 * w])
    assert torch.equal(PositiveDefinite()(batch), batch)


@pytest.mark.parametrize("floor", [1e-8, 0.1])
def test_positive_definite_raises_the_eigenvalues_that_are_too_low(floor: float) -> None:
    q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()).Q
    values = torch.tensor([-1.0, 0.0, 5.0]).double()
    w = q @ values.diag() @ q.T
    out = PositiveDefinite(floor)(w)
    assert_close(out, out.T, 1e-14, "symmetric")
    energy = torch.linalg.eigvalsh(out)
    assert float(energy[0]) >= floor
    assert float(energy[1]) <= 3 * floor
    assert float(energy[2]) == pytest.approx(5.0)
    repeated = PositiveDefinite(floor)(out)
    assert_close(repeated, out, 1e-12, "idempotent")
    lopsided = w + torch.tensor([[0.0, 1, 0], [-1, 0, 0], [0, 0, 0]]).double()
    assert_close(PositiveDefinite(floor)(lopsided), out, 1e-12, "the skew part is dropped")


class Point(nn.Module):
    """z_n = x_n · w: the loss pulls w where we like."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)
        self.free = nn.Parameter(torch.zeros(()).double())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w.flatten())[:, None] + self.free


def pull(retract, w: Tensor, target: Tensor, **options) -> tuple[Point, pb.StepInfo]:
    model = Point(w.clone())
    x = torch.eye(w.numel()).double()
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(1e-6), retract=retract, **options)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (model(x)[:, 0] - target.flatten()).square().mean()
        loss.backward()
        return loss

    return model, opt.step(closure)


@pytest.mark.parametrize("options", [{}, {"step": GridLineSearch()}], ids=["constant", "search"])
def test_a_step_ends_where_the_retraction_says(options) -> None:
    w = torch.tensor([0.6, 0.8]).double()
    model, info = pull({"w": Sphere()}, w, torch.tensor([3.0, 0.0]).double(), **options)
    assert info.accepted
    assert float(model.w.detach().norm()) == pytest.approx(1.0)
    model, _ = pull({"w": Bounds(0, 1)}, w, torch.tensor([3.0, -3.0]).double(), **options)
    assert bool((model.w >= 0).all() and (model.w <= 1).all())
    spd = torch.eye(2).double()
    goal = torch.tensor([[-1.0, 0.3], [0.3, 2.0]]).double()
    model, _ = pull({"w": PositiveDefinite(1e-3)}, spd, goal, **options)
    assert float(torch.linalg.eigvalsh(model.w.detach())[0]) >= 1e-3


def test_trials_are_judged_after_the_retraction() -> None:
    """The search's loss is the loss at the retracted point, and the point is the one reached."""
    target = torch.tensor([3.0, 0.0]).double()
    model, info = pull(
        {"w": Sphere()}, torch.tensor([0.6, 0.8]).double(), target, step=GridLineSearch()
    )
    x = torch.eye(2).double()
    reached = 0.5 * (model(x)[:, 0] - target).square().mean()
    assert info.new_loss == pytest.approx(float(reached.detach()), rel=1e-12)


def test_a_retraction_may_see_all_parameters() -> None:
    def together(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"w": params["w"] - params["w"].mean(), "free": params["free"]}

    model, _ = pull(together, torch.ones(3).double(), torch.tensor([1.0, 2.0, 6.0]).double())
    assert float(model.w.detach().sum()) == pytest.approx(0, abs=1e-12)
    assert float(model.free.detach()) != 0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(pb.PullbackError, match="'v'"):
        retraction({"v": Sphere()}, ("w",))
