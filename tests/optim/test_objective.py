"""`step(objective=f)`: residuals as functions of the parameter dict."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import pullback as pb
from tests.pairs import all_pairs

from .common import (
    DAMPING,
    DOUBLE,
    assert_close,
    data,
    expect_unchanged,
    flat,
    gradient,
    gram,
    jacobian,
    mlp,
    refused,
    solve_damped,
    vector,
)


def natural(model: nn.Module, **options) -> pb.NaturalGradient:
    options.setdefault("step", pb.steps.Constant())
    return pb.NaturalGradient(model, solver=pb.solvers.Cholesky(DAMPING), **options)


def residual(model: nn.Module, x: Tensor, y: Tensor):
    """params ↦ model(x) − y."""
    return lambda params: functional_call(model, params, (x,)) - y


def half_mean_square(r: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """½ mean over samples of weight·|r|²."""
    return 0.5 * (torch.as_tensor(weight) * r.reshape(len(r), -1).square().sum(1)).mean()


# --- forms --------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0, 1.0], dtype=DOUBLE)
FORMS = {
    "tensor": (lambda r: r, 1.0),
    "pair": (lambda r: (r, 3.0), 3.0),
    "pair with one weight per sample": (lambda r: (r, WEIGHTS), WEIGHTS),
    "Residual": (lambda r: (r, 2.0), 2.0),
    "Residual with one weight per sample": (lambda r: (r, WEIGHTS), WEIGHTS),
    "dict": (lambda r: {"data": (r, 0.5)}, 0.5),
}


@pytest.mark.parametrize(
    ("name", "reduction", "samples_first"), all_pairs(FORMS, ["mean", "sum"], [True, False])
)
def test_forms_of_residuals(name: str, reduction: str, samples_first: bool) -> None:
    pack, weight = FORMS[name]
    if samples_first:
        model = mlp()
    else:
        model = nn.Linear(3, 2, dtype=DOUBLE)
    x, y = data()
    params = list(model.parameters())
    r = model(x) - y
    scale = 1.0 if reduction == "mean" else 6.0
    loss = scale * half_mean_square(r, weight)
    metric = torch.as_tensor(weight, dtype=DOUBLE).expand(6)[:, None, None] * torch.eye(2)
    want = solve_damped(gram(r, params, scale / 6 * metric), gradient(loss, params), DAMPING)
    opt = natural(model, output=pb.optim.Outputs(reduction=reduction))
    before = vector(model)
    f = residual(model, x, y)
    info = opt.step(objective=lambda p: pack(f(p)))
    assert info.loss == pytest.approx(loss.item(), rel=1e-12)
    assert info.whitened
    assert info.rows == 12
    assert_close(before - vector(model), want)


def test_several_named_residuals_are_each_averaged_over_their_own_samples() -> None:
    model = mlp()
    params = list(model.parameters())
    x1, y1 = data(6)
    x2, _ = data(4)
    weights = torch.rand(4, dtype=DOUBLE)

    def objective(p: dict[str, Tensor]):
        return {
            "data": functional_call(model, p, (x1,)) - y1,
            "boundary": (functional_call(model, p, (x2,))[:, 0], weights),
            "norm": (p["0.bias"].square().sum() - 1, 0.25),
        }

    r1 = model(x1) - y1
    r2 = model(x2)[:, 0]
    r3 = (model[0].bias.square().sum() - 1)[None]
    loss = half_mean_square(r1) + half_mean_square(r2, weights) + half_mean_square(r3, 0.25)
    blocks = [
        jacobian(r1, params) / 6**0.5,
        jacobian(r2, params) * (weights / 4).sqrt()[:, None],
        jacobian(r3, params) * 0.5,
    ]
    a = torch.cat(blocks)
    want = solve_damped(a.T @ a, gradient(loss, params), DAMPING)
    before = vector(model)
    info = natural(model).step(objective=objective)
    assert info.loss == pytest.approx(loss.item(), rel=1e-12)
    assert info.rows == 12 + 4 + 1
    assert_close(before - vector(model), want)


def test_residuals_of_any_shape_have_their_samples_first() -> None:
    model = mlp(3, 5, 6)
    x, _ = data()
    params = list(model.parameters())
    r = model(x).reshape(6, 2, 3)
    want = solve_damped(gram(r, params, 1 / 6), gradient(half_mean_square(r), params), DAMPING)
    before = vector(model)
    info = natural(model).step(objective=lambda p: functional_call(model, p, (x,)).reshape(6, 2, 3))
    assert info.loss == pytest.approx(half_mean_square(r).item())
    assert_close(before - vector(model), want)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_forms_of_the_gram(form: str) -> None:
    model = mlp()
    x, y = data()
    params = list(model.parameters())
    r = model(x) - y
    want = solve_damped(gram(r, params, 1 / 6), gradient(half_mean_square(r), params), DAMPING)
    before = vector(model)
    info = natural(model, gram=form).step(objective=residual(model, x, y))
    assert info.gram == form
    assert info.whitened == (form != "dense")
    assert_close(before - vector(model), want)


def test_residuals_with_derivatives_of_the_network() -> None:
    """u'' − f, the case objectives are there for."""
    model = mlp(1, 8, 1)
    x = torch.linspace(0, 1, 5, dtype=DOUBLE)[:, None]

    def objective(p: dict[str, Tensor]) -> Tensor:
        def u(x: Tensor) -> Tensor:
            return functional_call(model, p, (x,)).squeeze()

        second = vmap(grad(lambda s: grad(lambda t: u(t))(s).squeeze()))(x)
        return second - torch.sin(x)

    points = x.clone().requires_grad_()
    slope = torch.autograd.grad(model(points).sum(), points, create_graph=True)[0]
    second = torch.autograd.grad(slope.sum(), points, create_graph=True)[0]
    r = second - torch.sin(x)
    params = list(model.parameters())
    want = solve_damped(gram(r, params, 1 / 5), gradient(half_mean_square(r), params), DAMPING)
    before = vector(model)
    natural(model).step(objective=objective)
    assert_close(before - vector(model), want)


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [4, 30], ids=["interpolating", "overdetermined"])
def test_gauss_newton_solves_linear_least_squares_in_one_step(samples: int) -> None:
    model = nn.Linear(3, 2, dtype=DOUBLE)
    x, y = data(samples)
    opt = pb.NaturalGradient(model, solver=pb.solvers.PseudoInverse())
    opt.step(objective=residual(model, x, y))
    ones = torch.cat([x, torch.ones(samples, 1, dtype=DOUBLE)], 1)
    best = ones @ torch.linalg.lstsq(ones, y).solution - y
    assert torch.allclose(model(x) - y, best, atol=1e-12)
    second = opt.step(objective=residual(model, x, y))
    assert second.loss == pytest.approx(half_mean_square(best).item(), rel=1e-12, abs=1e-20)


def test_the_gauss_newton_preset_solves_linear_least_squares_in_one_step() -> None:
    model = nn.Linear(3, 2, dtype=DOUBLE)
    x, y = data(30)
    opt = pb.GaussNewton(model)
    opt.step(objective=residual(model, x, y))
    ones = torch.cat([x, torch.ones(30, 1, dtype=DOUBLE)], 1)
    best = ones @ torch.linalg.lstsq(ones, y).solution - y
    assert torch.allclose(model(x) - y, best, atol=1e-12)


def test_the_whitened_form_keeps_the_digits_of_an_ill_conditioned_fit() -> None:
    """At κ = 1e7 the residual gives the solution; the gradient alone has lost it."""
    model = nn.Linear(8, 1, bias=False, dtype=DOUBLE)
    nn.init.zeros_(model.weight)
    u, _ = torch.linalg.qr(torch.randn(20, 8, dtype=DOUBLE))
    v, _ = torch.linalg.qr(torch.randn(8, 8, dtype=DOUBLE))
    x = u @ torch.diag(torch.logspace(0, -7, 8, dtype=DOUBLE)) @ v.T
    truth = torch.randn(8, 1, dtype=DOUBLE)
    opt = pb.NaturalGradient(model, solver=pb.solvers.PseudoInverse())
    info = opt.step(objective=residual(model, x, x @ truth))
    assert info.whitened
    assert_close(model.weight.detach().T, truth, 1e-7)


# --- convergence ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solver", "step"),
    [
        pytest.param(
            pb.solvers.PseudoInverse(1e-5), pb.steps.GridLineSearch(), marks=pytest.mark.slow
        ),
        pytest.param(pb.solvers.PseudoInverse(), pb.steps.TargetRatio(), marks=pytest.mark.slow),
        (pb.solvers.Cholesky(), pb.steps.LevenbergMarquardt()),
        pytest.param(pb.solvers.Cholesky(1e-6), pb.steps.Backtracking(), marks=pytest.mark.slow),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_small_fit_converges(solver: pb.solvers.Solver, step: pb.steps.Step) -> None:
    model = mlp(1, 8, 1)
    x = torch.linspace(-1, 1, 12, dtype=DOUBLE)[:, None]
    f = residual(model, x, torch.sin(3 * x))
    opt = pb.NaturalGradient(model, solver=solver, step=step)
    losses = []
    for _ in range(40):
        info = opt.step(objective=f)
        losses.append(info.loss)
        assert not info.accepted or info.new_loss is None or info.new_loss < info.loss
    assert losses[-1] < 1e-5 * losses[0]
    assert all(b <= a + 1e-20 for a, b in pairwise(losses))


def test_batched_trials_are_the_losses_at_the_trial_points() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, step=pb.steps.GridLineSearch(7))
    f = residual(model, x, y)
    before = vector(model)
    params = list(model.parameters())
    r = model(x) - y
    direction = solve_damped(gram(r, params, 1 / 6), gradient(half_mean_square(r), params), DAMPING)
    losses = []
    for k in range(7):
        point = before - 0.5**k * direction
        pieces = point.split([p.numel() for p in params])
        trial = {
            n: piece.view_as(p)
            for (n, p), piece in zip(model.named_parameters(), pieces, strict=True)
        }
        losses.append(half_mean_square(f(trial)).item())
    info = opt.step(objective=f)
    assert info.trials == 7
    assert info.step_size == 0.5 ** losses.index(min(losses))
    assert info.new_loss == pytest.approx(min(losses), rel=1e-10)
    assert half_mean_square(f(dict(model.named_parameters()))).item() == pytest.approx(
        info.new_loss, rel=1e-12
    )


def test_control_flow_that_vmap_cannot_follow_is_tried_one_by_one() -> None:
    model = mlp()
    x, y = data()
    f = residual(model, x, y)

    def objective(p: dict[str, Tensor]) -> Tensor:
        r = f(p)
        if float(r.detach().abs().max()) < 1e6:
            return r
        return 2 * r

    opt = natural(model, step=pb.steps.GridLineSearch(5), gram="rows")
    info = opt.step(objective=objective)
    assert info.accepted
    assert half_mean_square(model(x) - y).item() == pytest.approx(info.new_loss, rel=1e-12)


def test_a_retraction_takes_part_in_trials() -> None:
    model = mlp()
    x, y = data()
    opt = natural(
        model, step=pb.steps.GridLineSearch(5), retract={"0.weight": pb.steps.Bounds(-0.1, 0.1)}
    )
    for _ in range(2):  # the first brings the weights into the box, come what may
        info = opt.step(objective=residual(model, x, y))
    if info.accepted:
        assert model[0].weight.abs().max() <= 0.1
        assert half_mean_square(model(x) - y).item() == pytest.approx(info.new_loss, rel=1e-12)


def test_maximize() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, maximize=True, lr=0.1, step=pb.steps.Backtracking())
    info = opt.step(objective=residual(model, x, y))
    assert info.new_loss is not None
    assert info.new_loss > info.loss > 0


# --- randomness, dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", [pb.steps.Constant(), pb.steps.GridLineSearch(4)], ids=lambda s: type(s).__name__
)
def test_random_points_are_the_same_in_loss_jacobian_and_trials(step: pb.steps.Step) -> None:
    model = mlp()
    params = list(model.parameters())

    def objective(p: dict[str, Tensor]) -> Tensor:
        x = torch.rand(6, 3, dtype=DOUBLE)
        return functional_call(model, p, (x,)) - x[:, :2]

    start = torch.get_rng_state()
    r = objective(dict(model.named_parameters()))
    after = torch.get_rng_state()
    want = solve_damped(gram(r, params, 1 / 6), gradient(half_mean_square(r), params), DAMPING)
    torch.set_rng_state(start)
    before = vector(model)
    info = natural(model, step=step).step(objective=objective)
    assert info.accepted
    assert info.whitened
    assert torch.equal(torch.get_rng_state(), after)
    assert_close(before - vector(model), info.step_size * want)
    if info.new_loss is not None:
        torch.set_rng_state(start)
        r = objective(dict(model.named_parameters()))
        assert half_mean_square(r).item() == pytest.approx(info.new_loss, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "step", [pb.steps.Constant(0.5), pb.steps.GridLineSearch(6)], ids=lambda s: type(s).__name__
)
def test_low_precision_parameters(dtype: torch.dtype, step: pb.steps.Step) -> None:
    model = mlp(dtype=dtype)
    x, y = data(40, dtype=dtype)
    opt = natural(model, step=step)
    losses = [opt.step(objective=residual(model, x, y)).loss for _ in range(4)]
    assert losses[-1] < 0.9 * losses[0]
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_residuals_in_another_dtype_than_the_parameters() -> None:
    model = mlp(dtype=torch.float32)
    x, y = data(40)
    opt = natural(model, step=pb.steps.GridLineSearch(6))
    f = residual(model, x.float(), y)  # float32 − float64
    assert f(dict(model.named_parameters())).dtype == DOUBLE
    losses = [opt.step(objective=f).loss for _ in range(4)]
    assert losses[-1] < losses[0]


def test_an_autocast_around_the_step_does_not_reach_the_objective() -> None:
    model = mlp(dtype=torch.float32)
    x, y = data(dtype=torch.float32)
    dtypes = set()
    f = residual(model, x, y)

    def objective(p: dict[str, Tensor]) -> Tensor:
        r = f(p)
        dtypes.add((p["0.weight"] @ x.T).dtype)
        return r

    with torch.autocast("cpu", torch.bfloat16):
        assert natural(model).step(objective=objective).accepted
    assert dtypes == {torch.float32}


def test_a_subset_of_the_parameters() -> None:
    model = mlp()
    x, y = data()
    chosen = [model[2].weight, model[2].bias]
    r = model(x) - y
    want = solve_damped(gram(r, chosen, 1 / 6), gradient(half_mean_square(r), chosen), DAMPING)
    opt = natural(model, params=chosen)
    names: set[str] = set()

    def objective(p: dict[str, Tensor]) -> Tensor:
        names.update(p)
        return functional_call(model, p, (x,)) - y

    before = flat(chosen).clone()
    body = vector(model[0])
    opt.step(objective=objective)
    assert names == {"2.weight", "2.bias"}
    assert_close(before - flat(chosen), want)
    assert torch.equal(body, vector(model[0]))


# --- bad input ------------------------------------------------------------------------------------


def test_a_residual_that_is_not_a_number_is_rejected() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, step=pb.steps.GridLineSearch(4))

    def objective(p: dict[str, Tensor]) -> Tensor:
        noise = torch.rand(())
        return (functional_call(model, p, (x,)) - y) * (noise / 0 * 0)

    with expect_unchanged(model, opt):
        info = opt.step(objective=objective)
    assert not info.accepted
    assert "the loss is not finite" in info.reason


def test_a_gradient_that_is_not_a_number_is_rejected() -> None:
    model = mlp()
    x, _ = data()
    opt = natural(model)
    with expect_unchanged(model, opt):
        info = opt.step(objective=lambda p: torch.sqrt(0 * functional_call(model, p, (x,))) + 1)
    assert not info.accepted
    assert info.reason == "the gradient is not finite"


def test_an_objective_without_the_parameters_is_refused() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    with (
        expect_unchanged(model, opt),
        refused("does not depend on the parameters", "no gradient", "functional_call"),
    ):
        opt.step(objective=lambda p: model(x).detach() - y)


def test_an_objective_that_calls_the_module_itself_is_refused() -> None:
    """model(x) reads the module's own tensors, not the dict."""
    model = mlp()
    x, y = data()
    opt = natural(model)
    with refused("does not depend on the parameters", "no gradient", "functional_call"):
        opt.step(objective=lambda p: model(x) - y)


