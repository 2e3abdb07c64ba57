"""Bad input: a clear error that says what, why and what to do, or a clean rejected step."""

import random
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback._core.space import ParameterSpace

from .common import DOUBLE, closure_of, data, expect_unchanged, mlp, refused, vector

SEARCHES = [
    pb.steps.GridLineSearch(4),
    pb.steps.Backtracking(),
    pb.steps.LevenbergMarquardt(),
]


class Disturbing(nn.Module):
    """A net whose forward pass draws random numbers and counts its calls in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2)).to(DOUBLE)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        return self.net(x)


# --- what is not finite -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_loss_is_rejected(value: float) -> None:
    model = Disturbing()
    x, y = data()
    opt = pb.NaturalGradient(model)
    opt.step(closure_of(opt, model, x, y))
    with expect_unchanged(model, opt):
        info = opt.step(closure_of(opt, model, x, y, lambda z, y: F.mse_loss(z, y) * value))
    assert not info.accepted
    assert "the loss is not finite" in info.reason
    assert info.step_size == 0.0


def test_non_finite_loss_is_rejected_before_any_trial() -> None:
    model = Disturbing()
    x, y = data()
    opt = pb.NaturalGradient(model, step=pb.steps.GridLineSearch(4))
    with expect_unchanged(model, opt):
        info = opt.step(closure_of(opt, model, x * float("nan"), y))
    assert not info.accepted
    assert info.trials == 0


def test_non_finite_gradient_is_rejected() -> None:
    model = Disturbing()
    x, y = data()
    opt = pb.NaturalGradient(model)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, y) + torch.sqrt(0.0 * z.sum())  # derivative 0/0

    with expect_unchanged(model, opt):
        info = opt.step(closure_of(opt, model, x, y, loss))
    assert not info.accepted
    assert info.reason == "the gradient is not finite"


def test_a_run_goes_on_after_a_rejected_step() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, step=pb.steps.Backtracking())
    good = closure_of(opt, model, x, y)
    assert not opt.step(closure_of(opt, model, x * float("nan"), y)).accepted
    info = opt.step(good)
    assert info.accepted
    assert good().item() < info.loss


def test_non_finite_trial_losses_are_avoided() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, step=pb.steps.Backtracking())
    start = vector(model)

    def barrier(z: Tensor, y: Tensor) -> Tensor:
        far = (vector(model) - start).norm() > 1e-2
        return F.mse_loss(z, y) * (float("nan") if far else 1.0)

    info = opt.step(closure_of(opt, model, x, y, barrier))
    assert info.accepted
    assert 0 < (vector(model) - start).norm() <= 1e-2


# --- batches ----------------------------------------------------------------------------------


def test_empty_batch_with_a_mean_is_rejected() -> None:
    model = mlp()
    x, y = data(0)
    opt = pb.NaturalGradient(model)
    with expect_unchanged(model, opt):
        assert not opt.step(closure_of(opt, model, x, y)).accepted


def test_empty_batch_with_a_sum_is_refused() -> None:
    model = Disturbing()
    x, y = data(0)
    opt = pb.NaturalGradient(model, output=pb.optim.Outputs(reduction="sum"))
    total = closure_of(opt, model, x, y, lambda z, y: (z - y).square().sum())
    with (
        expect_unchanged(model, opt),
        refused("The batch is empty", "(0, 2)", "Skip empty batches"),
    ):
        opt.step(total)


def test_batch_of_one() -> None:
    model = mlp()
    x, y = data(1)
    opt = pb.NaturalGradient(model)
    assert opt.step(closure_of(opt, model, x, y)).accepted


def test_batch_norm_in_training_mode_is_refused_and_its_statistics_are_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(DOUBLE)
    opt = pb.NaturalGradient(model)
    x, y = data()
    closure = closure_of(opt, model, x, y)
    with (
        expect_unchanged(model, opt),
        refused("BatchNorm1d '1' couples the samples", "no tangent vector per sample", ".eval()"),
    ):
        opt.step(closure)
    model[1].eval()
    assert opt.step(closure).accepted


def test_an_input_changed_after_the_forward_pass_is_refused() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        x.zero_()
        return loss

    with refused("An input changed", "modified in place", "Pass a copy"):
        opt.step(closure)


def test_a_model_that_changes_its_input_is_refused() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.mul_(2))

    model = Doubling(3, 2, dtype=DOUBLE)
    x, y = data()
    opt = pb.NaturalGradient(model)
    with refused("An input changed", "modified in place", "Pass a copy"):
        opt.step(closure_of(opt, model, x, y))


# --- losses -----------------------------------------------------------------------------------


def test_a_large_loss_is_judged_in_its_own_precision() -> None:
    model = nn.Linear(3, 2).to(DOUBLE)
    x, _ = data()
    opt = pb.NaturalGradient(model)
    y = torch.full((6, 2), 1e150, dtype=DOUBLE)  # L = 1e300, beyond float32
    assert opt.step(closure_of(opt, model, x, y)).accepted

    def objective(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, params, (x,)) + y

    assert opt.step(objective=objective).accepted


class Auxiliary(nn.Module):
    """Two heads on one body: the metric sees the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.other = nn.Linear(4, 1)
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.body(x))
        return self.head(self.features)


