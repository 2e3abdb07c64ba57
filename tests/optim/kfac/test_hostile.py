"""Bad input to K-FAC: a clear error that says what, why and what to do, or a clean fallback."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Adaptive

from ..common import hooks, refused, same
from .common import DOUBLE, batch, gram, kfac, net, train, vector


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(DOUBLE)
    yield
    torch.set_default_dtype(old)


# --- arguments ------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "lr": [-1.0, float("nan"), float("inf"), "fast", None],
    "momentum": [-0.1, 1.0, float("nan")],
    "weight_decay": [-1.0, float("nan")],
    "kl_clip": [0.0, -1.0],
    "ema": [1.0, -0.1],
    "statistics_every": [0, 1.5, True],
    "invert_every": [0, -1],
    "draws": [0],
    "max_factor": [0],
    "fisher": ["true"],
    "sharing": ["sum"],
    "reduction": ["none"],
    "batch_dim": [-1, 0.5],
    "output": [1.5],
    "joint": [1],
    "ekfac": [None],
    "seed": [0.5],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values])
def test_wrong_arguments(name: str, value: Any) -> None:
    with refused(f"{name}= is not usable", f"got {value!r}", "Use"):
        kfac(net(), **{name: value})


@pytest.mark.parametrize("value", [-1.0, float("nan"), "much"])
def test_wrong_damping(value: Any) -> None:
    with refused("damping", f"got {value!r}", "Use a number"):
        kfac(net(), damping=value)


def test_a_likelihood_and_a_metric() -> None:
    with refused("Both a likelihood and a metric", "itself a metric", "Give one"):
        kfac(net(), likelihood=pb.likelihoods.Categorical(), metric=pb.metrics.Euclidean())


def test_what_is_no_likelihood() -> None:
    with refused("Fisher needs a likelihood", "cross_entropy", "Categorical()"):
        kfac(net(), likelihood=F.cross_entropy)


def test_a_likelihood_that_does_not_fit() -> None:
    model = nn.Linear(3, 1)
    with kfac(model), refused("Categorical does not fit", "two or more classes", "Bernoulli"):
        model(batch()[0]).sum().backward()


def test_groups_with_wrong_values() -> None:
    model = net()
    with refused("lr= is not usable", "got -1", "Use"):
        kfac(model, params=[{"params": model.parameters(), "lr": -1}])


def test_strange_parameters() -> None:
    with refused("does not belong to the model", "shape (3,)", "Pass parameters of the module"):
        kfac(net(), params=[nn.Parameter(torch.zeros(3))])


class Holder(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def test_models_that_are_refused() -> None:
    with refused("KFAC needs the model itself", "list", "Pass an nn.Module"):
        kfac(list(net().parameters()))  # pyright: ignore
    with refused("nothing to optimize", "no parameters", "Pass a model"):
        kfac(nn.ReLU())
    with refused("wrapped in DataParallel", "several of them", "model.module"):
        kfac(nn.DataParallel(net()))
    with refused("'weight' cannot be optimized", "lazy", "Run one forward pass"):
        kfac(nn.LazyLinear(3))
    with refused("'weight' cannot be optimized", "complex", "view_as_real"):
        kfac(Holder(torch.zeros(3, dtype=torch.complex128)))
    with refused("cannot be optimized", "meta", "to_empty"):
        kfac(nn.Linear(3, 3, device="meta"))


def test_a_refused_model_is_left_alone() -> None:
    for model in (nn.LazyLinear(3), nn.Linear(3, 3, device="meta")):
        before = hooks(model)
        with pytest.raises(pb.PullbackError):
            kfac(model)
        gc.collect()
        assert hooks(model) == before


# --- steps without statistics or gradients --------------------------------------------------------


def missing(prepare: Callable[[Any, Tensor, Tensor], Any], why: str) -> None:
    model, (x, y) = net(), batch()
    opt = kfac(model)
    prepare(model, x, y)
    before = vector(model)
    with refused("A statistics step saw no layer", why, "in training mode"):
        opt.step()
    assert torch.equal(before, vector(model))
    model.train()
    assert train(opt, model) == [True]


def test_a_statistics_step_that_saw_nothing() -> None:
    def loss(z: Tensor, y: Tensor) -> None:
        F.cross_entropy(z, y).backward()

    def without(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with torch.no_grad():
            model(x)

    def discarded(model: nn.Module, x: Tensor, y: Tensor) -> None:
        without(model, x, y)
        model(x)

    def attacked(model: nn.Module, x: Tensor, y: Tensor) -> None:
        without(model, x, y)
        torch.autograd.grad(model(x.requires_grad_()).sum(), x)

    missing(lambda m, x, y: loss(m.eval()(x), y), "evaluation mode")
    missing(without, "without gradients")
    missing(lambda m, x, y: loss(m[2](m[0](x)), y), "not called")
    missing(lambda m, x, y: loss(m.forward(x), y), "not called")
    missing(discarded, "no gradient reached the model's output")
    missing(attacked, "not to its parameters")
    missing(lambda m, x, y: loss(torch.vmap(m)(x), y), "inside a transform of torch.func")


def test_step_before_backward() -> None:
    model = net()
    opt = kfac(model)
    with refused("There is no gradient to follow", "None", "Call loss.backward()"):
        opt.step()
    with refused("There is no gradient to follow", "None", "Call loss.backward()"):
        opt.step(lambda: F.cross_entropy(model(batch()[0]), batch()[1]))
    model.requires_grad_(False)
    with refused("There is no gradient to follow", "None", "Call loss.backward()"):
        opt.step()


def test_closures() -> None:
    model, (x, y) = net(), batch()
    opt = kfac(model)

    def closure() -> None:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()

    assert opt.step(closure) is None
    assert opt.info.taken
    opt.close()
    careful = kfac(model, damping=Adaptive())
    with refused("The closure did not return the loss", "None", "return loss"):
        careful.step(closure)
    with refused("needs a closure", "look at the loss again", "step(closure)"):
        careful.step()


def test_inference_mode() -> None:
    model, (x, y) = net(), batch()
    opt = kfac(model)
    F.cross_entropy(model(x), y).backward()
    with torch.inference_mode(), refused("inference mode", "updated later", "Leave"):
        opt.step()
    opt.step()


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_empty_batches(batch_dim: int) -> None:
    model = net()
    with kfac(model, batch_dim=batch_dim), refused("no samples", "shape is", "skip empty batches"):
        model(torch.zeros(0, 3)).sum().backward()


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sum()


def test_a_model_that_returns_the_loss() -> None:
    model = Total()
    with kfac(model, likelihood=None), refused("no samples", "()", "one value per sample"):
        model(batch()[0]).backward()


# --- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("due", [True, False])
def test_non_finite_gradients_change_nothing(value: float, due: bool) -> None:
    model = net()
    opt = kfac(model, statistics_every=1 if due else 10)
    train(opt, model, 2)
    before, state = vector(model), opt.state_dict()
    x, y = batch(seed=2)
    opt.zero_grad()
    (F.cross_entropy(model(x), y) * value).backward()
    opt.step()
    assert not opt.info.accepted
    assert "not finite" in opt.info.reason
    after = opt.state_dict()
    for memory in (state["state"]["pullback"], after["state"]["pullback"]):
        memory["gathered"].pop("generator")
    assert torch.equal(before, vector(model))
    assert same(state, after)
    train(opt, model, 1, start=3)
    assert opt.info.accepted


@pytest.mark.parametrize("first", [True, False])
def test_non_finite_statistics_keep_the_last_good_ones(first: bool) -> None:
    """A finite gradient beside an output that is not: one logit is −inf, and masked in the loss."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.bad = net(), False

        def forward(self, x: Tensor) -> Tensor:
            z = self.net(x)
            return torch.cat([z[:, :3], z[:, 3:] * float("inf")], 1) if self.bad else z

    model = Masked()
    opt = kfac(model, statistics_every=1, metric=lambda z: torch.diag_embed(z * z))
    if not first:
        train(opt, model)
    held = {
        k: {n: v.clone() for n, v in a.value.items()} for k, a in opt.curvature.averages.items()
    }
    model.bad = True
    x, _ = batch()
    opt.zero_grad()
    F.mse_loss(model(x)[:, :3], torch.zeros(8, 3)).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.nan_to_num_()
    opt.step()
    assert opt.info.accepted
    assert not opt.info.taken
    assert "not finite" in opt.info.notes["statistics"]
    assert same(held, {k: a.value for k, a in opt.curvature.averages.items()})
    model.bad = False
    assert train(opt, model, 1, start=1) == [True]
    assert "statistics" not in opt.info.notes
    assert all("kronecker" in row.block for row in opt.coverage())