def test_a_stationary_point_is_no_error() -> None:
    model = mlp()
    x, _ = data()
    info = natural(model).step(objective=lambda p: 0 * functional_call(model, p, (x,)))
    assert info.loss == 0.0


def test_an_objective_that_uses_autograd_is_refused() -> None:
    model = mlp(3, 5, 1)
    x, _ = data()

    def objective(p: dict[str, Tensor]) -> Tensor:
        points = x.clone().requires_grad_()
        u = functional_call(model, p, (points,))
        return torch.autograd.grad(u.sum(), points, create_graph=True)[0]

    with refused("calls torch.autograd", "torch.func", "torch.func (grad"):
        natural(model).step(objective=objective)


@pytest.mark.parametrize(
    ("output", "what", "why"),
    [
        (None, "'residual' is not a residual", "NoneType"),
        (lambda r: {"data": [r]}, "'data' is not a residual", "list"),
        (lambda r: {}, "empty residual", "entries: {}"),
        (lambda r: r[:0], "empty residual", "(0, 2)"),
        (lambda r: (r, torch.ones(5)), "weight of residual 'residual'", "5 weights for 6 samples"),
    ],
    ids=["nothing", "list", "no entries", "no samples", "weights"],
)
def test_residuals_that_do_not_fit(output, what: str, why: str) -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    f = residual(model, x, y)
    with expect_unchanged(model, opt), refused(what, why, ""):
        opt.step(objective=lambda p: None if output is None else output(f(p)))