def test_parameters_that_the_output_does_not_depend_on_are_named_once() -> None:
    model = Auxiliary()
    x, y = data()
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(1e-3))
    weight = [0.0]

    def auxiliary() -> Tensor:
        return weight[0] * model.other(model.features).square().mean()

    closure = closure_of(opt, model, x, y, extra=auxiliary)
    with warnings.catch_warnings():  # no gradient reaches the other head yet
        warnings.simplefilter("error")
        opt.step(closure)
    weight[0] = 1.0
    with pytest.warns(
        RuntimeWarning, match=r"on other\.weight, other\.bias, but .* Freeze"
    ) as caught:
        opt.step(closure)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(closure)
        model.other.requires_grad_(False)
        frozen = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(1e-3))
        frozen.step(closure_of(frozen, model, x, y, extra=auxiliary))


def test_a_loss_without_one_parameter_warns_and_names_it() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}).to(DOUBLE)
    model.forward = lambda x: model["used"](x)  # pyright: ignore
    x, y = data()
    opt = pb.NaturalGradient(model)
    before = vector(model["unused"])
    closure = closure_of(opt, model, x, y)
    expected = r"does not depend on unused\.weight, unused\.bias"
    with pytest.warns(UserWarning, match=expected) as caught:
        assert opt.step(closure).accepted
    assert caught[0].filename == __file__
    assert torch.equal(before, vector(model["unused"]))
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        opt.step(closure)


def test_a_loss_without_any_optimized_parameter_is_refused() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}).to(DOUBLE)
    model.forward = lambda x: model["used"](x)  # pyright: ignore
    x, y = data()
    opt = pb.NaturalGradient(model, params=model["unused"].parameters())
    with (
        expect_unchanged(model, opt),
        refused("does not depend on any optimized parameter", "every gradient is None", "closure"),
    ):
        opt.step(closure_of(opt, model, x, y))


def test_closure_that_returns_nothing() -> None:
    model = Disturbing()
    x, y = data()
    opt = pb.NaturalGradient(model)
    inner = closure_of(opt, model, x, y)

    def closure() -> None:
        inner()

    with (
        expect_unchanged(model, opt),
        refused("did not return the loss", "NoneType", "return loss"),
    ):
        opt.step(closure)


def test_closure_that_returns_one_loss_per_sample() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model)

    def closure() -> Tensor:
        opt.zero_grad()
        losses = (model(x) - y).square().mean(1)
        losses.mean().backward()
        return losses

    with expect_unchanged(model, opt), refused("The loss is not one number", "(6,)", "Reduce it"):
        opt.step(closure)


