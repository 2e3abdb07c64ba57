"""What K-FAC refuses, with an error that says what, why and what to do, and changes nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pullback as pb
from pullback._core.errors import describe_value
from pullback.metrics import Sobolev, Weighted
from pullback.optim.kfac import Adaptive, Eigenbasis, Invariant, Spectral, TwoSided
from pullback.steps import QuadraticModel

from ..common import hooks, refused
from .common import DOUBLE, batch, kfac, net, train, vector

NAN = float("nan")
INF = float("inf")


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)


WRONG: dict[str, list[Any]] = {
    "lr": [-1.0, NAN, INF, "fast"], "momentum": [-0.1, 1.0, NAN], "weight_decay": [-1.0, NAN],
    "kl_clip": [0.0, -1.0], "ema": [1.0, -0.1], "statistics_every": [0, 1.5, True],
    "invert_every": [0, -1], "draws": [0], "max_factor": [0], "fisher": ["true"],
    "sharing": ["sum"], "reduction": ["none"], "batch_dim": [-1, 0.5], "output": [1.5],
    "joint": [1], "ekfac": [None], "seed": [0.5], "grad_scaler": [3],
    "params": [3, "weight", {"weight": torch.ones(2)}, torch.ones(2, 2)],
    "step": ["quadratic", QuadraticModel, 1.0],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arguments(name: str) -> None:
    model = net()
    for value in WRONG[name]:
        with refused(f"{name}= is not usable", f"got {describe_value(value)}", "Use"):
            kfac(model, **{name: value})
    assert not hooks(model)


@pytest.mark.parametrize("rule", [Spectral, TwoSided, Eigenbasis])
@pytest.mark.parametrize(("name", "value"), [("head", "yes"), ("estimation", 3)])
def test_arguments_of_rules(rule: Any, name: str, value: Any) -> None:
    with refused(f"{name}= is not usable", f"got {describe_value(value)}", "Use"):
        rule(**{name: value})


ARGUMENTS: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
    ({"lr": torch.tensor(0.1)}, ("lr=", "tensor", "such as value.item()")),
    ({"lr": 10**400}, ("lr= is not usable", "got 1000", "a number ≥ 0")),
    ({"damping": 10**400}, ("damping", "got 1000", "number")),
    ({"params": torch.ones(20, 20)}, ("params=", "got Tensor of shape (20, 20)", "a list")),
    ({"rule": pb.optim.kfac.Natural}, ("rule=", "the class Natural itself, not an object", "Use")),
    ({"likelihood": nn.MSELoss}, ("no likelihood", "the class MSELoss itself", "an object")),
]


@pytest.mark.parametrize(("options", "words"), ARGUMENTS)
def test_what_was_given_is_described_in_few_words(
    options: Any, words: tuple[str, str, str]
) -> None:
    with refused(*words):
        pb.KFAC(net(), **options)


def test_an_index_of_an_output_that_is_one_tensor() -> None:
    model = net()
    with refused("no entry 0", "it is one tensor, of shape", "Leave output= out"):
        train(kfac(model, output=0), model)


def test_a_layer_that_was_replaced() -> None:
    model = net()
    opt = kfac(model, statistics_every=1)
    train(opt, model)
    model[0] = nn.Linear(*model[0].weight.shape[::-1])
    with refused("saw no layer", "held other parameters", "Build the optimizer again"):
        train(opt, model)


def built(**options: Any) -> Any:
    return kfac(net(), **options)


def regroup(**options: Any) -> Any:
    model = net()
    return kfac(model, params=[{"params": model.parameters(), **options}])


def linear(**options: Any) -> Any:
    return kfac(nn.Linear(3, 3, **options))


MSE = pb.likelihoods.MSE()
OTHER = "only lr, weight_decay, momentum"
#: what is built, and what is said: what|why|what to do
BUILT: dict[str, tuple[Callable[[], Any], str]] = {
    "negative damping": (lambda: built(damping=-1.0), "damping|got -1.0|Use a number"),
    "damping by name": (lambda: built(damping="much"), "damping|got 'much'|Use a number"),
    "boolean damping": (lambda: built(damping=True), "damping|got True|Use a number"),
    "two metrics": (lambda: built(likelihood=MSE, metric=len), "Both|itself a metric|Give one"),
    "loss": (lambda: built(likelihood=F.l1_loss), "no likelihood|l1_loss|Categorical()"),
    "list": (lambda: kfac([net()]), "needs the model itself|list|Pass an nn.Module"),
    "nothing": (lambda: kfac(nn.ReLU()), "nothing to optimize|no parameters|Pass a model"),
    "parallel": (lambda: kfac(nn.DataParallel(net())), "DataParallel|hides|Distributed"),
    "script": (lambda: kfac(torch.jit.script(net())), "ScriptModule|watched|torch.compile"),
    "lazy": (lambda: kfac(nn.LazyLinear(3)), "'weight' cannot be optimized|lazy|Run one forward"),
    "complex": (lambda: linear(dtype=torch.cfloat), "cannot be optimized|complex|view_as_real"),
    "meta": (lambda: linear(device="meta"), "cannot be optimized|meta|to_empty"),
    "strange": (lambda: built(params=[nn.Parameter(torch.ones(3))]), "not belong|shape (3,)|Pass"),
    "name": (lambda: built(params=["0.weight"]), "does not belong|'0.weight'|Pass parameters"),
    "group's rate": (lambda: regroup(lr=-1), "lr= is not usable|got -1|Use"),
    "huge rate": (lambda: regroup(lr=10**400), "lr= is not usable|got 1000|Use"),
    "group's damping": (lambda: regroup(damping=1.0), f"its own damping=|{OTHER}|Give it to KFAC"),
    "ekfac, Invariant": (lambda: built(ekfac=True, damping=Invariant(0.1)), "eigenvalues||"),
    "ekfac, Sobolev": (lambda: built(metric=Weighted(Sobolev(), 2.0), ekfac=True), "ekfac||"),
    "empirical, Sobolev": (lambda: built(metric=Sobolev(), fisher="empirical"), "empirical||"),
    "factor": (lambda: Adaptive(factor=0.5), "is not usable|0.5|"),
    "factor by name": (lambda: Adaptive(factor="much"), "is not usable|'much'|"),  # pyright: ignore[reportArgumentType]
    "low > high": (lambda: Adaptive(low=2.0), "is not usable|low=2.0|low ≤ high"),
    "low < 0": (lambda: Adaptive(low=-1.0), "is not usable|low=-1.0|"),
    "bounds": (lambda: Adaptive(smallest=10.0, largest=1.0), "is not usable|10.0|"),
    "infinite": (lambda: Adaptive(largest=INF), "is not usable|largest=inf|"),
    "twice": (lambda: Adaptive(Adaptive(1.0)), "is not usable|adapts already|Give a number"),
    "number": (lambda: Invariant(0.1, 3), "reference is not usable|got int|KFAC.average()"),  # pyright: ignore[reportArgumentType]
    "other dict": (lambda: Invariant(0.1, {"x": 1}), "reference is not usable|got|KFAC.average()"),  # pyright: ignore[reportArgumentType]
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BUILT)
def test_models_options_and_dampings(name: str) -> None:
    build, words = BUILT[name]
    with refused(*words.split("|")):
        build()


def test_groups_that_are_added() -> None:
    model = net()
    opt = kfac(model, params=model[0].parameters())
    for group in ({}, 3, {"params": 3}, {"lr": 0.1}):
        with refused("A param group is not usable", "got", '"params"'):
            opt.add_param_group(group)  # pyright: ignore[reportArgumentType]
    with refused("'0.weight' is given twice", "another param group", "once"):
        opt.add_param_group({"params": [model[0].weight]})
    with refused("'2.weight' is given twice", "this one before", "once"):
        opt.add_param_group({"params": [model[2].weight, model[2].weight]})
    with refused("its own ema=", OTHER, "Give it to KFAC"):
        opt.add_param_group({"params": model[2].parameters(), "ema": 0.5})
    assert len(opt.param_groups) == 1


def test_rates_that_were_put_into_groups() -> None:
    model = net()
    opt = kfac(model)
    train(opt, model, 2)
    before = vector(model)
    wrong = [("lr", x) for x in ("0.1", None, True, NAN, -0.1, torch.ones(2), torch.tensor(-1.0))]
    for name, value in (*wrong, ("momentum", 1.0), ("weight_decay", {})):
        good = opt.param_groups[0][name]
        opt.param_groups[0][name] = value
        with refused(f"{name}= is not usable", "got", "Use a number"):
            train(opt, model)
        opt.param_groups[0][name] = good
    assert torch.equal(vector(model), before)
    assert train(opt, model) == [True]


def loss(z: Tensor, y: Tensor) -> None:
    F.cross_entropy(z, y).backward()


def without(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.no_grad():
        model(x)


def attack(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(model(x.requires_grad_()).sum(), x)


MISSED: list[tuple[Callable[[Any, Tensor, Tensor], Any], str]] = [
    (lambda m, x, y: loss(m.eval()(x), y), "evaluation mode"),
    (without, "without gradients"),
    (lambda m, x, y: loss(m[2](m[0](x)), y), "not called"),
    (lambda m, x, y: loss(m.forward(x), y), "not called"),
    (lambda m, x, y: (without(m, x, y), m(x)), "no gradient reached the model's output"),
    (lambda m, x, y: (without(m, x, y), attack(m, x)), "not to its parameters"),
    (lambda m, x, y: loss(torch.vmap(m)(x), y), "inside a transform of torch.func"),
]


@pytest.mark.parametrize(("prepare", "why"), MISSED)
def test_statistics_steps_that_saw_nothing(prepare: Callable[..., None], why: str) -> None:
    model = net()
    opt = kfac(model)
    before = vector(model)
    prepare(model, *batch())
    with refused("A statistics step saw no layer", why, "in training mode"):
        opt.step()
    assert torch.equal(before, vector(model))
    model.train()
    assert train(opt, model) == [True]


def test_steps_without_gradients_in_inference_mode_or_with_a_strange_closure() -> None:
    model = net()
    x, y = batch()
    opt = kfac(model)
    before = vector(model)
    for closure in (None, lambda: F.cross_entropy(model(x), y)):
        with refused("There is no gradient to follow", "None", "Call loss.backward()"):
            opt.step(closure)
    loss(model(x), y)
    with torch.inference_mode(), refused("inference mode", "updated later", "Leave"):
        opt.step()
    for optimizer in (opt, pb.NaturalGradient(model)):
        with refused("The closure cannot be called", "got int", "function"):
            optimizer.step(3)  # pyright: ignore[reportArgumentType]
    with refused("The objective is not usable", "got int", "optim.Objective"):
        opt.step(objective=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(pb.PullbackError, match="a closure and an objective"):
        opt.step(lambda: 0.0, objective=lambda params: {})
    assert torch.equal(vector(model), before)
    opt.step()
    assert opt.info.took_statistics


class After(nn.Module):
    """A network, and what is done to its output."""

    def __init__(self, after: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net = net()
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.net(x))


class Undeclared(pb.metrics.Metric):
    """Blocks between samples which nobody was told of."""

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> pb.metrics.Factor:
        return Sobolev(2.0).factor(z, inputs=inputs)


EMPTY = "|shape|kip empty batches"
#: the model, options, how it is called if not model(x), and what is said
PASSES: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "one class": (lambda: nn.Linear(3, 1), {}, None, "does not fit|two or more|Bernoulli"),
    "no samples": (net, {}, lambda model, x: model(x[:0]), EMPTY),
    "none on axis 1": (net, {"batch_dim": 1}, lambda model, x: model(x[None, :0]), EMPTY),
    "the loss itself": (lambda: After(torch.sum), {}, None, "||one value per sample"),
    "metric's shape": (net, {"metric": lambda z: z}, None, "does not fit|shape|Return one 4×4"),
    "undeclared coupling": (net, {"metric": Undeclared()}, None, "couples the samples||"),
    "sparse gradients": (
        lambda: nn.Embedding(9, 4, sparse=True), {}, lambda model, x: model(torch.arange(8)),
        "'weight' has a sparse gradient|couples|sparse=False",
    ),
    "in place": (net, {}, lambda model, x: model(x).add_(1.0), "in place|the values|Change a copy"),
    "reentrant checkpoint": (
        lambda: After(lambda z: checkpoint(torch.tanh, z, use_reentrant=True)), {}, None,
        "||use_reentrant=False",
    ),
    "computed output": (net, {"output": torch.exp}, None, "||in the model's forward"),
    "complex": (lambda: After(lambda z: torch.complex(z, z)), {}, None, "is a complex||"),
    "nested": (
        lambda: After(lambda z: torch.nested.as_nested_tensor([z[:2], z[2:]], layout=torch.jagged)),
        {}, None, "is a nested tensor||",
    ),
    "sparse": (lambda: After(Tensor.to_sparse), {}, None, "is a sparse_coo tensor||"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("name", PASSES)
def test_passes(name: str) -> None:
    make, options, call, words = PASSES[name]
    model = make()
    x = batch()[0]
    with kfac(model, **options), refused(*words.split("|")):
        (model(x) if call is None else call(model, x)).sum().backward()


def test_a_changed_shape() -> None:
    model = net()
    opt = kfac(model, statistics_every=1)
    train(opt, model)
    model[2].weight.data = torch.randn(7, 5)
    model[2].bias.data = torch.randn(7)
    with refused("'2.weight' changed its shape", "(4, 5), and is (7, 5)", "Build the optimizer"):
        train(opt, model)


def wider() -> Any:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "none": (net, lambda state: None),
    "empty": (net, lambda state: {}),
    "SGD's": (net, lambda state: torch.optim.SGD(net().parameters()).state_dict()),
    "no groups": (net, lambda state: {"state": state["state"]}),
    "wider": (wider, lambda state: state),
    "longer": (lambda: nn.Sequential(*net(), nn.Linear(4, 4)), lambda state: state),
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_do_not_fit_change_nothing(name: str) -> None:
    make, change = STATES[name]
    source = net()
    one = make()
    saved = kfac(source)
    first = kfac(one)
    train(saved, source, 3)
    train(first, one, 2)
    second = copy.deepcopy(first)
    with refused("saved state", "", "Load"):
        first.load_state_dict(change(copy.deepcopy(saved.state_dict())))
    for opt in (first, second):
        train(opt, opt.model, 4, start=2)
    assert torch.equal(vector(one), vector(second.model))


@pytest.mark.parametrize("make_optimizer", [pb.KFAC, pb.NaturalGradient])
def test_a_layer_that_was_appended_after_construction(make_optimizer: Any) -> None:
    """Its parameters may come as a list, one by one, alone or with their names."""
    model = net()
    opt = make_optimizer(model)
    model.append(nn.Linear(4, 4))
    layer = model[-1]
    for params in (
        [*layer.parameters()], layer.parameters(), layer.weight, layer.named_parameters()
    ):  # fmt: skip
        with refused("is new in the model", "added after the optimizer was built", "Build"):
            opt.add_param_group({"params": params})
    with refused("does not belong to the model", "is not among its parameters", "Pass"):
        opt.add_param_group({"params": nn.Linear(4, 4).parameters()})


def test_another_model_was_trained() -> None:
    model = net()
    opt = pb.KFAC(model)
    x, y = batch()
    F.cross_entropy(copy.deepcopy(model)(x), y).backward()
    with refused("no gradient", "is None", "another model"):
        opt.step()


def test_the_remedy_for_missing_statistics_names_compiled_modules() -> None:
    model = net()
    opt = pb.KFAC(model)
    x, y = batch()
    F.cross_entropy(model[-1](model[:-1](x)), y).backward()
    with refused("saw no layer", "not called", "KFAC(torch.compile(model))"):
        opt.step()