def test_singular_factors() -> None:
    model = net()
    for damping in (0.0, 1e-30):
        with kfac(model, damping=damping, lr=1e-3, momentum=0.0, kl_clip=1e-3) as opt:
            opt.zero_grad()
            x, y = batch(2)  # fewer samples than inputs, and softmax logits
            F.cross_entropy(model(x), y).backward()
            opt.step()
            assert torch.isfinite(vector(model)).all()
            if not damping:
                assert all("singular" in note for note in opt.info.notes.values())
                assert opt.info.notes
            assert any("softmax" in d.reason for d in opt.degenerate())


# --- parameters in odd places ---------------------------------------------------------------------


class Odd(nn.Module):
    """A plain parameter, an unused one, a tied functional use, and a subclass of its own mind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mine = nn.Linear(3, 3), Mine(3, 4)
        self.scale, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(torch.tanh(self.fc(x)), self.fc.weight.T)
        return self.mine(h * self.scale)


class Mine(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_parameters_in_odd_places() -> None:
    torch.manual_seed(0)
    model = Odd()
    opt = kfac(model)
    expected = {row.name: row.block for row in opt.coverage()}
    assert expected["mine.weight"] == "diagonal"
    start, unused = vector(model), model.unused.clone()
    train(opt, model, 2)
    rows = {row.name: row for row in opt.coverage()}
    assert rows["fc.weight"].block == "diagonal"
    assert "used outside its layer" in rows["fc.weight"].reason
    assert "kronecker" in rows["fc.bias"].block
    for name in ("mine.weight", "mine.bias", "scale"):
        assert rows[name].block == "diagonal"
        assert "no layer with known structure" in rows[name].reason
    assert rows["unused"].block == "gradient"
    assert "no output" in rows["unused"].reason
    assert torch.equal(unused, model.unused)
    assert not torch.equal(start, vector(model))
    assert str(opt.coverage()).count("\n") == len(rows)


def test_a_zero_gradient_proves_nothing() -> None:
    """The head starts at zero, so the body's first gradient is zero, and explained by anything."""
    model: Any = nn.Sequential(Odd(), nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight)
    opt = kfac(model, statistics_every=1)
    train(opt, model)
    train(opt, model, 2, start=1)
    rows = {row.name: row.block for row in opt.coverage()}
    assert rows["0.fc.weight"] == "diagonal"
    assert "kronecker" in rows["1.weight"]


