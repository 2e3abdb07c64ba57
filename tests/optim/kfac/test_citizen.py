"""K-FAC does what every torch optimizer does, in any loop and with any model."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import pullback as pb
from pullback.optim.kfac import Exact, Invariant

from ..common import assert_close, hooks, same
from .common import DOUBLE, batch, gram, kfac, net, train, vector


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)


class Mixed(nn.Module):
    """Convolutions, in groups too, a norm, linear layers of one shape, and a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (3, 1), padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 1, groups=2, bias=False)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.grouped(torch.tanh(self.norm(self.conv(x[:, None, None])))).mean((2, 3))
        return self.second(torch.tanh(self.first(h))) * self.gain


def twins(make: Callable[[], Any] = net) -> tuple[Any, Any]:
    model = make()
    return model, copy.deepcopy(model)


def measure_move(opt: pb.KFAC, change: Callable[[Any], Any] = lambda model: None) -> Tensor:
    """By how much a step moves the parameters, after the user has changed the gradients."""
    before = vector(opt.model)
    x, y = batch()
    opt.zero_grad()
    F.cross_entropy(opt.model(x), y).backward()
    change(opt.model)
    opt.step()
    return vector(opt.model) - before


def test_groups_have_their_own_rates_and_decay_and_keep_names_and_labels() -> None:
    one, two = twins()
    named = list(two.named_parameters())
    groups = [
        {"params": named[:2], "lr": 0.1, "name": "first"},
        {"params": named[2:], "weight_decay": 0.5, "initial_lr": 0.1},
    ]
    grouped = kfac(two, params=groups, momentum=0.0)
    start = vector(two)
    want = measure_move(kfac(one, momentum=0.0))
    moves = measure_move(grouped)
    assert_close(moves[:20], 2 * want[:20])
    assert_close(moves[20:], want[20:] - 0.05 * 0.5 * start[20:])
    assert grouped.param_groups[0]["name"] == "first"
    assert grouped.param_groups[1]["param_names"] == ["2.weight", "2.bias"]


def test_parameters_in_no_group_are_constants_until_they_are_added() -> None:
    model = net()
    opt = kfac(model, params=[model[0].weight, model[2].weight], statistics_every=100)
    biases = copy.deepcopy([model[0].bias, model[2].bias])
    train(opt, model, 3)
    rows = {row.name: row for row in opt.coverage()}
    assert "(5 ⊗ 3)" in rows["0.weight"].block
    assert (rows["0.bias"].block, rows["0.bias"].reason) == ("none", "not given to the optimizer")
    assert same(biases, [model[0].bias, model[2].bias])
    opt.add_param_group({"params": [model[0].bias, model[2].bias]})
    assert train(opt, model, 2, start=3) == [True, False]  # at once, though statistics are not due
    assert all("(5 ⊗ 4)" in row.block for row in opt.coverage()[:2])


def test_schedulers_change_rates_and_momentum() -> None:
    one, two = twins()
    opt = kfac(one)
    other = kfac(two)
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=6)
    momenta = []
    for i in range(6):
        rates = {name: opt.param_groups[0][name] for name in ("lr", "momentum")}
        other.param_groups[0].update(rates)
        momenta.append(rates["momentum"])
        train(opt, one, start=i)
        train(other, two, start=i)
        if i < 5:
            scheduler.step()
    assert torch.equal(vector(one), vector(two))
    assert (min(momenta), max(momenta)) == pytest.approx((0.85, 0.95), abs=0.01)
    copy.deepcopy(opt)  # without the scheduler's own step function


