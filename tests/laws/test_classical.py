"""Where the natural gradient is a classical algorithm, it lands where that algorithm lands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from pullback.metrics import Euclidean, Fisher
from pullback.testing import assert_close
from tests.laws.table import FORMS


def regression(n: int, d: int, m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, m, generator=generator, dtype=torch.float64)


def step(opt: pb.NaturalGradient, loss) -> pb.StepInfo:
    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return opt.step(closure)


@pytest.mark.parametrize("form", FORMS)
def test_gauss_newton_on_a_linear_model_is_least_squares(form: str) -> None:
    x, t = regression(12, 3, 2)
    model = nn.Linear(3, 2).double()
    step(pb.GaussNewton(model, gram=form), lambda: F.mse_loss(model(x), t))
    design = torch.cat([x, torch.ones(12, 1).double()], 1)
    want = torch.linalg.lstsq(design, t).solution
    assert_close(model.weight, want[:-1].T, 1e-10, "weight = least squares")
    assert_close(model.bias, want[-1], 1e-10, "bias = least squares")


@pytest.mark.parametrize("form", FORMS)
def test_gauss_newton_interpolates_by_the_shortest_move(form: str) -> None:
    """p > n: the model fits exactly, and the move is the minimum-norm one."""
    x, t = regression(3, 6, 2)
    model = nn.Linear(6, 2, bias=False).double()
    before = model.weight.detach().clone()
    step(pb.GaussNewton(model, gram=form), lambda: F.mse_loss(model(x), t))
    assert_close(model(x), t, 1e-9, "interpolation")
    want = before + (torch.linalg.pinv(x) @ (t - x @ before.T)).T
    assert_close(model.weight, want, 1e-9, "minimum-norm move")


@pytest.mark.parametrize(
    ("metric", "loss"),
    [
        (Euclidean(), lambda z, t: 0.5 * ((z - t) ** 2).sum(1).mean()),
        (Fisher(Gaussian(0.1)), lambda z, t: 5 * ((z - t) ** 2).sum(1).mean()),
    ],
    ids=["Euclidean", "Gaussian"],
)
def test_the_scale_of_loss_and_metric_match(metric, loss) -> None:
    """With metric and loss of the same scale, lr = 1 is the full Gauss–Newton step."""
    x, t = regression(12, 3, 2)
    model = nn.Linear(3, 2, bias=False).double()
    opt = pb.NaturalGradient(model, metric, pb.solvers.PseudoInverse())
    step(opt, lambda: loss(model(x), t))
    assert_close(model.weight, torch.linalg.lstsq(x, t).solution.T, 1e-10, "least squares")


@pytest.mark.parametrize("form", FORMS)
def test_fisher_step_of_logistic_regression_is_irls(form: str) -> None:
    x, _ = regression(20, 3, 1)
    y = (torch.arange(20) % 3 == 0).double()
    model = nn.Linear(3, 1, bias=False).double()
    w = model.weight.detach().flatten().clone()
    opt = pb.NaturalGradient(model, Fisher(Bernoulli()), pb.solvers.PseudoInverse(), gram=form)
    for _ in range(3):
        step(opt, lambda: F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y))
        # iteratively reweighted least squares: (XᵀWX)⁻¹XᵀW(Xw + W⁻¹(y − p))
        eta = x @ w
        p = 1 / (1 + torch.exp(-eta))
        weights = p * (1 - p)
        working = eta + (y - p) / weights
        root = weights.sqrt()
        w = torch.linalg.lstsq(root[:, None] * x, (root * working)[:, None]).solution.flatten()
        assert_close(model.weight.flatten(), w, 1e-10, "IRLS")


def test_fisher_step_of_poisson_regression_is_irls() -> None:
    x, _ = regression(20, 3, 1)
    y = (torch.arange(20) % 4).double()
    model = nn.Linear(3, 1, bias=False).double()
    w = model.weight.detach().flatten().clone()
    opt = pb.NaturalGradient(model, Fisher(Poisson()), pb.solvers.PseudoInverse())
    step(opt, lambda: F.poisson_nll_loss(model(x).squeeze(-1), y))
    rate = torch.exp(x @ w)
    want = torch.linalg.solve(x.T @ (rate[:, None] * x), x.T @ (rate * (x @ w) + y - rate))
    assert_close(model.weight.flatten(), want, 1e-10, "IRLS")


def test_newton_of_multinomial_regression() -> None:
    """For a linear model the Fisher matrix is the loss's Hessian."""
    x, _ = regression(15, 3, 1)
    y = torch.arange(15) % 3
    model = nn.Linear(3, 3).double()
    params = dict(model.named_parameters())
    w = torch.cat([p.detach().flatten() for p in params.values()])

    def loss(flat: Tensor) -> Tensor:
        return F.cross_entropy(x @ flat[:9].view(3, 3).T + flat[9:], y)

    hessian = torch.autograd.functional.hessian(loss, w)
    gradient = torch.func.grad(loss)(w)
    want = torch.linalg.solve(hessian + 0.01 * torch.eye(12).double(), gradient)
    opt = pb.NaturalGradient(model, Fisher(Categorical()), pb.solvers.Cholesky(0.01))
    step(opt, lambda: F.cross_entropy(model(x), y))
    moved = w - torch.cat([p.detach().flatten() for p in params.values()])
    assert_close(moved, want, 1e-10, "damped Newton")


