"""NaturalGradient among torch's own: groups, schedulers, hooks, closures that do as they please."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import pullback as pb
from tests.pairs import each_once

from .common import (
    DAMPING,
    DOUBLE,
    assert_close,
    closure_of,
    data,
    expect_unchanged,
    flat,
    gradient,
    mlp,
    mse_gram,
    same,
    solve_damped,
    vector,
)

MSE = pb.metrics.Fisher(pb.likelihoods.MSE())
SPACES = pytest.mark.parametrize("samples", [4, 40], ids=["sample space", "parameter space"])


def natural(model, **options) -> pb.NaturalGradient:
    options.setdefault("step", pb.steps.Constant())
    return pb.NaturalGradient(model, MSE, pb.solvers.Cholesky(DAMPING), **options)


def oracle(model: nn.Module, x: Tensor, y: Tensor, params=None) -> Tensor:
    """(G + λ)⁻¹∇L for `F.mse_loss`, over some of the parameters."""
    if params is None:
        params = list(model.parameters())
    else:
        params = list(params)
    z = model(x)
    return solve_damped(mse_gram(z, params), gradient(F.mse_loss(z, y), params), DAMPING)


def movement(opt, closure, params) -> Tensor:
    """−Δw of one step."""
    params = list(params)
    before = flat(params).clone()
    assert opt.step(closure).accepted
    return before - flat(params)


# --- what is reported ---------------------------------------------------------------------------


@SPACES
def test_info(samples: int) -> None:
    model = mlp()
    x, y = data(samples)
    opt = natural(model, step=pb.steps.Constant(0.5))
    closure = closure_of(opt, model, x, y)
    loss = closure().item()
    info = opt.step(closure)
    assert isinstance(info, pb.StepInfo)
    assert info.loss == float(info) == info.item() == loss
    assert info.accepted
    assert info.status.ok
    assert info.step_size == 1.0
    assert info.damping == DAMPING
    assert (info.rows, info.parameters) == (2 * samples, 32)
    assert info.rank == min(2 * samples, 32)
    assert info.gram == ("kernel" if samples == 4 else "rows")
    assert info.whitened
    assert info.reason == ""
    assert sorted(c.name for c in info.coverage) == sorted(n for n, _ in model.named_parameters())


@SPACES
def test_a_step_is_the_dense_answer(samples: int) -> None:
    model = mlp()
    x, y = data(samples)
    opt = natural(model)
    want = oracle(model, x, y)
    assert_close(movement(opt, closure_of(opt, model, x, y), model.parameters()), want)


def test_the_gradient_stays_as_the_closure_left_it() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    want = gradient(F.mse_loss(model(x), y), list(model.parameters()))
    opt.step(closure_of(opt, model, x, y))
    assert torch.equal(flat(p.grad for p in model.parameters()), want)


# --- learning rates -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1), [0.5, 0.5, 0.05, 0.05]),
        (lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)), [0.5, 0.25, 0.5 / 3, 0.125]),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=2), [0.5, 0.25, 0.0]),
    ],
    ids=["StepLR", "LambdaLR", "CosineAnnealingLR"],
)
def test_schedulers_scale_the_step(make, rates: list[float]) -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, step=pb.steps.Constant(0.5))
    scheduler = make(opt)
    for rate in rates:
        assert opt.param_groups[0]["lr"] == pytest.approx(rate)
        want = rate * oracle(model, x, y)
        move = movement(opt, closure_of(opt, model, x, y), model.parameters())
        assert torch.allclose(move, want, rtol=1e-8, atol=1e-12)
        scheduler.step()


def test_a_plateau_scheduler_reads_the_loss_of_the_info() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        opt, patience=0, factor=0.5, threshold=100.0, threshold_mode="abs"
    )
    for _ in range(3):  # no step ever gains 100
        scheduler.step(float(opt.step(closure_of(opt, model, x, y))))
    assert opt.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("step", [None, pb.steps.Constant(0.5), pb.steps.Backtracking()], ids=repr)
def test_lr_wins_over_the_steps_own(step) -> None:
    opt = natural(mlp(), step=step, lr=0.125)
    assert [g["lr"] for g in opt.param_groups] == [0.125]


@pytest.mark.parametrize(
    "step", [pb.steps.LevenbergMarquardt(), pb.steps.QuadraticModel(), pb.steps.Backtracking()]
)
def test_without_a_gradient_and_a_rate_nothing_changes(step: pb.steps.Step) -> None:
    model = mlp()
    x, _ = data()
    opt = pb.NaturalGradient(model, step=step, lr=0.0)
    y = model(x).detach()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    before = copy.deepcopy(opt.state_dict())
    parameters = vector(model)
    info = opt.step(closure)
    assert not info.accepted
    assert "gradient is zero" in info.reason
    assert repr(opt.state_dict()) == repr(before)
    assert torch.equal(vector(model), parameters)


def test_a_line_search_works_along_the_scaled_direction() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, step=pb.steps.GridLineSearch(8), lr=0.3)
    want = oracle(model, x, y)
    closure = closure_of(opt, model, x, y)
    before = vector(model)
    info = opt.step(closure)
    assert_close(before - vector(model), 0.3 * info.step_size * want)
    assert closure().item() == pytest.approx(info.new_loss, rel=1e-12)


@pytest.mark.parametrize(
    "step", [pb.steps.Constant(), pb.steps.GridLineSearch(6), pb.steps.Backtracking()], ids=repr
)
def test_groups_with_their_own_lr(step: pb.steps.Step) -> None:
    model = mlp()
    x, y = data()
    groups = [
        {"params": model[2].parameters(), "lr": 0.1},
        {"params": model[0].parameters(), "lr": 0.3},
    ]
    opt = natural(model, params=groups, step=step)
    params = [*model[2].parameters(), *model[0].parameters()]
    want = oracle(model, x, y, params)
    rates = torch.cat([torch.full((12,), 0.1), torch.full((20,), 0.3)]).double()
    closure = closure_of(opt, model, x, y)
    before = flat(params).clone()
    info = opt.step(closure)
    assert info.accepted
    assert torch.allclose(before - flat(params), info.step_size * rates * want, rtol=1e-6)
    if info.new_loss is not None:
        assert closure().item() == pytest.approx(info.new_loss, rel=1e-14)


def test_named_parameters_in_groups() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, params=model.named_parameters())
    want = oracle(model, x, y)
    assert_close(movement(opt, closure_of(opt, model, x, y), model.parameters()), want)
    assert opt.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


# --- which parameters ---------------------------------------------------------------------------


@SPACES
def test_a_subset_of_the_parameters(samples: int) -> None:
    model = mlp()
    x, y = data(samples)
    chosen = [model[0].bias, model[2].weight]
    opt = natural(model, params=chosen)
    want = oracle(model, x, y, chosen)
    others = flat([model[0].weight, model[2].bias]).clone()
    assert_close(movement(opt, closure_of(opt, model, x, y), chosen), want)
    assert torch.equal(others, flat([model[0].weight, model[2].bias]))


def test_parameters_frozen_before_are_left_out() -> None:
    model = mlp()
    x, y = data()
    model[0].weight.requires_grad_(False)
    chosen = [p for p in model.parameters() if p.requires_grad]
    opt = natural(model)
    want = oracle(model, x, y, chosen)
    frozen = model[0].weight.clone()
    assert_close(movement(opt, closure_of(opt, model, x, y), chosen), want)
    assert torch.equal(frozen, model[0].weight)


def test_add_param_group_takes_up_a_late_unfrozen_layer() -> None:
    model = mlp()
    x, y = data()
    model[0].requires_grad_(False)
    opt = natural(model, step=pb.steps.Spring(0.5))
    opt.step(closure_of(opt, model, x, y))
    model[0].requires_grad_(True)
    opt.add_param_group({"params": model[0].parameters(), "lr": 0.5})
    opt.rule = pb.steps.Constant()
    params = [*model[2].parameters(), *model[0].parameters()]
    want = oracle(model, x, y, params)
    want[12:] *= 0.5
    assert_close(movement(opt, closure_of(opt, model, x, y), params), want)


class Scaled(nn.Module):
    """A layer, and a parameter that no layer explains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.scale = nn.Parameter(torch.ones(2, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale * self.net[2].bias.exp()


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_freezing_and_unfreezing_between_steps(form: str) -> None:
    model = Scaled()
    x, y = data()
    opt = natural(model, gram=form)
    closure = closure_of(opt, model, x, y)
    names = ["scale", "net.0.weight", "net.2.bias"]
    for frozen in ([], ["scale"], ["net.2.bias"], names, ["net.0.weight"], []):
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
            p.grad = None
        chosen = [p for p in model.parameters() if p.requires_grad]
        want = oracle(model, x, y, chosen)
        still = model.state_dict()
        still = {n: still[n].clone() for n in frozen}
        assert_close(movement(opt, closure, chosen), want, 1e-7)
        for name in frozen:
            assert torch.equal(still[name], model.state_dict()[name])


def test_two_optimizers_on_one_model() -> None:
    model = mlp()
    x, y = data()
    first = natural(model, params=model[0].parameters(), step=pb.steps.GridLineSearch(4))
    second = natural(model, params=model[2].parameters())
    closures = closure_of(first, model, x, y), closure_of(second, model, x, y)
    for _ in range(3):
        head = vector(model[2])
        want = gradient(F.mse_loss(model(x), y), list(model[2].parameters()))
        model.zero_grad()
        assert first.step(closures[0]).accepted
        assert torch.equal(head, vector(model[2]))
        # the search's trials must not pile up in the other optimizer's gradients
        assert torch.equal(flat(p.grad for p in model[2].parameters()), want)
        body = vector(model[0])
        want = oracle(model, x, y, model[2].parameters())
        assert_close(movement(second, closures[1], model[2].parameters()), want)
        assert torch.equal(body, vector(model[0]))


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3, dtype=DOUBLE)
            self.b = nn.Linear(3, 3, dtype=DOUBLE)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = Tied()
    x, y = data(outputs=3)
    opt = natural(model)
    want = oracle(model, x, y)
    assert_close(movement(opt, closure_of(opt, model, x, y), model.parameters()), want)


# --- p.grad is the truth ------------------------------------------------------------------------


@SPACES
@pytest.mark.parametrize(
    ("form", "strength"),
    each_once(["auto", "rows", "kernel", "dense", "matrix_free"], [1e-6, 1e-3, 1.0]),
)
def test_a_regularizer_in_the_closure_is_honoured(samples: int, form: str, strength: float) -> None:
    model = mlp()
    x, y = data(samples)
    opt = natural(model, gram=form)
    params = list(model.parameters())

    def decay() -> Tensor:
        return 0.5 * strength * torch.stack([p.square().sum() for p in params]).sum()

    z = model(x)
    total = F.mse_loss(z, y) + decay()
    want = solve_damped(mse_gram(z, params), gradient(total, params), DAMPING)
    before = vector(model)
    info = opt.step(closure_of(opt, model, x, y, extra=decay))
    assert info.loss == pytest.approx(total.item(), rel=1e-14)
    assert not info.whitened
    assert_close(before - vector(model), want, 1e-8)


@SPACES
def test_gradient_clipping_in_the_closure_is_honoured(samples: int) -> None:
    model = mlp()
    x, y = data(samples)
    opt = natural(model)
    want = oracle(model, x, y)
    size = gradient(F.mse_loss(model(x), y), list(model.parameters())).norm()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 * float(size))
        return loss

    assert_close(movement(opt, closure, model.parameters()), 0.1 * want, 1e-4)