@pytest.mark.parametrize("number_type", [np.float32, np.float64, torch.tensor])
def test_rates_may_be_numbers_of_other_types(number_type: Callable[[float], Any]) -> None:
    one, two = twins()
    for model, value in ((one, 0.25), (two, number_type(0.25))):
        opt = kfac(model)
        opt.param_groups[0].update(lr=value, momentum=value, weight_decay=value)
        train(opt, model, 3)
    assert torch.equal(vector(one), vector(two))


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({}, 1),
        ({}, 4),
        ({"ekfac": True}, 3),
        ({"damping": Invariant(0.1), "momentum": 0.0}, 3),
        pytest.param({}, 2, marks=pytest.mark.slow),
        pytest.param({"ekfac": True}, 2, marks=pytest.mark.slow),
        pytest.param({"damping": Exact(0.1), "momentum": 0.0}, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_saved_and_copied_ones_go_on_to_the_same_bits(options: dict[str, Any], at: int) -> None:
    """Statistics every 2, inverses every 4 steps: also between them."""

    def load(opt: pb.KFAC, saved: Any) -> pb.KFAC:
        opt.model.load_state_dict(saved[0])
        opt.load_state_dict(copy.deepcopy(saved[1]))  # torch shares tensors
        return opt

    model = Mixed()
    opt = kfac(model, **options)
    train(opt, model, at)
    saved = (model.state_dict(), opt.state_dict())
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    saved = copy.deepcopy(saved)
    twin, other = copy.deepcopy((opt, model))
    assert twin.model is other
    others = [
        load(kfac(Mixed(), **options), checkpoint) for checkpoint in (saved, torch.load(file))
    ]
    others += [twin, pickle.loads(pickle.dumps(opt))]
    gram_before = opt.gram()
    info = opt.info
    before = copy.deepcopy((gram_before.dense(), info))
    train(opt, model, 4, start=at)
    assert same(before, (gram_before.dense(), info))  # what was given out does not change
    want = vector(model)
    dense = opt.gram().dense()
    for one in (*others, opt):
        if one is opt:  # which has gone on meanwhile
            load(opt, saved)
        train(one, one.model, 4, start=at)
        assert torch.equal(vector(one.model), want)
        assert torch.equal(one.gram().dense(), dense)


def test_close_removes_the_hooks_and_the_optimizer_goes_on_with_what_it_knows() -> None:
    model = net()
    size = len(pickle.dumps(model))
    with kfac(model) as opt:
        assert hooks(model)
        train(opt, model)
        assert len(pickle.dumps(model)) < size + 2000  # the optimizer is no part of it
    for one in (opt, copy.deepcopy(opt)):
        assert not hooks(one.model)
        assert not any(train(one, one.model, 3, start=1))
        assert one.info.accepted


def test_deleting_the_optimizer_frees_it_and_its_hooks() -> None:
    model = net()
    opt = kfac(model)
    train(opt, model, 2)
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None
    assert not hooks(model)


def test_activations_are_freed_with_their_graph() -> None:
    model = net()
    outputs = []
    x, y = batch()
    for layer in model:
        layer.register_forward_hook(
            lambda m, x, z: outputs.append(weakref.ref(z.untyped_storage()))
        )
    opt = kfac(model)
    model(x)  # nobody propagates through it
    F.cross_entropy(model(x) * 1, y).backward()
    gc.collect()
    assert not any(output() is not None for output in outputs)
    opt.step()
    assert opt.info.took_statistics


def test_memory_is_counted() -> None:
    model = net()
    opt = kfac(model)
    train(opt, model, 2)
    memory = opt.memory()
    size = 8 * (4 * 4 + 5 * 5 + 4 * 4 + 6 * 6)
    assert all(size / 2 <= memory[name] <= 2 * size for name in ("averages", "states"))
    assert memory["momentum"] == sum(p.nbytes for p in model.parameters())


Loop = Callable[[pb.KFAC, Any, Tensor, Tensor], Any]


def plain(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def accumulate(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    for inputs, target in zip(x.split(2), y.split(2), strict=True):
        (F.cross_entropy(model(inputs), target) / 4).backward()


def two_calls(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    second: Any = checkpoint(model, x[3:], use_reentrant=False)
    F.cross_entropy(torch.cat([model(x[:3]), second]), y).backward()


def drop_one_pass(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(3 * x), y).backward()
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()


def other_forwards(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    z = model(x)
    with torch.no_grad():
        model(2 * x)
    model.eval()(3 * x)
    model.train()(4 * x)  # nobody propagates through it
    copy.deepcopy(model)(5 * x).sum().backward()
    others = {n: (2 * p).detach().requires_grad_() for n, p in model.named_parameters()}
    torch.func.functional_call(model, others, (x,)).sum().backward()
    F.cross_entropy(z, y).backward()
    with torch.inference_mode():
        model(6 * x)


def attack_inputs(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    """Gradients by the input alone, also through frozen parameters."""
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(F.cross_entropy(model(5 * leaf), y), leaf)
    model.requires_grad_(False)(2 * leaf).sum().backward()
    plain(opt, model.requires_grad_(True), x, y)


def twice(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def by_hand(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    params = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), params, create_graph=True)
    for p, g in zip(params, gradients, strict=True):
        p.grad = g


def penalize_gradient(opt: pb.KFAC, model: Any, x: Tensor, y: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    z = model(leaf)
    (slope,) = torch.autograd.grad(z.square().sum(), leaf, create_graph=True)
    (F.cross_entropy(z, y) + 0.1 * slope.square().sum()).backward()


EXACT = [
    accumulate,
    two_calls,
    drop_one_pass,
    other_forwards,
    attack_inputs,
    twice,
    by_hand,
    penalize_gradient,
]
EMPIRICAL = [accumulate, drop_one_pass, attack_inputs, by_hand]


@pytest.mark.filterwarnings("ignore:The loss has terms in derivatives")
@pytest.mark.parametrize(
    ("loop", "fisher"), [*((x, "exact") for x in EXACT), *((x, "empirical") for x in EMPIRICAL)]
)
def test_statistics_are_those_of_the_gradient_however_it_came(loop: Loop, fisher: str) -> None:
    model = net()
    x, y = batch()
    grams = []
    for backward in (plain, loop):
        with kfac(model, fisher=fisher, lr=0.0) as opt:
            opt.zero_grad()
            backward(opt, model, x, y)
            opt.step()
            assert opt.info.took_statistics
            grams.append(opt.gram().dense())
    assert_close(grams[1], grams[0], 1e-12)


def test_two_optimizers_mind_their_own_models() -> None:
    """An adversarial loop: the generator's loss passes through the discriminator as well."""
    g = nn.Linear(2, 3)
    d = nn.Linear(3, 1)
    loss = F.binary_cross_entropy_with_logits
    options: dict[str, Any] = {"likelihood": pb.likelihoods.Bernoulli(), "statistics_every": 1}
    og = kfac(g, likelihood=None)
    od = kfac(d, fisher="exact", ema=0.0, **options)
    for i in range(3):
        real = batch(seed=i)[0]
        fake = g(torch.randn(8, 2))
        y = torch.arange(16.0)[:, None].div(8).floor()
        want = gram(copy.deepcopy(d), torch.cat([real, fake.detach()]), y, loss, **options)
        od.zero_grad()
        loss(torch.cat([d(real), d(fake.detach())]), y).backward()
        od.step()
        assert_close(od.gram().dense(), want, 1e-12)
        og.zero_grad()
        loss(d(fake), torch.ones(8, 1)).backward()
        og.step()
        assert og.info.took_statistics == (i % 2 == 0)


def test_the_step_is_linear_in_what_the_gradients_are_when_it_comes() -> None:
    """Clipped, or with something added; some layers are larger than the batch of 8."""
    start = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 30), nn.Linear(30, 4))

    def found(weight: float, decay: float, clip: float = torch.inf) -> Tensor:
        model = copy.deepcopy(start)
        opt = kfac(model, fisher="exact", momentum=0.0)
        train(opt, model)

        def change(model: Any) -> None:
            for p in model.parameters():
                p.grad.mul_(weight).add_(p.detach(), alpha=decay)
            nn.utils.clip_grad_norm_(model.parameters(), clip)

        return measure_move(opt, change)

    plain = found(1.0, 0.0)
    clipped = found(1.0, 0.0, 1e-3)
    decay = found(0.0, 1.0)
    assert_close(clipped / clipped.norm(), plain / plain.norm())
    assert clipped.norm() < 0.1 * plain.norm()
    assert_close(found(1.0, 1e-9) - plain, 1e-9 * decay, 1e-4)


def test_a_missing_gradient_counts_as_zero_in_its_block() -> None:
    def drop(model: Any) -> None:
        model[0].bias.grad = None

    one, two = twins()
    for model, change in ((one, lambda model: model[0].bias.grad.zero_()), (two, drop)):
        opt = kfac(model, momentum=0.0)
        train(opt, model)
        before = model[0].bias.detach().clone()
        measure_move(opt, change)
    assert torch.equal(one[0].weight, two[0].weight)
    assert torch.equal(two[0].bias, before)


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
def test_grad_scaler(fisher: str) -> None:
    """The scale is divided out, and a step that the scaler skips is none."""
    model, twin = twins()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    opt = kfac(model, fisher=fisher, grad_scaler=scaler)
    for i, factor in ((0, 1.0), (1, 1.0), (2, 1.0), (3, torch.inf), (3, 1.0), (4, 1.0)):
        x, y = batch(seed=i)
        before = vector(model)
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x) * factor, y)).backward()
        scaler.step(opt)
        scaler.update()
        assert torch.equal(before, vector(model)) == (factor != 1.0)
    assert scaler.get_scale() == 2.0**9
    train(kfac(twin, fisher=fisher), twin, 5)
    assert_close(vector(model), vector(twin), 1e-12)


@pytest.mark.parametrize("inside", [False, True])
def test_forward_mode_derivatives_in_the_loss(inside: bool) -> None:
    """Whose backward pass runs within their level or not."""
    model = net()
    x = torch.randn(6, 3)
    opt = kfac(model, likelihood=None, statistics_every=1)
    for _ in range(2):
        opt.zero_grad()
        with forward_ad.dual_level():
            z = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            loss: Any = z.primal.square().sum() + z.tangent.square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        opt.step()
        assert opt.info.took_statistics


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda z, h: {"logits": z, "hidden": h}, lambda out: out["logits"]),
    "tuple": (lambda z, h: (h, z), lambda out: out[1]),
    "object": (lambda z, h: SimpleNamespace(logits=z, hidden=h), lambda out: out.logits),
}


