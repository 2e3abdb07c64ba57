"""What the closure's forward passes leave behind: inputs, outputs, cotangents, and nothing else."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from .common import (
    DAMPING,
    DOUBLE,
    assert_close,
    closure_of,
    data,
    flat,
    gradient,
    gram,
    hooks,
    mlp,
    mse_gram,
    solve_damped,
    vector,
)

MSE = pb.metrics.Fisher(pb.likelihoods.MSE())


def natural(model, **options) -> pb.NaturalGradient:
    options.setdefault("step", pb.steps.Constant())
    return pb.NaturalGradient(model, MSE, pb.solvers.Cholesky(DAMPING), **options)


def check_mse_step(opt, model, call, x, y, params=None) -> pb.StepInfo:
    """One step of `opt` against the dense answer; `call` is what the closure runs."""
    if params is None:
        params = list(model.parameters())
    z = model(x)
    want = solve_damped(mse_gram(z, params), gradient(F.mse_loss(z, y), params), DAMPING)
    before = flat(params).clone()
    info = opt.step(closure_of(opt, call, x, y))
    assert info.accepted
    assert_close(before - flat(params), want, 1e-8)
    return info


# --- hooks ------------------------------------------------------------------------------------


def test_no_hooks_stay_after_a_step() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    assert hooks(model) == 0
    opt.step(closure_of(opt, model, x, y))
    assert hooks(model) == 0


@pytest.mark.parametrize("fail_at", [1, 2])
def test_no_hooks_stay_after_an_exception(fail_at: int) -> None:
    class Failing(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == fail_at:  # in the closure, or in the replay
                raise ZeroDivisionError
            return super().forward(input)

    model = nn.Sequential(nn.Linear(3, 4), Failing(4, 2)).to(DOUBLE)
    opt = natural(model)
    x, y = data()
    with pytest.raises(ZeroDivisionError):
        opt.step(closure_of(opt, model, x, y))
    assert hooks(model) == 0
    assert opt.step(closure_of(opt, model, x, y)).accepted


def test_hooks_seen_by_the_closure_are_gone_in_trials() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, step=pb.steps.GridLineSearch(3))
    counts = []

    def loss(z: Tensor, y: Tensor) -> Tensor:
        counts.append(hooks(model))
        return F.mse_loss(z, y)

    opt.step(closure_of(opt, model, x, y, loss))
    assert counts[0] > 0
    assert set(counts[1:]) == {0}


def test_user_hooks_run_as_often_in_the_replay_as_in_the_closure() -> None:
    model = mlp()
    x, y = data()
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model.register_forward_hook(lambda module, args, output: output + args[0][:, :2])
    model[0].register_forward_hook(lambda module, args, output: output.square())
    assert check_mse_step(natural(model), model, model, x, y).whitened


def test_user_hook_with_keywords() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor, *, scale: float = 1.0) -> Tensor:  # pyright: ignore
            return scale * super().forward(input)

    model = Scaled(3, 2, dtype=DOUBLE)
    x, y = data()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"scale": kwargs.get("scale", 1.0) * 3}),
        with_kwargs=True,
    )
    opt = natural(model)
    assert check_mse_step(opt, model, lambda x: model(x), x, y).whitened


def test_the_model_can_be_copied_and_pickled_while_the_optimizer_exists() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    opt.step(closure_of(opt, model, x, y))
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    opt.step(closure_of(opt, model, x, y))
    assert torch.equal(vector(copied), vector(pickled))
    assert not torch.equal(vector(copied), vector(model))
    fresh = natural(copied)
    fresh.step(closure_of(fresh, copied, x, y))
    assert torch.equal(vector(copied), vector(model))


def test_the_optimizer_itself_can_be_copied_and_pickled() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model, step=pb.steps.Spring(0.9), retract={"0.weight": pb.steps.Bounds(-2, 2)})
    opt.step(closure_of(opt, model, x, y))
    twins = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    opt.step(closure_of(opt, model, x, y))
    for twin in twins:
        assert twin.model is not model
        twin.step(closure_of(twin, twin.model, x, y))
        assert torch.equal(vector(twin.model), vector(model))


# --- which calls count ------------------------------------------------------------------------


def test_forwards_under_no_grad_are_not_captured() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            model(torch.randn(50, 3, dtype=DOUBLE))
        return model(x)

    info = check_mse_step(opt, model, call, x, y)
    assert info.rows == 12


def test_forwards_without_influence_are_not_captured() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)

    def call(x: Tensor) -> Tensor:
        model(torch.randn(50, 3, dtype=DOUBLE))
        return model(x)

    assert check_mse_step(opt, model, call, x, y).rows == 12


def test_two_calls_pool_their_samples() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    info = check_mse_step(opt, model, lambda x: torch.cat([model(x[:2]), model(x[2:])]), x, y)
    assert info.rows == 12
    assert info.whitened


def test_accumulation_over_micro_batches() -> None:
    model = mlp()
    x, y = data(8)
    opt = natural(model)
    z = model(x)
    params = list(model.parameters())
    want = solve_damped(mse_gram(z, params), gradient(F.mse_loss(z, y), params), DAMPING)

    def closure() -> float:
        opt.zero_grad()
        total = 0.0
        for a, b in zip(x.split(2), y.split(2), strict=True):
            loss = F.mse_loss(model(a), b) / 4
            loss.backward()
            total += loss.item()
        return total

    before = vector(model)
    info = opt.step(closure)
    assert info.whitened
    assert info.loss == pytest.approx(F.mse_loss(z, y).item())
    assert_close(before - vector(model), want, 1e-8)


def test_a_gradient_penalty_in_the_closure_falls_back_to_the_gradient() -> None:
    """`autograd.grad` in the closure sends other cotangents through the output."""
    model = mlp()
    x, y = data()
    opt = natural(model)
    points = x.clone().requires_grad_()
    params = list(model.parameters())

    def total() -> Tensor:
        z = model(points)
        slope = torch.autograd.grad(z.sum(), points, create_graph=True)[0]
        return F.mse_loss(z, y) + slope.square().mean()

    g = gradient(total(), params)
    want = solve_damped(mse_gram(model(x), params), g, DAMPING)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = total()
        loss.backward()
        return loss

    before = vector(model)
    assert not opt.step(closure).whitened
    assert_close(before - vector(model), want, 1e-8)


def test_an_input_that_the_model_differentiates_by() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(3, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]

    model = Slope()
    x, y = data(outputs=3)
    with pytest.warns(UserWarning, match=r"does not depend on net\.2\.bias"):
        check_mse_step(natural(model), model, model, x.requires_grad_(), y)


def test_a_model_applied_to_its_own_output_is_refused() -> None:
    model = nn.Linear(3, 3, dtype=DOUBLE)
    x, y = data(outputs=3)
    opt = natural(model)
    before = vector(model)
    with pytest.raises(pb.PullbackError, match="input depends on the model's own parameters"):
        opt.step(closure_of(opt, lambda x: model(model(x)), x, y))
    assert torch.equal(vector(model), before)


def test_an_input_computed_by_another_module_is_fine() -> None:
    model = mlp()
    encoder = nn.Linear(3, 3, dtype=DOUBLE)
    x, y = data()
    opt = natural(model)
    info = opt.step(closure_of(opt, lambda x: model(encoder(x)), x, y))
    assert info.accepted
    assert info.whitened


# --- in-place activations, dropout --------------------------------------------------------------


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_in_place_activations(form: str) -> None:
    model = mlp(act=lambda: nn.ReLU(inplace=True))
    x, y = data()
    assert check_mse_step(natural(model, gram=form), model, model, x, y).gram == form


def test_in_place_activation_of_the_output() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ELU(inplace=True)).to(DOUBLE)
    x, y = data()
    assert check_mse_step(natural(model), model, model, x, y).whitened


def test_an_output_changed_in_place_by_the_closure() -> None:
    model = mlp()
    x, y = data()
    opt = natural(model)
    params = list(model.parameters())
    z = model(x)
    want = solve_damped(mse_gram(z, params), gradient(F.mse_loss(F.elu(z), y), params), DAMPING)
    before = vector(model)
    closure = closure_of(opt, model, x, y, lambda z, y: F.mse_loss(F.elu_(z), y))
    assert opt.step(closure).whitened
    assert_close(before - vector(model), want, 1e-8)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_dropout_is_replayed_with_the_same_mask(form: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).to(DOUBLE)
    x, y = data()
    params = list(model.parameters())
    opt = natural(model, gram=form)
    start = torch.get_rng_state()
    z = model(x)
    after = torch.get_rng_state()
    want = solve_damped(mse_gram(z, params), gradient(F.mse_loss(z, y), params), DAMPING)
    torch.set_rng_state(start)
    before = vector(model)
    info = opt.step(closure_of(opt, model, x, y))
    assert_close(before - vector(model), want, 1e-8)
    assert info.whitened == (form != "dense")
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize(
    "step",
    [pb.steps.GridLineSearch(5), pb.steps.Backtracking(), pb.steps.LevenbergMarquardt()],
    ids=lambda s: type(s).__name__,
)
def test_trials_see_the_same_mask_and_leave_one_evaluation_behind(step: pb.steps.Step) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).to(DOUBLE)
    x, y = data()
    opt = natural(model, step=step)
    closure = closure_of(opt, model, x, y)
    start = torch.get_rng_state()
    first = closure().item()
    after = torch.get_rng_state()
    gradients = [p.grad.clone() for p in model.parameters()]  # pyright: ignore
    torch.set_rng_state(start)
    info = opt.step(closure)
    assert info.accepted
    assert info.loss == first
    assert torch.equal(torch.get_rng_state(), after)
    for p, g in zip(model.parameters(), gradients, strict=True):  # the trials' are gone
        assert p.grad is not None
        assert torch.equal(p.grad, g)
    torch.set_rng_state(start)
    assert closure().item() == pytest.approx(info.new_loss, rel=1e-12)


def test_trials_leave_buffers_as_after_one_evaluation() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("in_place", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.in_place += 1
            self.replaced = self.replaced + 1
            return self.net(x)

    model = Counting()
    x, y = data()
    opt = natural(model, step=pb.steps.GridLineSearch(5))
    assert opt.step(closure_of(opt, model, x, y)).accepted
    assert float(model.in_place) == 1
    assert float(model.replaced) == 1


# --- compiled models ----------------------------------------------------------------------------


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("called_before", [False, True])
def test_a_compiled_model(compiler, backend: str, called_before: bool) -> None:
    model = mlp()
    x, y = data()
    compiled = compiler(model, backend=backend)
    if called_before:
        F.mse_loss(compiled(x), y).backward()
    opt = natural(compiled)
    for _ in range(3):
        assert check_mse_step(opt, model, compiled, x, y).whitened


def test_a_compiled_model_under_a_line_search(compiler) -> None:
    model = mlp()
    x, y = data()
    compiled = compiler(model, backend="aot_eager")
    opt = natural(compiled, step=pb.steps.Backtracking())
    closure = closure_of(opt, compiled, x, y)
    info = opt.step(closure)
    assert info.accepted
    assert closure().item() == pytest.approx(info.new_loss, rel=1e-10)


@pytest.mark.parametrize("called_before", [False, True])
def test_a_model_compiled_in_place(compiler, called_before: bool) -> None:
    model = mlp()
    x, y = data()
    model.compile(backend="aot_eager")
    if called_before:
        F.mse_loss(model(x), y).backward()
    opt = natural(model)
    for _ in range(3):
        assert check_mse_step(opt, model, model, x, y).whitened
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_part_of_a_model_is_not_compiled_again_by_us(compiler, in_place) -> None:
    submodule = mlp(3, 5, 4)
    x, y = data()
    if in_place:
        submodule.compile(backend="eager")
    model = nn.Sequential(
        submodule if in_place else compiler(submodule, backend="eager"), nn.Tanh()
    )
    model.append(nn.Linear(4, 2, dtype=DOUBLE))
    F.mse_loss(model(x), y).backward()
    opt = natural(model)
    opt.step(closure_of(opt, model, x, y))
    compiled = torch._dynamo.utils.counters["frames"]["total"]
    for _ in range(3):
        info = check_mse_step(opt, model, model, x, y)
        assert all(c.reason == "known layer" for c in info.coverage)
    assert torch._dynamo.utils.counters["frames"]["total"] == compiled


@pytest.mark.parametrize("called_before", [False, True])
def test_the_compiled_twin_of_the_model_we_were_given(compiler, called_before: bool) -> None:
    """Either it is seen and the answer is right, or the error says what to do."""
    model = mlp()
    x, y = data()
    compiled = compiler(model, backend="eager")
    if called_before:
        F.mse_loss(compiled(x), y).backward()
    opt = natural(model)
    try:
        check_mse_step(opt, model, compiled, x, y)
        said = None
    except pb.PullbackError as error:
        said = error.remedy
    assert said is None or "give the optimizer the compiled module" in said
    assert hooks(model) == 0


def test_the_plain_twin_of_a_compiled_model_we_were_given(compiler) -> None:
    model = mlp()
    x, y = data()
    opt = natural(compiler(model, backend="eager"))
    with pytest.raises(pb.PullbackError, match="The closure never called the model"):
        opt.step(closure_of(opt, model, x, y))


# --- precision ----------------------------------------------------------------------------------


def reference_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The dense answer in float64 at the model's own values."""
    twin = copy.deepcopy(model).double()
    params = list(twin.parameters())
    z = twin(x.double())
    return solve_damped(mse_gram(z, params), gradient(F.mse_loss(z, y.double()), params), DAMPING)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(DOUBLE, 1e-9), (torch.float32, 1e-3), (torch.bfloat16, 0.2)]
)
@pytest.mark.parametrize("samples", [4, 40])
def test_dtypes_of_parameters(dtype: torch.dtype, rtol: float, samples: int) -> None:
    model = mlp(dtype=dtype)
    x, y = data(samples, dtype=dtype)
    want = reference_step(model, x, y)
    before = vector(model).double()
    opt = natural(model)
    assert opt.step(closure_of(opt, model, x, y)).accepted
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_close(before - vector(model).double(), want, rtol)