def test_branches_that_come_and_go() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.first = nn.Linear(3, 4), nn.Linear(3, 4), True

        def forward(self, x: Tensor) -> Tensor:
            p, q = self.a(x), self.b(x)  # both run, one counts
            return p if self.first else q

    model = Branching()
    opt = kfac(model, statistics_every=1)
    train(opt, model)
    assert {r.name: r.block for r in opt.coverage()}["b.weight"] == "gradient"
    model.first = False
    train(opt, model, 1, start=1)
    model.first = True
    train(opt, model, 1, start=2)
    assert all("kronecker" in r.block for r in opt.coverage())


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 4))
    with kfac(model), refused("'0.weight' has a sparse gradient", "couples", "sparse=False"):
        F.cross_entropy(model(torch.arange(6)), torch.arange(6) % 4).backward()


def test_a_changed_shape() -> None:
    model = net()
    opt = kfac(model, statistics_every=1)
    train(opt, model)
    model[2].weight.data = torch.randn(7, 5)
    model[2].bias.data = torch.randn(7)
    opt.zero_grad()
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    with refused("'2.weight' changed its shape", "(4, 5), and is (7, 5)", "Build the optimizer"):
        opt.step()


def test_a_replaced_layer() -> None:
    model = net()
    opt = kfac(model, statistics_every=1)
    train(opt, model)
    model[2] = nn.Linear(5, 4)
    opt.zero_grad()
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    with refused("saw no layer", "other parameters than the optimizer's", "Call the module"):
        opt.step()


def test_an_output_changed_in_place() -> None:
    model, (x, y) = net(), batch()
    with kfac(model):
        z = model(x)
        z.add_(1.0)
        with refused("changed in place", "needs the values", "Change a copy"):
            F.cross_entropy(z, y).backward()


def test_an_output_that_is_a_parameter() -> None:
    class Table(Holder):
        def forward(self) -> Tensor:
            return self.weight

    model, y = Table(torch.randn(8, 4)), batch()[1]
    opt = kfac(model)
    F.cross_entropy(model(), y).backward()
    opt.step()
    assert opt.info.taken
    assert [r.block for r in opt.coverage()] == ["diagonal"]


def test_a_custom_metric_of_the_wrong_shape() -> None:
    model, (x, _) = net(), batch()
    with kfac(model, metric=lambda z: z), refused("does not fit", "shape", "Return one 4×4"):
        model(x).sum().backward()


def test_statistics_do_not_touch_gradients_nor_random_numbers() -> None:
    model, (x, y) = net(), batch()
    F.cross_entropy(model(x), y).backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    state = torch.get_rng_state()
    with kfac(model, draws=3):
        F.cross_entropy(model(x), y).backward()
    assert torch.equal(state, torch.get_rng_state())
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert same(got, want)
    assert gram(model, x, y).isfinite().all()


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
def test_outputs_that_are_not_finite_are_a_rejected_step(fisher: str) -> None:
    model = net()
    opt = kfac(model, statistics_every=1, fisher=fisher)
    train(opt, model)
    before = vector(model)
    x, y = batch(seed=1)
    opt.zero_grad()
    F.cross_entropy(model(x * float("nan")), y).backward()
    opt.step()
    assert not opt.info.accepted
    assert torch.equal(before, vector(model))
    assert train(opt, model, 1, start=1) == [True]


def test_masked_classes() -> None:
    class Fewer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + torch.tensor([0.0, 0.0, 0.0, -torch.inf])

    model, (x, y) = Fewer(), batch()
    opt = kfac(model)
    F.cross_entropy(model(x), y.clamp(max=2)).backward()
    opt.step()
    assert opt.info.taken
    assert torch.isfinite(vector(model)).all()