def test_closure_that_does_not_call_backward() -> None:
    model = Disturbing()
    x, y = data()
    opt = pb.NaturalGradient(model)
    with (
        expect_unchanged(model, opt),
        refused("No gradient reached", "did not call backward()", "loss.backward()"),
    ):
        opt.step(lambda: F.mse_loss(model(x), y))


def test_closure_that_does_not_call_the_model() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model)
    other = nn.Sequential(*model)  # the same layers, but not the module we watch
    with (
        expect_unchanged(model, opt),
        refused("The closure never called the model", "no forward pass", "Call that module"),
    ):
        opt.step(closure_of(opt, other, x, y))


def test_closure_under_no_grad() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model)

    @torch.no_grad()
    def closure() -> Tensor:
        return F.mse_loss(model(x), y)

    with refused("never called the model with gradients enabled", "", ""):
        opt.step(closure)


def test_a_loss_that_ignores_the_output() -> None:
    model = mlp()
    x, _ = data()
    opt = pb.NaturalGradient(model)

    def closure() -> Tensor:
        opt.zero_grad()
        model(x)
        loss = sum(p.square().sum() for p in model.parameters())
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    with refused("No gradient reached", "does not depend on the output", ""):
        opt.step(closure)


def test_an_exception_in_the_closure_passes_through_and_leaves_nothing_behind() -> None:
    model = Disturbing()
    x, _ = data()
    opt = pb.NaturalGradient(model)

    def closure() -> Tensor:
        model(x)
        raise ZeroDivisionError

    with expect_unchanged(model, opt), pytest.raises(ZeroDivisionError):
        opt.step(closure)


@pytest.mark.parametrize("step", SEARCHES, ids=repr)
def test_a_stochastic_closure_under_a_line_search_is_refused(step: pb.steps.Step) -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, step=step)
    noise = random.Random(0)
    closure = closure_of(
        opt, model, x, y, lambda z, y: F.mse_loss(z + noise.random(), y)
    )  # not from torch's generator, so it cannot be repeated
    with refused("The closure is stochastic", "evaluated twice", "steps.Constant"):
        before = vector(model)
        try:
            opt.step(closure)
        finally:
            assert torch.equal(before, vector(model))


@pytest.mark.parametrize("step", SEARCHES, ids=repr)
def test_noise_from_torch_is_repeated_in_trials(step: pb.steps.Step) -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, step=step)
    noisy = closure_of(opt, model, x, y, lambda z, y: F.mse_loss(z + torch.randn_like(z), y))
    state = torch.get_rng_state()
    info = opt.step(noisy)
    torch.set_rng_state(state)
    assert info.accepted
    assert noisy().item() == pytest.approx(info.new_loss, rel=1e-12)


def test_a_stochastic_closure_with_constant_steps_is_fine() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, lr=1.0)
    noise = random.Random(0)
    noisy = closure_of(opt, model, x, y, lambda z, y: F.mse_loss(z + noise.random(), y))
    assert opt.step(noisy).accepted


# --- parameters -------------------------------------------------------------------------------