def test_a_gradient_edited_by_a_hook_is_honoured() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    params = list(model.parameters())
    z = model(x)
    g = gradient(F.mse_loss(z, y), params)
    g[:15] = 0
    want = solve_damped(mse_gram(z, params), g, DAMPING)
    model[0].weight.register_hook(torch.zeros_like)
    assert_close(movement(opt, closure_of(opt, model, x, y), params), want, 1e-8)


def test_gradients_left_from_before_count_if_the_closure_keeps_them() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    want = oracle(model, x, y)
    F.mse_loss(model(x), y).backward()

    def closure() -> Tensor:  # no zero_grad
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    assert_close(movement(opt, closure, model.parameters()), 2 * want, 1e-8)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    opt.step(closure_of(opt, model, x, y))
    opt.zero_grad(set_to_none=set_to_none)
    for p in model.parameters():
        assert p.grad is None if set_to_none else not p.grad.any()  # pyright: ignore


# --- maximize -----------------------------------------------------------------------------------


@SPACES
def test_maximize_goes_the_other_way(samples: int) -> None:
    model = mlp()
    x, y = data(samples)
    opt = natural(model, maximize=True)
    want = oracle(model, x, y)
    assert_close(movement(opt, closure_of(opt, model, x, y), model.parameters()), -want)


