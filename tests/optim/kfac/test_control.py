"""Steps that look at the loss again: adaptive damping, and rates from the quadratic model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import pullback as pb
from pullback.optim.kfac import Adaptive


def classifier() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4)).double()
    return model, torch.randn(20, 6, dtype=torch.float64), torch.randint(0, 4, (20,))


def made(model: nn.Module, x: Tensor, y: Tensor, **options):
    opt = pb.KFAC(
        model, likelihood=pb.likelihoods.Categorical(), statistics_every=1, invert_every=1,
        fisher="exact", **options,
    )  # fmt: skip

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return opt, closure


def dense_fisher(model: nn.Module, x: Tensor) -> Tensor:
    model = copy.deepcopy(model)
    params = {n: p.detach() for n, p in model.named_parameters()}
    jacobians = jacrev(lambda p: functional_call(model, p, (x,)))(params)
    j = torch.cat([v.reshape(*v.shape[:2], -1) for v in jacobians.values()], 2)
    p = torch.softmax(model(x).detach(), 1)
    m = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("nap,nab,nbq->pq", j, m, j) / len(x)


def flat(tensors) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def test_the_quadratic_model_finds_the_best_rate_and_momentum() -> None:
    model, x, y = classifier()
    opt, closure = made(model, x, y, lr=1.0, damping=1e-2, step=pb.steps.QuadraticModel())
    opt.step(closure)
    for _ in range(3):
        last = flat([opt.state[p]["momentum"] for p in model.parameters()])
        before = flat(model.parameters())
        fisher = dense_fisher(model, x) + 1e-2 * torch.eye(len(before), dtype=torch.float64)
        opt.step(closure)
        # the move must solve the 2×2 system of direction and last move
        move = before - flat(model.parameters())
        gradient = flat([p.grad for p in model.parameters()])
        alpha, beta = opt.info.step_size, opt.info.momentum
        assert alpha is not None
        assert beta is not None
        direction = (move - beta * last) / alpha
        span = torch.stack([direction, last])
        best = torch.linalg.solve(span @ fisher @ span.T, span @ gradient)
        assert torch.allclose(best, torch.tensor([alpha, beta], dtype=best.dtype), rtol=1e-6)


def test_adaptive_damping_follows_the_ratio() -> None:
    model, x, y = classifier()
    opt, closure = made(model, x, y, lr=1.0, damping=Adaptive(1.0), momentum=0.0)
    before, start = flat(model.parameters()), copy.deepcopy(model)
    loss = float(opt.step(closure).detach())
    move = before - flat(model.parameters())
    gradient = flat([p.grad for p in model.parameters()])
    fisher = dense_fisher(start, x)
    predicted = gradient @ move - 0.5 * move @ fisher @ move
    after = float(F.cross_entropy(model(x), y).detach())
    assert opt.info.ratio == pytest.approx((loss - after) / float(predicted), rel=1e-6)
    assert opt.info.damping == pytest.approx(1 / 1.5)  # the model was good


def test_a_step_that_raises_the_loss_is_taken_back() -> None:
    model, x, y = classifier()
    opt, closure = made(model, x, y, lr=0.1, damping=Adaptive(1e-2))
    opt.step(closure)
    for group in opt.param_groups:
        group["lr"] = 1e3
    before = flat(model.parameters())
    damping = opt.info.damping
    opt.step(closure)
    assert not opt.info.accepted
    assert "rose" in opt.info.reason
    assert opt.info.damping > damping
    assert torch.equal(flat(model.parameters()), before)
    assert not flat([opt.state[p]["momentum"] for p in model.parameters()]).any()


@pytest.mark.parametrize(
    "options", [{"damping": Adaptive(0.1)}, {"step": pb.steps.QuadraticModel()}]
)
def test_controlled_steps_need_a_closure(options) -> None:
    model, x, y = classifier()
    opt, closure = made(model, x, y, lr=1.0, **options)
    closure()
    with pytest.raises(pb.PullbackError, match="needs a closure"):
        opt.step()


def test_controlled_steps_lower_the_loss_with_dropout_and_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    )
    _, x, y = classifier()
    opt, closure = made(
        model, x.float(), y, lr=1.0, damping=Adaptive(0.1), step=pb.steps.QuadraticModel()
    )
    losses = [float(opt.step(closure).detach()) for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]


def test_quadratic_model_in_the_exact_natural_gradient() -> None:
    """With one direction and no damping the best rate of the Newton step of a quadratic is 1."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    opt = pb.NaturalGradient(
        model, pb.metrics.Fisher(pb.likelihoods.MSE()),
        solver=pb.solvers.Cholesky(damping=1e-1), step=pb.steps.QuadraticModel(),
    )  # fmt: skip

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    infos = [opt.step(closure) for _ in range(12)]
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    best = F.mse_loss(inputs @ torch.linalg.lstsq(inputs, y).solution, y)
    assert float(infos[-1].loss) <= float(best) * (1 + 1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"step": pb.steps.QuadraticModel()}]
)
def test_adaptive_damping_does_not_get_stuck(options) -> None:
    model, x, y = classifier()
    opt, closure = made(model, x, y, lr=1.0, damping=Adaptive(1e-3), **options)
    taken = 0
    for _ in range(30):
        loss = opt.step(closure)
        taken += opt.info.accepted
    assert taken > 10
    assert float(loss.detach()) < 0.3


