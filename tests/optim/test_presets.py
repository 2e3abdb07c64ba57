"""Presets are compositions: they do what the composition says, and converge."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from .common import DOUBLE, assert_close, closure_of, data, gradient, mlp, mse_gram, vector


@pytest.mark.parametrize("samples", [3, 30], ids=["interpolating", "overdetermined"])
def test_gauss_newton_lands_on_least_squares(samples: int) -> None:
    model = nn.Linear(3, 2, dtype=DOUBLE)
    x, y = data(samples)
    opt = pb.GaussNewton(model)
    assert isinstance(opt, pb.NaturalGradient)
    before = vector(model)
    info = opt.step(closure_of(opt, model, x, y))
    ones = torch.cat([x, torch.ones(samples, 1, dtype=DOUBLE)], 1)
    best = ones @ torch.linalg.lstsq(ones, y).solution
    assert torch.allclose(model(x), best, atol=1e-11)
    assert info.rank == 2 * min(samples, 4)
    if samples == 3:  # of all interpolating weights the nearest to the first
        w = torch.linalg.pinv(ones) @ (
            y - ones @ torch.cat([before[:6].view(2, 3).T, before[6:][None]])
        )
        assert_close(vector(model) - before, torch.cat([w[:3].T.flatten(), w[3]]))


def test_gauss_newton_scales_by_lr_and_takes_options() -> None:
    model = mlp()
    x, y = data(40)
    params = list(model.parameters())
    z = model(x)
    g = gradient(F.mse_loss(z, y), params)
    want = 0.25 * torch.linalg.pinv(mse_gram(z, params), hermitian=True, rtol=1e-14) @ g
    opt = pb.GaussNewton(model, lr=0.25, gram="rows")
    before = vector(model)
    assert opt.step(closure_of(opt, model, x, y)).gram == "rows"
    assert_close(before - vector(model), want, 1e-4)


def test_gauss_newton_of_a_likelihood_is_irls() -> None:
    """One Fisher step of logistic regression against Newton's method by autograd."""
    model = nn.Linear(3, 1, dtype=DOUBLE)
    x = torch.randn(40, 3, dtype=DOUBLE)
    y = torch.randint(0, 2, (40, 1)).double()

    def loss(w: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x @ w[:3, None] + w[3], y)

    w = vector(model)
    hessian = torch.autograd.functional.hessian(loss, w)
    slope = torch.autograd.functional.jacobian(loss, w)
    assert isinstance(hessian, Tensor)
    assert isinstance(slope, Tensor)
    want = w - torch.linalg.solve(hessian, slope)
    opt = pb.GaussNewton(model, pb.likelihoods.Bernoulli())
    opt.step(closure_of(opt, model, x, y, F.binary_cross_entropy_with_logits))
    assert_close(vector(model), want, 1e-10)


def test_levenberg_marquardt_never_climbs_and_converges() -> None:
    model = mlp(1, 8, 1)
    x = torch.linspace(-1, 1, 20, dtype=DOUBLE)[:, None]
    y = torch.sin(3 * x)
    opt = pb.DampedGaussNewton(model, damping=1e-2)
    losses = []
    dampings = []
    for _ in range(40):
        info = opt.step(closure_of(opt, model, x, y))
        losses.append(info.loss)
        dampings.append(info.damping)
    assert all(b <= a for a, b in pairwise(losses))
    assert losses[-1] < 1e-4 * losses[0]
    assert dampings[0] == 1e-2
    assert min(dampings) < 1e-2


def test_levenberg_marquardt_raises_its_damping_where_the_model_is_wrong() -> None:
    model = mlp()
    x, y = data(20)
    opt = pb.DampedGaussNewton(model, damping=1e-8)
    info = opt.step(closure_of(opt, model, x * 5, y))
    assert info.accepted
    assert info.trials > 1
    assert info.damping > 1e-8


def test_hessian_free_is_matrix_free_and_learns() -> None:
    model = mlp(3, 8, 3)
    x = torch.randn(60, 3, dtype=DOUBLE)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    opt = pb.HessianFree(model, pb.likelihoods.Categorical())
    infos = [opt.step(closure_of(opt, model, x, y, F.cross_entropy)) for _ in range(15)]
    assert {i.gram for i in infos} == {"matrix_free"}
    assert infos[-1].loss < 0.1 * infos[0].loss


@pytest.mark.parametrize(
    "make",
    [
        lambda m, **o: pb.GaussNewton(m, **o),
        lambda m, **o: pb.DampedGaussNewton(m, **o),
        lambda m, **o: pb.HessianFree(m, pb.likelihoods.MSE(), **o),
    ],
    ids=["GaussNewton", "DampedGaussNewton", "HessianFree"],
)
def test_presets_pass_options_on(make) -> None:
    model = mlp()
    x, y = data()
    opt = make(model, params=model[2].parameters())
    body = vector(model[0])
    assert opt.step(closure_of(opt, model, x, y)).parameters == 12
    assert torch.equal(body, vector(model[0]))
    with pytest.raises(TypeError):
        make(mlp(), no_such_option=1)