@pytest.mark.parametrize(
    ("solver", "step"),
    [
        (pb.solvers.Cholesky(1.0), pb.steps.Backtracking()),
        (pb.solvers.Cholesky(1.0), pb.steps.GridLineSearch(8)),
        (pb.solvers.Cholesky(1.0), pb.steps.LevenbergMarquardt(1.0)),
        (pb.solvers.PseudoInverse(), pb.steps.TargetRatio(radius=1e-2)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_searches_climb_when_maximizing(solver, step) -> None:
    """maximize(−L) takes the very steps of minimize(L), and reports the user's own loss."""
    model = mlp()
    x, y = data()
    twin = copy.deepcopy(model)
    down = pb.NaturalGradient(model, MSE, copy.deepcopy(solver), copy.deepcopy(step))
    up = pb.NaturalGradient(twin, MSE, copy.deepcopy(solver), copy.deepcopy(step), maximize=True)
    for _ in range(3):
        one = down.step(closure_of(down, model, x, y))
        two = up.step(closure_of(up, twin, x, y, lambda z, y: -F.mse_loss(z, y)))
        assert two.accepted
        assert two.loss == pytest.approx(-one.loss, rel=1e-12)
        assert one.new_loss is not None
        assert two.new_loss == pytest.approx(-one.new_loss, rel=1e-12)
        assert two.new_loss > two.loss
        assert_close(vector(twin), vector(model), 1e-10)


# --- hooks, steps, retractions --------------------------------------------------------------------


def test_step_hooks() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    hook_calls: list[tuple[str, bool]] = []
    start = vector(model)
    pre = opt.register_step_pre_hook(
        lambda o, args, kwargs: hook_calls.append(("pre", torch.equal(start, vector(model))))
    )
    post = opt.register_step_post_hook(
        lambda o, args, kwargs: hook_calls.append(("post", torch.equal(start, vector(model))))
    )
    opt.step(closure_of(opt, model, x, y))
    assert hook_calls == [("pre", True), ("post", False)]
    pre.remove()
    post.remove()
    opt.step(closure_of(opt, model, x, y))
    assert len(hook_calls) == 2


def test_a_pre_hook_may_change_the_arguments() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    want = oracle(model, x, 0 * y)
    other = closure_of(opt, model, x, 0 * y)
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, other), {}))
    assert_close(movement(opt, closure_of(opt, model, x, y), model.parameters()), want)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