def test_rejections_raise_the_damping_whatever_the_model_said() -> None:
    """Where both the loss and the model rise, their ratio is positive and tells nothing."""
    model, x, y = classifier()
    opt, closure = made(model, x, y, lr=50.0, damping=Adaptive(1e-2), momentum=0.0)
    dampings = []
    for _ in range(4):
        opt.step(closure)
        assert not opt.info.accepted
        dampings.append(opt.info.damping)
    assert dampings == sorted(set(dampings))


def test_invariant_damping_does_not_go_with_corrected_eigenvalues() -> None:
    with pytest.raises(pb.PullbackError, match="Corrected eigenvalues"):
        pb.KFAC(nn.Linear(2, 2), lr=0.1, ekfac=True, damping=pb.optim.kfac.Invariant(0.1))


class Undeclared(pb.metrics.Metric):
    """Blocks between samples which nobody was told of."""

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> pb.metrics.Factor:
        return pb.metrics.Sobolev(2.0).factor(z, inputs=inputs)


def test_a_metric_that_couples_samples_and_does_not_declare_it_is_refused() -> None:
    model, x, _ = classifier()
    opt = pb.KFAC(model, lr=0.1, metric=Undeclared())
    with opt, pytest.raises(pb.PullbackError, match="couples the samples"):
        model(x).sum().backward()


class Ridge(pb.optim.kfac.Damping):
    """A damping of one's own, which knows but whole sides."""

    def sides(self, pair, reference, value, *, spare=False):
        eyes = [torch.eye(n, dtype=pair.left.dtype) for n in pair.shape[1:]]
        return pair.left + value * eyes[0], pair.right + value * eyes[1]


def test_a_damping_of_ones_own() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    opt = pb.KFAC(model, lr=1.0, damping=Ridge(0.3), momentum=0.0, fisher="exact", ema=0.5)
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    start = [p.detach().clone() for p in model.parameters()]
    (0.5 * (model(x) - y).square().sum(1).mean()).backward()
    opt.step()
    a = torch.cat([x, torch.ones(9, 1, dtype=torch.float64)], 1)
    eye = torch.eye(4, dtype=torch.float64)
    gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)  # pyright: ignore
    want = gradient / 1.3 @ torch.linalg.inv(a.T @ a / 9 + 0.3 * eye)
    moved = torch.cat([start[0] - model.weight, (start[1] - model.bias)[:, None]], 1)
    torch.testing.assert_close(moved, want)