@pytest.mark.parametrize("step", [pb.steps.Constant(0.5), pb.steps.Backtracking()], ids=repr)
def test_mixed_dtypes_of_parameters(step: pb.steps.Step) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(3, 4)
            self.high = nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.high(torch.tanh(self.low(x.float())).double())

    model = Mixed()
    x, y = data(40)
    opt = natural(model, step=step)
    closure = closure_of(opt, model, x, y)
    first = opt.step(closure)
    assert first.accepted
    assert closure().item() < first.loss
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [DOUBLE] * 2


@pytest.mark.parametrize(("inside", "outside"), [(torch.float32, DOUBLE), (DOUBLE, torch.float32)])
def test_outputs_in_another_dtype_than_the_parameters(inside, outside) -> None:
    class Casting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.to(inside)).to(outside)

    model = Casting(3, 2, dtype=inside)
    x, y = data(dtype=outside)
    twin = nn.Linear(3, 2, dtype=inside)
    twin.load_state_dict(model.state_dict())
    want = reference_step(twin, x, y)
    before = vector(model).double()
    opt = natural(model)
    assert opt.step(closure_of(opt, model, x, y)).accepted
    assert_close(before - vector(model).double(), want, 1e-4)


def autocast_oracle(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """J and g of the model as it runs under autocast, solved densely in float64."""
    params = list(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        z = model(x)
        loss = F.mse_loss(z.float(), y)
    return solve_damped(mse_gram(z, params).double(), gradient(loss, params).double(), DAMPING)


@pytest.mark.parametrize("samples", [4, 40])
def test_autocast_in_the_closure_and_around_the_step(samples: int) -> None:
    model = mlp(dtype=torch.float32)
    x, y = data(samples, dtype=torch.float32)
    twin = copy.deepcopy(model)
    want = autocast_oracle(model, x, y)
    before = vector(model)
    opt = natural(model)

    def closure() -> Tensor:
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            z = model(x)
            assert z.dtype == torch.bfloat16
            loss = F.mse_loss(z.float(), y)
        loss.backward()
        return loss

    assert opt.step(closure).accepted
    # entries of J are rounded to bfloat16, and reverse passes round them in another order
    assert_close((before - vector(model)).double(), want, 0.15)
    opt = natural(twin)
    with torch.autocast("cpu", torch.bfloat16):  # the linear algebra must not run in it
        opt.step(closure_of(opt, twin, x, y, lambda z, y: F.mse_loss(z.float(), y)))
    assert torch.equal(vector(twin), vector(model))


def test_trials_run_under_the_autocast_around_the_step() -> None:
    model = mlp(dtype=torch.float32)
    x, y = data(dtype=torch.float32)
    opt = natural(model, step=pb.steps.Backtracking())
    dtypes = set()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        dtypes.add(z.dtype)
        return F.mse_loss(z.float(), y)

    closure = closure_of(opt, model, x, y, loss)
    with torch.autocast("cpu", torch.bfloat16):
        info = opt.step(closure)
        assert info.accepted
        assert closure().item() == pytest.approx(info.new_loss, rel=1e-6)
    assert dtypes == {torch.bfloat16}


# --- structured outputs, batch axis ---------------------------------------------------------------


class Packed(nn.Module):
    def __init__(self, pack) -> None:
        super().__init__()
        self.net = mlp()
        self.pack = pack

    def forward(self, x: Tensor):
        z = self.net(x)
        return self.pack(z, z.sum(1))


class Record:
    def __init__(self, logits: Tensor, other: Tensor) -> None:
        self.logits = logits
        self.other = other


@pytest.mark.parametrize(
    ("pack", "output", "pick"),
    [
        (lambda z, s: (z, s), 0, lambda o: o[0]),
        (lambda z, s: (s, z), -1, lambda o: o[-1]),
        (lambda z, s: {"logits": z, "sum": s}, "logits", lambda o: o["logits"]),
        (lambda z, s: {"values": z, "keys": s}, "values", lambda o: o["values"]),
        (lambda z, s: Record(z, s), "logits", lambda o: o.logits),
        (lambda z, s: [[z], s], lambda o: o[0][0], lambda o: o[0][0]),
    ],
    ids=["index", "last", "key", "key named like a method", "attribute", "function"],
)
def test_output_selectors(pack, output, pick) -> None:
    model = Packed(pack)
    x, y = data()
    opt = natural(model, output=output)
    params = list(model.parameters())
    z = pick(model(x))
    want = solve_damped(mse_gram(z, params), gradient(F.mse_loss(z, y), params), DAMPING)
    before = vector(model)
    info = opt.step(closure_of(opt, lambda x: pick(model(x)), x, y))
    assert info.whitened
    assert_close(before - vector(model), want, 1e-8)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_batch_dim(form: str) -> None:
    """A network over (time, batch, features), whose samples stand on axis 1."""

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(3, 4, 2)
            self.scale = nn.Parameter(torch.ones(2, dtype=DOUBLE))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(self.inner(x), 0) * self.scale

    model = Sequence()
    x = torch.randn(3, 5, 3, dtype=DOUBLE)
    y = torch.randn(3, 5, 2, dtype=DOUBLE)
    info = check_mse_step(
        natural(model, output=pb.optim.Outputs(batch_dim=1), gram=form), model, model, x, y
    )
    assert info.rows == 30


def test_several_inputs_and_keywords() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2, dtype=DOUBLE)
            self.b = nn.Linear(3, 2, dtype=DOUBLE)

        def forward(self, x: Tensor, other: Tensor, *, scale: Tensor, power: int = 1) -> Tensor:
            return (self.a(x) * self.b(other) * scale) ** power

    model = Bilinear()
    x, y = data()
    other = torch.randn(6, 3, dtype=DOUBLE)
    scale = torch.tensor(0.5, dtype=DOUBLE)
    opt = natural(model)
    params = list(model.parameters())

    def call(x: Tensor) -> Tensor:
        return model(x, other, scale=scale, power=2)

    z = call(x)
    want = solve_damped(mse_gram(z, params), gradient(F.mse_loss(z, y), params), DAMPING)
    before = vector(model)
    assert opt.step(closure_of(opt, call, x, y)).whitened
    assert_close(before - vector(model), want, 1e-8)


def test_a_one_dimensional_output_is_one_value_per_sample() -> None:
    model = nn.Sequential(mlp(3, 5, 1), nn.Flatten(0))
    x, y = data()
    check_mse_step(natural(model), model, model, x, y[:, 0])


def test_unused_outputs_of_a_categorical_model_are_left_out() -> None:
    """`ignore_index`: positions without a target are neither in the metric nor in its mean."""
    model = mlp(3, 5, 3)
    x = torch.randn(6, 3, dtype=DOUBLE)
    y = torch.tensor([0, 1, -100, 2, -100, 1])
    params = list(model.parameters())
    is_kept = y != -100
    opt = pb.NaturalGradient(
        model, pb.metrics.Fisher(pb.likelihoods.Categorical()), pb.solvers.Cholesky(DAMPING)
    )
    z = model(x)[is_kept]
    p = z.softmax(1).detach()
    fisher = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / 4
    want = solve_damped(
        gram(z, params, fisher), gradient(F.cross_entropy(z, y[is_kept]), params), DAMPING
    )
    before = vector(model)
    assert opt.step(closure_of(opt, model, x, y, F.cross_entropy)).whitened
    assert_close(before - vector(model), want, 1e-8)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_outputs_of_any_shape(form: str) -> None:
    """Classes of pixels: logits (N, C, H, W), one sample per pixel."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2), nn.Tanh(), nn.Conv2d(3, 3, 1)).to(DOUBLE)
    x = torch.randn(2, 2, 4, 4, dtype=DOUBLE)
    y = torch.randint(0, 3, (2, 2, 2))
    params = list(model.parameters())
    metric = pb.metrics.Fisher(pb.likelihoods.Categorical(dim=1))
    opt = pb.NaturalGradient(model, metric, pb.solvers.Cholesky(DAMPING), lr=1.0, gram=form)
    z = model(x)
    pixels = z.movedim(1, -1).reshape(-1, 3)
    p = pixels.softmax(1).detach()
    fisher = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / 8
    want = solve_damped(
        gram(pixels, params, fisher), gradient(F.cross_entropy(z, y), params), DAMPING
    )
    before = vector(model)
    info = opt.step(closure_of(opt, model, x, y, F.cross_entropy))
    assert info.rows == 24
    assert_close(before - vector(model), want, 1e-8)


def test_buffers_are_read_and_not_written() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(DOUBLE)
    x, y = data()
    model(x)  # statistics that are not the initial ones
    model[1].eval()
    before = copy.deepcopy(dict(model.named_buffers()))
    opt = natural(model)
    for _ in range(2):
        assert check_mse_step(opt, model, model, x, y).whitened
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.parametrize("samples", [4, 40], ids=["sample space", "parameter space"])
def test_reduction_sum(samples: int) -> None:
    model = mlp()
    x, y = data(samples)
    params = list(model.parameters())
    opt = natural(model, output=pb.optim.Outputs(reduction="sum"))
    z = model(x)
    loss = F.mse_loss(z, y, reduction="sum")
    want = solve_damped(gram(z, params, 2.0), gradient(loss, params), DAMPING)
    before = vector(model)
    closure = closure_of(opt, model, x, y, lambda z, y: F.mse_loss(z, y, reduction="sum"))
    assert opt.step(closure).whitened
    assert_close(before - vector(model), want, 1e-8)


class _LossInside(nn.Module):
    """Computes its loss from an output, and returns a copy of the output in another dtype."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.network(x)
        return {"loss": F.mse_loss(z, y), "logits": z.double()}


def test_a_loss_of_the_output_before_it_is_converted_is_seen() -> None:
    network = mlp().float()
    reference = copy.deepcopy(network)
    x, y = (t.float() for t in data())
    model = _LossInside(network)
    opt = natural(model)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(x, y)["loss"]
        loss.backward()
        return loss

    assert opt.step(closure).accepted
    plain = natural(reference)
    plain.step(closure_of(plain, reference, x, y))
    assert_close(flat(network.parameters()), flat(reference.parameters()), 1e-4)