def hold_parameter(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.register_parameter("odd", parameter)
    return module


def test_integer_parameters() -> None:
    model = hold_parameter(nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    with refused("Parameter 'odd'", "torch.int64 has no gradient", "buffer"):
        pb.NaturalGradient(model, params=model.parameters())


def test_complex_parameters() -> None:
    model = hold_parameter(nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with refused("Parameter 'odd'", "it is complex", "view_as_real"):
        pb.NaturalGradient(model)


def test_lazy_parameters() -> None:
    with refused("Parameter '0.weight'", "it is lazy", "Run one forward pass"):
        pb.NaturalGradient(nn.Sequential(nn.LazyLinear(2)))


def test_meta_parameters() -> None:
    with refused("Parameter 'weight'", "meta device", "to_empty"):
        pb.NaturalGradient(nn.Linear(2, 2, device="meta"))


def test_sparse_parameters() -> None:
    model = hold_parameter(nn.Parameter(torch.eye(2).to_sparse()))
    with refused("Parameter 'odd'", "torch.sparse_coo", "dense"):
        pb.NaturalGradient(model)


def test_parameters_created_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with refused("Parameter 'weight'", "created in inference mode", "outside inference_mode"):
        pb.NaturalGradient(model)


def test_parameters_on_several_devices() -> None:
    params = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    with refused("several devices", "['cpu', 'meta']", "Move the model to one device"):
        ParameterSpace(params)


def test_a_parameter_of_another_model() -> None:
    stranger = nn.Parameter(torch.zeros(7))
    with refused("does not belong to the model", "(7,)", "the module given"):
        pb.NaturalGradient(mlp(), params=[stranger])
    opt = pb.NaturalGradient(mlp())
    with refused("does not belong to the model", "(7,)", "the module given"):
        opt.add_param_group({"params": stranger})
    assert len(opt.param_groups) == 1


def test_nothing_left_to_optimize() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model)
    model.requires_grad_(False)
    with refused("nothing to optimize", "no parameter requires a gradient", "Unfreeze"):
        opt.step(closure_of(opt, model, x, y))


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    opt = pb.NaturalGradient(model)
    x = torch.randint(0, 10, (4, 2))
    y = torch.randn(4, 2)
    with (
        expect_unchanged(model, opt),
        refused("Parameter '0.weight' has a sparse gradient", "couples", "sparse=False"),
    ):
        opt.step(closure_of(opt, model, x, y))


# --- models and contexts ----------------------------------------------------------------------


def test_not_a_module() -> None:
    with refused("needs the model itself", "got list", "Pass an nn.Module"):
        pb.NaturalGradient(list(mlp().parameters()))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def process_group() -> Iterator[None]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_ddp() -> None:
    wrapped = nn.parallel.DistributedDataParallel(mlp())
    for model in (wrapped, torch.compile(wrapped, backend="eager"), wrapped.module):
        assert len(pb.NaturalGradient(model).param_groups[0]["params"]) == 4  # pyright: ignore


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("whole", [True, False])
def test_fsdp(whole: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model if whole else model[0], mesh=init_device_mesh("cpu", (1,)))
    what, why = (
        ("wrapped in FSDPModule", "several processes")
        if whole
        else ("Parameter '0.weight'", "sharded over several processes")
    )
    with refused(what, why, "one process"):
        pb.NaturalGradient(model)


def test_older_wrappers_are_known_by_name() -> None:
    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    with refused("wrapped in FullyShardedDataParallel", "hides", "DistributedDataParallel"):
        pb.NaturalGradient(FullyShardedDataParallel(mlp()))


def test_step_in_inference_mode() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model)
    closure = closure_of(opt, model, x, y)
    with (
        expect_unchanged(model, opt),
        refused("called in inference mode", "no Jacobian", "Leave torch.inference_mode()"),
        torch.inference_mode(),
    ):
        opt.step(closure)


def test_step_under_no_grad_works() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model)
    with torch.no_grad():
        assert opt.step(closure_of(opt, model, x, y)).accepted


def test_step_without_closure() -> None:
    opt = pb.NaturalGradient(mlp())
    with refused("needs a closure or an objective", "neither was given", "step(closure)"):
        opt.step()


def test_step_with_closure_and_objective() -> None:
    opt = pb.NaturalGradient(mlp())
    with refused("needs a closure or an objective", "both were given", "step(objective=f)"):
        opt.step(lambda: 0.0, objective=lambda p: p["0.weight"])


# --- outputs and metrics ----------------------------------------------------------------------