class Structured(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net = net()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.net(x), self.net[0](x))


@pytest.mark.parametrize("output_type", KINDS)
def test_structured_outputs(output_type: str) -> None:
    make, pick = KINDS[output_type]
    model = Structured(make)
    x, y = batch()
    want = gram(model.net, x, y)
    for output in (1 if output_type == "tuple" else "logits", pick):
        actual = gram(model, x, y, lambda out, y: F.cross_entropy(pick(out), y), output=output)
        assert_close(actual, want, 1e-12)
    if output_type == "tuple":
        with kfac(model), pytest.raises(pb.PullbackError, match="output="):
            model(x)
        return
    actual = gram(model, x, y, lambda out, y: F.cross_entropy(pick(out), y))
    assert_close(actual, want, 1e-12)


class Empty(nn.Module):
    """A network with a layer and a parameter without entries."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.net = inner
        self.nothing = nn.Linear(3, 0)
        self.none = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.nothing(x).sum(-1, keepdim=True)) + self.none.sum(0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("options", [{}, {"ekfac": True}, {"damping": Invariant(0.1)}], ids=str)
def test_parameters_without_entries_are_left_aside(options: dict[str, Any]) -> None:
    one, two = twins(lambda: nn.Sequential(net(), nn.LayerNorm(4)))
    whole = Empty(one)
    first, second = (kfac(model, fisher="exact", **options) for model in (whole, two))
    train(first, whole, 4)
    train(second, two, 4)
    assert_close(vector(one), vector(two), 1e-12)
    assert_close(first.gram().dense(), second.gram().dense(), 1e-12)
    rows = {r.name: r.reason for r in first.coverage() if r.block == "none"}
    assert rows == dict.fromkeys(["none", "nothing.weight", "nothing.bias"], "it has no entries")


def test_frozen_and_unfrozen_layers() -> None:
    """Statistics of what is new are taken at once, though they are not due."""
    model = net()
    opt = kfac(model, statistics_every=100)

    def blocks(*frozen: nn.Parameter) -> list[str]:
        start = copy.deepcopy(frozen)
        model.requires_grad_(True)
        for p in frozen:
            p.requires_grad_(False)
            p.grad = None
        assert train(opt, model, 2) == [True, False]
        assert same(start, frozen)
        return [row.block for row in opt.coverage()][:2]

    assert blocks(*model[0].parameters()) == ["none", "none"]
    assert blocks() == ["kronecker (5 ⊗ 4)"] * 2
    assert blocks(model[0].bias) == ["kronecker (5 ⊗ 3)", "none"]
    assert blocks() == ["kronecker (5 ⊗ 4)"] * 2


@pytest.mark.parametrize("options", [{"damping": Invariant(0.1)}, {"ekfac": True}], ids=str)
def test_another_dtype_after_construction(options: dict[str, Any]) -> None:
    model = Mixed()
    opt = kfac(model, **options)
    train(opt, model, 3)
    for dtype in (torch.float32, DOUBLE):
        model.to(dtype)
        train(opt, model, 5, start=3, dtype=dtype)
        assert opt.info.accepted
        assert opt.gram().dense().dtype == dtype
        assert opt.memory()["momentum"] == sum(p.nbytes for p in model.parameters())


def test_memory_of_parameters_may_move_and_have_another_layout() -> None:
    one, two = twins(Mixed)
    first = kfac(one)
    second = kfac(two)
    two.to(memory_format=torch.channels_last)
    for i in range(6):
        if i == 3:
            for p in two.parameters():
                p.data = p.data.clone()
        train(first, one, start=i)
        train(second, two, start=i)
    assert_close(vector(two), vector(one), 1e-10)


def test_an_exchanged_activation_is_fine_and_an_exchanged_layer_is_not() -> None:
    model = net()
    opt = kfac(model, statistics_every=1)
    train(opt, model)
    model[1] = nn.Sequential(nn.Tanh(), nn.Identity())
    assert train(opt, model) == [True]
    model[2] = nn.Linear(5, 4)
    with pytest.raises(pb.PullbackError, match="other parameters than the optimizer's"):
        train(opt, model)