@pytest.mark.parametrize(
    "step",
    [
        pb.steps.Backtracking(),
        pb.steps.GridLineSearch(5),
        pb.steps.LevenbergMarquardt(1e-6),
        pb.steps.TrustNorm(0.1, pb.steps.LevenbergMarquardt(1e-6)),
        pb.steps.Spring(0.9, pb.steps.Backtracking()),
    ],
    ids=lambda s: type(s).__name__,
)
def test_every_form_serves_every_search(form: str, step: pb.steps.Step) -> None:
    """Trials move the parameters and put them back; the Gram must outlive that."""
    model = mlp()
    x, y = data()
    opt = natural(model, gram=form, step=step)
    closure = closure_of(opt, model, 5 * x, y)
    for _ in range(3):
        info = opt.step(closure)
        if not info.accepted:  # the momentum may point uphill
            assert isinstance(step, pb.steps.Spring)
            continue
        assert info.new_loss is not None
        assert info.new_loss < info.loss
        assert closure().item() == pytest.approx(info.new_loss, rel=1e-10)


def test_a_rejected_momentum_is_forgotten() -> None:
    """λ → ∞ leads Levenberg–Marquardt to μ·x_prev and not to zero: it could never recover."""
    model = mlp()
    x, y = data()
    rule = pb.steps.Spring(0.9, pb.steps.LevenbergMarquardt(1e-6))
    opt = natural(model, step=rule)
    infos = [opt.step(closure_of(opt, model, 5 * x, y)) for _ in range(40)]
    assert not all(i.accepted for i in infos)
    assert any(i.accepted for i in infos[-5:])
    assert infos[-1].loss < 0.5 * infos[0].loss