class Returning(nn.Module):
    """A linear layer whose output is packed by a function."""

    def __init__(self, pack, outputs: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(3, outputs, dtype=DOUBLE)
        self.pack = pack

    def forward(self, x: Tensor):
        return self.pack(self.linear(x))


@pytest.mark.parametrize(
    ("pack", "type_name"), [(lambda z: (z, z), "tuple"), (lambda z: {"scores": z}, "dict")]
)
def test_structured_outputs_without_a_selector(pack, type_name: str) -> None:
    model = Returning(pack)
    x, y = data()
    opt = pb.NaturalGradient(model)
    with (
        expect_unchanged(model, opt),
        refused("output is not one tensor", f"got {type_name}", "output=..."),
    ):
        opt.step(closure_of(opt, lambda x: next(iter(model(x))), x, y))


@pytest.mark.parametrize(
    ("pack", "selector"),
    [(lambda z: {"logits": z}, "probs"), (lambda z: (z, z), 2), (lambda z: [z], "logits")],
)
def test_a_selector_that_finds_nothing(pack, selector) -> None:
    model = Returning(pack)
    x, y = data()
    opt = pb.NaturalGradient(model, output=selector)
    with (
        expect_unchanged(model, opt),
        refused(f"output has no entry {selector!r}", "got", "output=..."),
    ):
        opt.step(closure_of(opt, model, x, y))


def test_scalar_output() -> None:
    model = Returning(lambda z: z.square().mean())
    x, y = data()
    opt = pb.NaturalGradient(model)
    with (
        expect_unchanged(model, opt),
        refused("output is a single number", "no batch axis", "one value per sample"),
    ):
        opt.step(closure_of(opt, model, x, y, lambda z, y: z))


def test_complex_output() -> None:
    model = Returning(torch.fft.fft)
    x, y = data()
    opt = pb.NaturalGradient(model)
    with refused("output is a complex tensor", "real function values", "view_as_real"):
        opt.step(closure_of(opt, model, x, y, lambda z, y: (z - y).abs().square().mean()))


def test_batch_dim_that_is_not_there() -> None:
    model = Returning(lambda z: z[:, 0])
    x, y = data()
    opt = pb.NaturalGradient(model, output=pb.optim.Outputs(batch_dim=1))
    with refused("output has no axis 1", "(6,)", "batch_dim="):
        opt.step(closure_of(opt, model, x, y[:, 0]))


@pytest.mark.parametrize(
    ("metric", "outputs", "what", "why", "remedy"),
    [
        (
            pb.metrics.Fisher(pb.likelihoods.Categorical()),
            1,
            "Categorical does not fit",
            "(6, 1) does not hold two or more classes",
            "Bernoulli for a single logit",
        ),
        (
            pb.metrics.Fisher(pb.likelihoods.Categorical(dim=3)),
            2,
            "Categorical does not fit",
            "axis 3 of shape (6, 2)",
            "Set Categorical(dim=...)",
        ),
        (
            lambda z: torch.eye(3, dtype=z.dtype).expand(6, 3, 3),
            2,
            "The metric does not fit",
            "(6, 3, 3) for values of shape (6, 2)",
            "one 2×2 matrix per sample",
        ),
        (
            lambda z: torch.eye(2, dtype=z.dtype),
            2,
            "The metric does not fit",
            "(2, 2)",
            "(6, 2, 2)",
        ),
        (
            pb.metrics.Weighted(pb.metrics.Euclidean(), torch.ones(5)),
            2,
            "The weights do not fit",
            "weights (5,), output (6, 2)",
            "one weight per sample",
        ),
        (
            pb.metrics.Weighted(pb.metrics.Euclidean(), -torch.ones(6)),
            2,
            "A weight is negative",
            "indefinite",
            "≥ 0",
        ),
        (
            pb.metrics.Fisher(pb.likelihoods.Gaussian("learned")),
            3,
            "does not fit the model's output",
            "the last axis has 3 entries",
            "as many log-variances as means",
        ),
    ],
    ids=["one class", "no axis", "matrices", "one matrix", "weights", "negative", "odd width"],
)
def test_a_metric_that_does_not_fit(metric, outputs, what, why, remedy) -> None:
    model = Returning(lambda z: z, outputs)
    x, y = data(outputs=outputs)
    opt = pb.NaturalGradient(model, metric)
    with expect_unchanged(model, opt), refused(what, why, remedy):
        opt.step(closure_of(opt, model, x, y))


def test_a_metric_that_couples_samples_and_two_calls() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, pb.metrics.Sobolev())
    closure = closure_of(opt, lambda x: torch.cat([model(x[:3]), model(x[3:])]), x, y)
    with refused("couples the samples of one forward call", "2 forward calls", "in one call"):
        opt.step(closure)