def test_an_objective_of_residuals_is_gauss_newton() -> None:
    """½ Σ_k w_k mean_i |r_ki|², by name, against the stacked weighted least squares."""
    x, t = regression(10, 3, 1)
    model = nn.Linear(3, 1, bias=False).double()
    opt = pb.NaturalGradient(model, Euclidean(), pb.solvers.PseudoInverse())

    def objective(params: dict[str, Tensor]):
        residual = x @ params["weight"].T - t
        return {"inside": residual[:7], "border": (residual[7:], 4.0)}

    info = opt.step(objective=objective)
    scale = torch.tensor([1 / 7] * 7 + [4 / 3] * 3, dtype=torch.float64).sqrt()[:, None]
    want = torch.linalg.lstsq(scale * x, scale * t).solution
    assert_close(model.weight.T, want, 1e-10, "weighted least squares")
    assert info.rows == 10


def test_the_metric_may_be_averaged_over_other_inputs() -> None:
    """metric_batch: G from one set of inputs, ∇L from another, and r is not used."""
    x, t = regression(12, 3, 1)
    others = regression(30, 3, 1)[0][12:]
    model = nn.Linear(3, 1, bias=False).double()
    before = model.weight.detach().clone()
    solver = pb.solvers.Cholesky(0.0)
    opt = pb.NaturalGradient(
        model, Euclidean(), solver, lr=1.0, output=pb.optim.Outputs(metric_batch=others)
    )
    info = step(opt, lambda: 0.5 * ((model(x) - t) ** 2).mean())
    assert not info.whitened
    gradient = x.T @ (x @ before.T - t) / 12
    want = before.T - torch.linalg.solve(others.T @ others / len(others), gradient)
    assert_close(model.weight.T, want, 1e-10, "population metric")


@pytest.mark.parametrize("margins", [(-12.0, 0.0, 9.0), (-2.0, 1.0, 3.0)], ids=str)
def test_logistic_step_without_overflow(margins: tuple[float, ...]) -> None:
    """N ≤ D and X of full row rank: Δβ = X⁺(y/φ(y u)), whatever the margins."""
    x, _ = regression(3, 5, 1)
    u = torch.tensor(margins).double()
    y = torch.tensor([1.0, -1.0, 1.0]).double()
    model = nn.Linear(5, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_((torch.linalg.pinv(x) @ u)[None])
    before = model.weight.detach().clone()
    solver = pb.solvers.PseudoInverse()
    opt = pb.NaturalGradient(model, Fisher(Bernoulli()), solver, lr=1.0, gram="rows")
    step(opt, lambda: F.binary_cross_entropy_with_logits(model(x)[:, 0], (y + 1) / 2))
    want = torch.linalg.pinv(x) @ (y * (1 + torch.exp(-y * u)))
    assert_close((model.weight.detach() - before).flatten(), want, 1e-8, "X⁺(y/φ(yu))")


def test_logistic_step_is_finite_where_the_weights_underflow() -> None:
    """Margins of ±800: e^{−400} and its inverse are still numbers, and the step is one too."""
    x, _ = regression(4, 5, 1)
    model = nn.Linear(5, 1, bias=False).double()
    with torch.no_grad():
        u = torch.tensor([-800.0, 800.0, -800.0, 0.0]).double()
        model.weight.copy_((torch.linalg.pinv(x) @ u)[None])
    y = torch.tensor([1.0, 1.0, 0.0, 1.0]).double()
    for solver in (pb.solvers.PseudoInverse(), pb.solvers.Cholesky(1e-3)):
        opt = pb.NaturalGradient(model, Fisher(Bernoulli()), solver)
        info = step(opt, lambda: F.binary_cross_entropy_with_logits(model(x)[:, 0], y))
        assert info.accepted, info.reason
        assert bool(torch.isfinite(model.weight).all())
