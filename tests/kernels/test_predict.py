"""The linearized model, and what training it by gradient flow predicts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError
from pullback.kernels import NTK, Tangent, linearize, ntk, predict
from pullback.solvers import Relative
from pullback.testing import assert_close
from tests.kernels.nets import build, dense, draw, inputs
from tests.laws.models import mlp


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("net", ["mlp", "conv2d", "attention", "torch attention", "tied", "pair"])
def test_the_linearized_model_is_the_first_order_one(net: str) -> None:
    model = build(net)
    x = inputs(net, 4)
    if isinstance(x, tuple):
        args = x
    else:
        args = (x,)
    j = dense(model, x)
    z = model(*args).detach()
    first = linearize(model)
    assert_close(first(*args), z, 1e-13, "at w₀")
    v = draw(j.shape[1], seed=1)
    moved = {
        n: p.detach() + piece
        for (n, p), piece in zip(
            model.named_parameters(), Tangent(model).space.split(v).values(), strict=True
        )
    }
    want = z + (j @ v).view(z.shape)
    assert_close(first(*args, params=moved), want, 1e-12, "f₀ + J(w − w₀)")
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, n in zip(first.weights.parameters(), moved, strict=True):
            p.copy_(moved[n])
    assert_close(first(*args), want, 1e-12, "with its own parameters")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_it_is_linear_and_trainable() -> None:
    model = build("mlp")
    x = inputs("mlp", 5)
    first = linearize(model)
    loss = first(x).square().sum()
    gradients = torch.autograd.grad(loss, list(first.weights.parameters()))
    j = dense(model, x)
    z = model(x).detach()
    assert_close(torch.cat([g.flatten() for g in gradients]), j.T @ (2 * z.flatten()), 1e-12, "Jᵀ∇")
    repeated = copy.deepcopy(first)
    repeated.load_state_dict(first.state_dict())
    assert torch.equal(repeated(x), first(x))


def test_some_parameters_alone() -> None:
    model = build("mlp")
    x = inputs("mlp", 5)
    first = linearize(model, {"0.weight": model.get_parameter("0.weight")})
    assert [n for n, p in first.weights.named_parameters() if p.requires_grad] == ["0.weight"]
    assert_close(first(x), model(x).detach(), 1e-13, "at w₀")


@pytest.mark.parametrize("t", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_prediction_is_gradient_flow_of_the_linearized_model(t: float, reduction: str) -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    y = draw(4, 2, seed=1)
    new = inputs("mlp", 3, seed=2)
    lr = 0.3
    kernel = NTK(Tangent(model))
    prediction = predict(kernel, x, y, new, t=lr * t, f0=model, reduction=reduction).mean
    j = dense(model, x)
    j2 = dense(model, new)
    if reduction == "mean":
        n = y.numel()
    else:
        n = 1
    # dw/dt = −η Jᵀ(f − y)/n for w, with f = f₀ + J w: an augmented matrix exponential
    p = j.shape[1]
    flow = torch.zeros(p + 1, p + 1).double()
    flow[:p, :p] = -0.3 * j.T @ j / n
    flow[:p, p] = 0.3 * j.T @ (y - model(x).detach()).flatten() / n
    w = torch.linalg.matrix_exp(t * flow)[:p, p]
    want = model(new).detach() + (j2 @ w).view(3, 2)
    assert_close(prediction, want, 1e-8, "f_t")


def test_the_end_of_training_interpolates() -> None:
    torch.manual_seed(0)
    model = mlp(3, 60, 2).double()
    x = draw(5, 3)
    y = draw(5, 2, seed=1)
    kernel = NTK(Tangent(model))
    assert_close(predict(kernel, x, y, x, f0=model).mean, y, 1e-8, "f_∞(x) = y")
    prediction = predict(kernel, x, y, x, f0=model, t=1e9).mean
    assert_close(prediction, y, 1e-8, "t → ∞")


@pytest.mark.parametrize("reg", [0.0, 0.3])
def test_gaussian_process_posterior(reg: float) -> None:
    torch.manual_seed(0)
    model = mlp(3, 60, 2).double()
    x = draw(5, 3)
    y = draw(5, 2, seed=1)
    new = draw(4, 3, seed=2)
    kernel = NTK(Tangent(model))
    prediction = predict(kernel, x, y, new, diag_reg=reg, covariance=True)
    j = dense(model, x)
    j2 = dense(model, new)
    k = j @ j.T + reg * torch.eye(10).double()
    assert_close(
        prediction.mean.flatten(), j2 @ j.T @ torch.linalg.solve(k, y.flatten()), 1e-7, "mean"
    )
    want = j2 @ j2.T - j2 @ j.T @ torch.linalg.solve(k, j @ j2.T)
    assert prediction.covariance is not None
    matrix = prediction.covariance.transpose(1, 2).reshape(8, 8)
    assert_close(matrix, want, 1e-6, "covariance")
    assert torch.equal(matrix, matrix.T)


def test_covariance_of_an_ensemble_in_time() -> None:
    """Against f_t of many initial functions drawn from the prior."""
    x = draw(4, 2)
    new = draw(3, 2, seed=1)
    y = draw(4, 1, seed=2)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.T + 1

    def prior(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b))

    inputs = torch.cat([x, new])
    root = torch.linalg.cholesky(prior(inputs, inputs))
    draws = draw(20000, 7, seed=3) @ root.T
    rates, u = torch.linalg.eigh(kernel(x, x))
    time = 2.0 / 4
    gain = torch.where(rates > 1e-12, -torch.expm1(-time * rates) / rates.clamp(min=1e-12), time)
    response = kernel(new, x) @ (u * gain) @ u.T
    final = draws[:, 4:] + (y[:, 0] - draws[:, :4]) @ response.T
    prediction = predict(kernel, x, y, new, t=2.0, covariance=True, prior=prior)
    assert_close(prediction.mean[:, 0], final.mean(0), 0.03, "mean")
    assert prediction.covariance is not None
    assert_close(prediction.covariance[:, :, 0, 0], torch.cov(final.T), 0.03, "covariance")


def test_scalar_kernels_act_on_each_output() -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    y = draw(4, 2, seed=1)
    new = inputs("mlp", 3, seed=2)

    def trace(a: Tensor, b: Tensor) -> Tensor:
        return ntk(model, a, b, layout="trace")

    prediction = predict(trace, x, y, new, diag_reg=0.1).mean
    k = trace(x, x) + 0.1 * torch.eye(4).double()
    assert_close(prediction, trace(new, x) @ torch.linalg.solve(k, y), 1e-10, "K ⊗ I")
    flat = predict(trace, x, y[:, 0], new, diag_reg=Relative(0.01)).mean
    k = trace(x, x) + 0.01 * trace(x, x).diagonal().mean() * torch.eye(4).double()
    assert_close(flat[:, 0], trace(new, x) @ torch.linalg.solve(k, y[:, 0]), 1e-10, "Relative")


def test_singular_kernels_leave_what_they_do_not_see() -> None:
    """Two equal inputs with different targets: the mean of the two is fitted."""
    x = torch.ones(2, 1).double()
    y = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    prediction = predict(lambda a, b: a @ b.T, x, y, torch.ones(1, 1).double()).mean
    assert_close(prediction, torch.tensor([[2.0]]).double(), 1e-12, "least squares")


def test_refusals() -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    y = draw(4, 2)
    kernel = NTK(Tangent(model))
    with pytest.raises(PullbackError, match="do not fit the kernel"):
        predict(kernel, x, y[:3], x)
    with pytest.raises(PullbackError, match="not finite"):
        predict(kernel, x, y * torch.nan, x)
    with pytest.raises(PullbackError, match="t is not usable"):
        predict(kernel, x, y, x, t=-1.0)
    with pytest.raises(PullbackError, match="Unknown reduction"):
        predict(kernel, x, y, x, reduction="none")
    with pytest.raises(PullbackError, match="diag_reg"):
        predict(kernel, x, y, x, diag_reg=-1.0)
    with pytest.raises(PullbackError, match="targets is empty"):
        predict(kernel, x, y[:0], x)
    with pytest.raises(PullbackError, match="does not fit the values"):
        predict(kernel, x, draw(4, 3), x)


def test_float32() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.randn(5, 3)
    y = torch.randn(5, 2)
    prediction = predict(NTK(Tangent(model)), x, y, x, t=1.0, f0=model, covariance=True)
    assert prediction.mean.dtype == torch.float32
    assert prediction.covariance is not None
    assert bool(torch.isfinite(prediction.covariance).all())


@pytest.mark.parametrize("t", [None, float("inf")])
def test_equal_inputs_at_the_end_of_training(t: float | None) -> None:
    """K is singular: directions it does not know stay as they are, and nothing is infinite."""
    kernel = NTK(Tangent(build("mlp")))
    x = inputs("mlp", 3)[[0, 0, 1, 2]]
    y = draw(4, 2)
    prediction = predict(kernel, x, y, x, t=t, covariance=True)
    assert_close(prediction.mean[:2], y[:2].mean(0).expand(2, 2), 1e-6, "the mean of both targets")
    assert prediction.covariance is not None
    assert bool(torch.isfinite(prediction.covariance).all())


def test_an_initial_function_that_does_not_fit() -> None:
    kernel = NTK(Tangent(build("mlp")))
    x = inputs("mlp", 4)
    with pytest.raises(PullbackError, match="initial function"):
        predict(kernel, x, draw(4, 2), x, f0=lambda a: a)


def test_the_linearized_model_keeps_its_mode() -> None:
    """Training loops call `train()`; f₀ has frozen statistics all the same."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with pytest.raises(PullbackError, match="couples the samples"):
        linearize(model)
    first = linearize(model.eval()).train()
    assert first.training
    assert_close(first(x := draw(5, 3)), model(x), 1e-13, "f₀")