@pytest.mark.parametrize("metric", ["fisher", pb.metrics.Euclidean, 3])
def test_things_that_are_no_metric(metric) -> None:
    with refused("The metric is not usable", "got", "Pass a metric object"):
        pb.NaturalGradient(mlp(), metric)


def test_fisher_of_a_class_instead_of_an_object() -> None:
    with refused("The loss has no likelihood", "Categorical", "Likelihood of your own"):
        pb.metrics.Fisher(pb.likelihoods.Categorical)  # pyright: ignore[reportArgumentType]


# --- options ----------------------------------------------------------------------------------


def test_unknown_choices() -> None:
    with refused("Unknown gram 'typo'", "not one of the choices", "Use one of '"):
        pb.NaturalGradient(mlp(), gram="typo")
    with refused("Unknown reduction 'typo'", "not one of the choices", "Use one of '"):
        pb.optim.Outputs(reduction="typo")


@pytest.mark.parametrize(("option", "class_name"), [("solver", "Solver"), ("step", "Step")])
def test_stages_given_by_name(option: str, class_name: str) -> None:
    with refused(f"{option}= is not a {class_name}", "got 'typo'", f"pullback.{option}s"):
        pb.NaturalGradient(mlp(), **{option: "typo"})  # pyright: ignore[reportArgumentType]


def test_retraction_of_an_unknown_parameter_is_refused_before_anything_moves() -> None:
    with refused("retract= names parameters that do not exist", "['typo']", "named_parameters"):
        pb.NaturalGradient(mlp(), retract={"typo": pb.steps.Bounds(-1, 1)})


@pytest.mark.parametrize("damping", [-1e-3, float("nan"), float("inf")])
@pytest.mark.parametrize("solver", [pb.solvers.Cholesky, pb.solvers.ConjugateGradient])
def test_unusable_damping(solver, damping: float) -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, solver=solver(damping))
    with (
        expect_unchanged(model),
        refused("The damping is not usable", f"got {damping}", "Use a number ≥ 0"),
    ):
        opt.step(closure_of(opt, model, x, y))


def test_negative_relative_damping() -> None:
    with refused("The damping is not usable", "got -1.0", "Use a number ≥ 0"):
        pb.solvers.Relative(-1.0)


@pytest.mark.parametrize("lr", [-0.1, float("nan")])
def test_unusable_learning_rate(lr: float) -> None:
    with refused("The learning rate is not usable", f"got {lr}", "maximize=True"):
        pb.NaturalGradient(mlp(), lr=lr)
    opt = pb.NaturalGradient(model := mlp(), params=model[0].parameters())
    other = model[2]
    with refused("The learning rate is not usable", f"got {lr}", "maximize=True"):
        opt.add_param_group({"params": other.parameters(), "lr": lr})


def test_target_ratio_without_a_damping_path() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(), step=pb.steps.TargetRatio())
    with (
        expect_unchanged(model),
        refused("TargetRatio cannot work here", "one factorization", "PseudoInverse()"),
    ):
        opt.step(closure_of(opt, model, x, y))


def test_a_gram_of_zero_is_a_rejected_step_with_the_reason() -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(
        model, lambda z: z.new_zeros(6, 2, 2), solver=pb.solvers.PseudoInverse()
    )
    with expect_unchanged(model):
        info = opt.step(closure_of(opt, model, x, y))
    assert not info.accepted
    assert not info.status.ok
    assert "add damping" in info.reason