# --- another metric -------------------------------------------------------------------------------


def test_metric_batch_as_a_function_of_the_parameters() -> None:
    """An L2 Gram on other points, with a loss of its own."""
    model = mlp()
    x, y = data()
    grid, _ = data(9)
    params = list(model.parameters())
    r = model(x) - y
    want = solve_damped(
        gram(model(grid), params, 1 / 9), gradient(half_mean_square(r), params), DAMPING
    )
    before = vector(model)
    info = natural(model).step(
        objective=residual(model, x, y),
        metric_batch=lambda p: functional_call(model, p, (grid,)),
    )
    assert info.rows == 18
    assert not info.whitened
    assert_close(before - vector(model), want)


def test_metric_batch_with_quadrature_weights() -> None:
    model = mlp()
    x, y = data()
    grid, _ = data(9)
    weights = torch.rand(9, dtype=DOUBLE)
    params = list(model.parameters())
    r = model(x) - y
    metric = weights[:, None, None] * torch.eye(2, dtype=DOUBLE)
    want = solve_damped(
        gram(model(grid), params, metric), gradient(half_mean_square(r, 6.0), params), DAMPING
    )
    before = vector(model)
    natural(model, output=pb.optim.Outputs(reduction="sum")).step(
        objective=residual(model, x, y),
        metric_batch=lambda p: (functional_call(model, p, (grid,)), weights),
    )
    assert_close(before - vector(model), want)