def test_rejected_steps_put_everything_back() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).to(DOUBLE)
    x, y = data()
    opt = natural(model, step=pb.steps.GridLineSearch(3))
    start = vector(model)

    def uphill(z: Tensor, y: Tensor) -> Tensor:  # lowest exactly here
        return F.mse_loss(z, y) + 1e3 * (vector(model) - start).norm()

    opt.step(closure_of(opt, model, x, y, uphill))
    before = opt.state_dict()
    with expect_unchanged(model):
        info = opt.step(closure_of(opt, model, x, y, uphill))
    assert not info.accepted
    assert info.new_loss is None
    assert info.step_size == 0.0
    assert info.reason == "no step size of the grid lowers the loss"
    after = opt.state_dict()
    assert [s["schedule"]["steps"] for s in after["state"].values()] == [2] * 4
    before["state"][0]["schedule"]["steps"] += 1
    assert same(after, before)


@pytest.mark.parametrize(
    "step", [pb.steps.Constant(), pb.steps.Backtracking(), pb.steps.GridLineSearch(5)], ids=repr
)
def test_retract_by_name_and_as_a_function(step: pb.steps.Step) -> None:
    model = mlp()
    x, y = data()
    twin = copy.deepcopy(model)
    box = pb.steps.Bounds(-0.1, 0.1)
    one = natural(model, step=step, retract={"0.weight": box})
    two = natural(twin, step=step, retract=lambda p: {**p, "0.weight": box(p["0.weight"])})
    for opt, net in ((one, model), (two, twin)):
        closure = closure_of(opt, net, x, y)
        for _ in range(3):
            info = opt.step(closure)
            if info.new_loss is not None:
                assert closure().item() == pytest.approx(info.new_loss, rel=1e-12)
    assert model[0].weight.abs().max() <= 0.1
    assert model[2].weight.abs().max() > 0.1
    assert torch.equal(vector(model), vector(twin))


def test_a_retraction_of_a_frozen_parameter_waits() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, retract={"0.weight": pb.steps.Bounds(-0.1, 0.1)})
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    assert opt.step(closure_of(opt, model, x, y)).accepted
    assert torch.equal(frozen, model[0].weight)
    model[0].weight.requires_grad_(True)
    assert opt.step(closure_of(opt, model, x, y)).accepted
    assert model[0].weight.abs().max() <= 0.1


# --- other people's loops -------------------------------------------------------------------------


class LightningClosure:
    """Lightning's automatic-optimization closure: step, zero_grad, backward, keep the result.

    The order and the calling convention are those of `lightning.pytorch.loops.optimization`.
    """

    def __init__(self, training_step, zero_grad, backward) -> None:
        self.training_step = training_step
        self.zero_grad = zero_grad
        self.backward = backward
        self.result: Tensor | None = None
        self.calls = 0

    def closure(self) -> Tensor:
        with torch.enable_grad():
            loss = self.training_step()
            self.zero_grad()
            self.backward(loss)
        return loss.detach().clone()

    def __call__(self) -> Tensor:
        self.calls += 1
        self.result = self.closure()
        return self.result


@pytest.mark.parametrize("step", [pb.steps.Constant(), pb.steps.Backtracking()], ids=repr)
def test_a_lightning_style_closure(step: pb.steps.Step) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            return F.mse_loss(self(x), y)

    module = Module()
    batch = data()
    opt = natural(module, step=step)
    want = oracle(module, *batch)
    closure = LightningClosure(
        lambda: module.training_step(batch), opt.zero_grad, lambda loss: loss.backward()
    )
    before = vector(module)
    wrapped = torch.no_grad()(lambda: opt.step(closure=closure))  # the trainer's own context
    info = wrapped()
    assert_close(before - vector(module), info.step_size * want)
    assert closure.result is not None
    assert closure.calls == 1 + info.trials + (info.trials > 0)  # once more to compare losses


def test_an_ordinary_training_loop() -> None:
    x = torch.randn(64, 3, dtype=DOUBLE)
    y = (x[:, 0] > x[:, 1]).long() + (x[:, 2] > 1).long()
    model = mlp(3, 8, 3)
    opt = pb.NaturalGradient(
        model,
        pb.metrics.Fisher(pb.likelihoods.Categorical()),
        pb.solvers.Cholesky(1e-2),
        pb.steps.Constant(0.5),
    )
    scheduler = lr_scheduler.ExponentialLR(opt, 0.95)
    first = last = None
    for _ in range(10):
        for index in torch.randperm(64).split(32):
            last = opt.step(closure_of(opt, model, x[index], y[index], F.cross_entropy))
            first = last if first is None else first
        scheduler.step()
    assert first is not None
    assert last is not None
    assert last.loss < 0.5 * first.loss
