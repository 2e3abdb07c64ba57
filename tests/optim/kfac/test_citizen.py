"""K-FAC among torch's own: groups, schedulers, copies, precision, any loop."""

import copy
import gc
import io
import pickle
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import pullback as pb
from pullback.optim.kfac import Invariant

from ..common import assert_close, hooks, same
from .common import DOUBLE, batch, gram, kfac, net, train, vector


@pytest.fixture(autouse=True)
def _double() -> Any:
    old = torch.get_default_dtype()
    torch.set_default_dtype(DOUBLE)
    yield
    torch.set_default_dtype(old)


# --- groups and schedulers ------------------------------------------------------------------------


def test_groups_have_their_own_rates_and_decay() -> None:
    one, two = net(), net()
    two.load_state_dict(one.state_dict())
    plain = kfac(one, momentum=0.0)
    groups = [
        {"params": two[0].parameters(), "lr": 0.1},
        {"params": two[2].parameters(), "weight_decay": 0.5},
    ]
    grouped, start = kfac(two, params=groups, momentum=0.0), vector(two)
    train(plain, one)
    train(grouped, two)
    moved, want = vector(two) - start, vector(one) - start
    assert_close(moved[:20], 2 * want[:20])
    assert_close(moved[20:], want[20:] - 0.05 * 0.5 * start[20:])


def test_what_is_in_no_group_is_a_constant() -> None:
    """A weight whose bias is not optimized has a block of its own."""
    model = net()
    weights = [model[0].weight, model[2].weight]
    opt, biases = kfac(model, params=weights), [model[0].bias.clone(), model[2].bias.clone()]
    train(opt, model, 3)
    assert [k.names for k in opt.curvature.averages] == [("0.weight",), ("2.weight",)]
    assert torch.equal(biases[0], model[0].bias)
    assert torch.equal(biases[1], model[2].bias)
    opt.add_param_group({"params": [model[0].bias, model[2].bias]})
    assert train(opt, model, 1, start=3) == [True]  # at once, though it is not due
    assert {k.names for k in opt.curvature.averages} == {
        ("0.weight", "0.bias"),
        ("2.weight", "2.bias"),
    }


def test_named_parameters() -> None:
    model = net()
    opt = kfac(model, params=model.named_parameters())
    train(opt, model)
    assert opt.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


def test_step_lr() -> None:
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    opt = kfac(model)
    scheduler = lr_scheduler.StepLR(opt, step_size=2, gamma=0.1)
    other = kfac(twin)
    for i in range(5):
        other.param_groups[0]["lr"] = 0.05 * 0.1 ** (i // 2)
        train(opt, model, start=i)
        train(other, twin, start=i)
        scheduler.step()
    assert torch.equal(vector(model), vector(twin))


def test_one_cycle_moves_the_momentum_too() -> None:
    model = net()
    opt = kfac(model)
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=6)
    seen = []
    for i in range(6):
        seen.append((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
        train(opt, model, start=i)
        scheduler.step() if i < 5 else None
    assert len({lr for lr, _ in seen}) > 3
    assert min(m for _, m in seen) == pytest.approx(0.85, abs=0.01)
    assert max(m for _, m in seen) == pytest.approx(0.95, abs=0.01)
    copy.deepcopy(opt)  # the scheduler's own step function stays behind


# --- saving and copying ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"ekfac": True}, {"damping": Invariant(0.1)}], ids=str)
@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("through_a_file", [False, True])
def test_resume_to_the_same_bits(at: int, through_a_file: bool, options: dict[str, Any]) -> None:
    """Statistics every 2, inverses every 4 steps: also between them."""
    model = net()
    opt = kfac(model, **options)
    train(opt, model, at)
    saved = {"model": model.state_dict(), "opt": opt.state_dict()}
    if through_a_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    else:
        saved = copy.deepcopy(saved)
    train(opt, model, 6, start=at)
    fresh = net()
    fresh.load_state_dict(saved["model"])
    again = kfac(fresh, **options)
    again.load_state_dict(saved["opt"])
    train(again, fresh, 6, start=at)
    assert torch.equal(vector(model), vector(fresh))
    assert same(opt.state_dict(), again.state_dict())


def test_a_state_of_another_optimizer_is_refused() -> None:
    model = net()
    with pytest.raises(pb.PullbackError, match="not KFAC's"):
        kfac(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_the_model_are_free(how: str) -> None:
    model = net()
    opt = kfac(model)
    train(opt, model)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    count = opt.info
    size = len(pickle.dumps(model)) - len(pickle.dumps(twin))
    assert abs(size) < 200  # the optimizer does not come along
    x, y = batch()
    train(opt, model, 1, start=1)
    for _ in range(3):
        F.cross_entropy(twin(x), y).backward()
    assert not opt._gatherer.pool.calls
    assert opt.info != count
    assert all(h._watch is None for h in twin._forward_hooks.values())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("options", [{}, {"ekfac": True}], ids=str)
def test_copies_of_the_optimizer_bring_their_model(how: str, options: dict[str, Any]) -> None:
    model = net()
    opt = kfac(model, **options)
    train(opt, model, 3)
    pair = (opt, model)
    twin, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert twin.model is other
    assert other is not model
    train(opt, model, 4, start=3)
    train(twin, other, 4, start=3)
    assert torch.equal(vector(model), vector(other))
    alone = copy.deepcopy(opt)
    assert alone.model is not model
    train(alone, alone.model, 1, start=7)
    train(opt, model, 1, start=7)
    assert torch.equal(vector(model), vector(alone.model))


# --- hooks and memory -----------------------------------------------------------------------------


def test_close_leaves_no_hook() -> None:
    model = net()
    opt = kfac(model)
    train(opt, model)
    opt.close()
    assert not hooks(model)
    assert not any(train(opt, model, 4, start=1))  # goes on with what it knows
    assert copy.deepcopy(opt)._closed
    with kfac(model) as other:
        train(other, model)
        assert hooks(model)
    assert not hooks(model)


def test_hooks_are_gone_after_an_error_in_forward() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.fail = net(), True

        def forward(self, x: Tensor) -> Tensor:
            z = self.net(x)
            if self.fail:
                raise ValueError("no")
            return z

    model = Failing()
    opt = kfac(model)
    before = hooks(model)
    with pytest.raises(ValueError, match="no"):
        model(batch()[0])
    assert hooks(model) == before
    model.fail = False
    assert train(opt, model) == [True]


def test_deleting_the_optimizer_frees_it() -> None:
    model = net()
    opt = kfac(model)
    train(opt, model, 2)
    gone = weakref.ref(opt), weakref.ref(opt._gatherer)
    del opt
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None
    assert not hooks(model)


class Probe(torch.autograd.Function):
    """An identity whose node can be watched."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        token = Token()
        ctx.token = token
        Probe.alive.add(token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Token:
    pass


class Probed(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.net, self.last = net(), last

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(Probe.apply(self.net[0].weight.sum()) * 0 + x)
        return z * 1 if self.last else z


@pytest.mark.parametrize("last", [False, True])
def test_a_graph_that_nobody_uses_is_not_kept(last: bool) -> None:
    model = Probed(last)
    opt = kfac(model)
    for _ in range(3):
        model(batch()[0])
    gc.collect()
    assert not Probe.alive
    train(opt, model)
    gc.collect()
    assert not Probe.alive


def test_activations_are_not_kept_after_backward() -> None:
    model = net()
    opt = kfac(model)
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert all(p.empty for p in opt._gatherer._open)
    opt.step()


def test_memory_is_counted() -> None:
    model = net()
    opt = kfac(model)
    train(opt, model, 2)
    held = opt.memory()
    size = 8 * (4 * 4 + 5 * 5 + 4 * 4 + 6 * 6)
    assert held["averages"] == size
    assert 0.9 * size < held["inverses"] <= size
    assert held["momentum"] == 8 * sum(p.numel() for p in model.parameters())


# --- loops ----------------------------------------------------------------------------------------


def test_zero_grad_may_come_between_forward_and_backward() -> None:
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    opt, other = kfac(model), kfac(twin)
    for i in range(3):
        x, y = batch(seed=i)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    train(other, twin, 3)
    assert torch.equal(vector(model), vector(twin))


def test_accumulation_equals_one_batch() -> None:
    model, (x, y) = net(), batch()
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0)
    for part, target in zip(x.split(2), y.split(2), strict=True):
        (F.cross_entropy(model(part), target) / 4).backward()
    opt.step()
    assert_close(opt.gram().dense(), want, 1e-12)


def test_empirical_accumulation_equals_one_batch() -> None:
    model, (x, y) = net(), batch()
    found = []
    for parts in (1, 4):
        with kfac(model, fisher="empirical", lr=0.0) as opt:
            opt.zero_grad()
            for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(part), target) / parts).backward()
            opt.step()
            found.append(opt.gram().dense())
    assert_close(found[1], found[0], 1e-12)


def test_dropped_gradients_drop_their_statistics() -> None:
    model, (x, y) = net(), batch()
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0)
    F.cross_entropy(model(3 * x), y).backward()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    assert_close(opt.gram().dense(), want, 1e-12)


def test_clipping() -> None:
    model, (x, y) = net(), batch()
    twin = copy.deepcopy(model)
    opt, other, start = kfac(model), kfac(twin), vector(model)
    F.cross_entropy(model(x), y).backward()
    size = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    opt.step()
    train(other, twin)
    assert_close((vector(model) - start) * float(size) / 1e-3, vector(twin) - start, 1e-3)


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
def test_grad_scaler(fisher: str) -> None:
    model = net()
    twin = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    opt = kfac(model, fisher=fisher, grad_scaler=scaler)
    other = kfac(twin, fisher=fisher)
    for i in range(3):
        x, y = batch(seed=i)
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
    train(other, twin, 3)
    assert_close(vector(model), vector(twin), 1e-12)
    x, y = batch(seed=3)
    before, steps = vector(model), opt._memory["steps"]
    opt.zero_grad()
    scaler.scale(F.cross_entropy(model(x) * float("inf"), y)).backward()
    scaler.step(opt)  # skipped
    scaler.update()
    assert torch.equal(before, vector(model))
    assert opt._memory["steps"] == steps
    assert scaler.get_scale() == 2.0**9
    for i in range(3, 6):
        x, y = batch(seed=i)
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
    train(other, twin, 3, start=3)
    assert_close(vector(model), vector(twin), 1e-12)


@pytest.mark.parametrize("around", ["forward", "everything"])
def test_autocast(around: str) -> None:
    model = net(torch.float32)
    x, y = batch(dtype=torch.float32)
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0)
    if around == "forward":
        with torch.autocast("cpu", torch.bfloat16):
            z = model(x)
        F.cross_entropy(z.float(), y).backward()
        opt.step()
    else:
        with torch.autocast("cpu", torch.bfloat16):
            F.cross_entropy(model(x), y).backward()
            opt.step()
    assert all(
        v.dtype == torch.float32 for a in opt.curvature.averages.values() for v in a.value.values()
    )
    assert all("kronecker" in row.block for row in opt.coverage())
    assert_close(opt.gram().dense(), want, 0.03)


def test_a_model_in_half_precision() -> None:
    model = net(torch.bfloat16)
    opt = kfac(model)
    train(opt, model, 3, dtype=torch.bfloat16)
    assert all("kronecker" in row.block for row in opt.coverage())


def test_adversarial_loop() -> None:
    """A gradient by the input alone is no statistics; two models and optimizers mind their own."""
    g, d = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    bernoulli = pb.likelihoods.Bernoulli()
    og = kfac(g, likelihood=None, statistics_every=1)
    od = kfac(d, likelihood=bernoulli, statistics_every=1)
    for i in range(4):
        real, noise = batch(seed=i)[0], torch.randn(8, 2)
        od.zero_grad()
        fake = g(noise)
        z = torch.cat([d(real), d(fake.detach())])
        F.binary_cross_entropy_with_logits(z, torch.arange(16)[:, None] // 8 * 1.0).backward()
        assert od._gatherer.pool.calls == 2
        assert float(od._gatherer.pool.samples) == 16
        od.step()
        og.zero_grad()
        z = d(fake)
        F.binary_cross_entropy_with_logits(z, torch.ones(8, 1)).backward()
        og.step()
        assert od.info.taken
        assert og.info.taken


def test_a_discriminator_frozen_meanwhile() -> None:
    d, x = net(), batch()[0].requires_grad_()
    opt = kfac(d)
    d.requires_grad_(False)
    d(x).sum().backward()
    assert not opt._gatherer.pool.calls
    d.requires_grad_(True)
    assert train(opt, d) == [True]


def test_an_attack_on_the_input_is_no_statistics() -> None:
    model, (x, y) = net(), batch()
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0)
    opt.zero_grad()
    x.requires_grad_()
    torch.autograd.grad(F.cross_entropy(model(5 * x), y), x)
    F.cross_entropy(model(x), y).backward()
    opt.step()
    assert_close(opt.gram().dense(), want, 1e-12)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_gradient_penalty(fisher: str) -> None:
    """Double backward: one set of statistics, of the values the loss saw."""
    model, (x, y) = net(), batch()

    def found(penalty: float) -> Tensor:
        with kfac(model, fisher=fisher, lr=0.0) as opt:
            opt.zero_grad()
            leaf = x.clone().requires_grad_()
            z = model(leaf)
            (slope,) = torch.autograd.grad(z.square().sum(), leaf, create_graph=True)
            (F.cross_entropy(z, y) + penalty * slope.square().sum()).backward()
            assert opt._gatherer.pool.calls == 1
            opt.step()
            return opt.gram().dense()

    want = found(0.0)
    assert_close(found(0.1 if fisher == "exact" else 0.0), want, 1e-12)
    with kfac(model, fisher=fisher, lr=0.0) as opt:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        assert_close(want, opt.gram().dense(), 1e-12)


def test_backward_with_create_graph_and_by_grad() -> None:
    model, (x, y) = net(), batch()
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0, statistics_every=1, ema=0.0)
    params = list(model.parameters())
    opt.zero_grad()
    for p, g in zip(params, torch.autograd.grad(F.cross_entropy(model(x), y), params), strict=True):
        p.grad = g
    opt.step()
    assert_close(opt.gram().dense(), want, 1e-12)
    opt.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch fears a cycle
        F.cross_entropy(model(x), y).backward(create_graph=True)
    opt.step()
    assert opt.info.taken
    assert_close(opt.gram().dense(), want, 1e-12)


def test_backward_twice() -> None:
    model, (x, y) = net(), batch()
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    assert opt._gatherer.pool.calls == 1
    opt.step()
    assert_close(opt.gram().dense(), want, 1e-12)


def test_other_forwards_in_between() -> None:
    model, (x, y) = net(), batch()
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0)
    opt.zero_grad()
    z = model(x)
    with torch.no_grad():
        model(2 * x)
    model.eval()
    model(3 * x)
    model.train()
    model(4 * x)  # nobody propagates through it
    F.cross_entropy(z, y).backward()
    with torch.inference_mode():
        model(5 * x)
    opt.step()
    assert_close(opt.gram().dense(), want, 1e-12)


def test_two_calls_and_one_loss() -> None:
    model, (x, y) = net(), batch()
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0)
    F.cross_entropy(torch.cat([model(x[:3]), model(x[3:])]), y).backward()
    opt.step()
    assert_close(opt.gram().dense(), want, 1e-12)


def test_sizes_may_change_between_steps() -> None:
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 4))
    opt = kfac(model, statistics_every=1)
    for n, t in ((4, 3), (2, 7), (9, 1)):
        opt.zero_grad()
        F.cross_entropy(
            model(torch.randint(0, 6, (n, t))).mT, torch.randint(0, 4, (n, t))
        ).backward()
        opt.step()
        assert opt.info.taken
        assert opt._memory["taken"]


# --- what the model does --------------------------------------------------------------------------


class Chunked(nn.Module):
    """Views of a layer's output, changed in place."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.a, self.b, self.inplace = nn.Linear(3, 6), nn.Linear(3, 4), inplace

    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            y = self.a(x[:, None])
            y[..., :3].add_(1.0)
            h = y[..., :3] * torch.relu_(y[..., 3:])
        else:
            p, q = self.a(x[:, None]).split(3, -1)
            h = (p + 1.0) * torch.relu(q)
        return self.b(h)[:, 0]


def test_views_and_in_place_activations() -> None:
    torch.manual_seed(0)
    one, two = Chunked(False), Chunked(True)
    two.load_state_dict(one.state_dict())
    assert_close(gram(two, *batch()), gram(one, *batch()), 1e-12)
    three = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))
    four = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    four.load_state_dict(three.state_dict())
    assert_close(gram(three, *batch()), gram(four, *batch()), 1e-12)


def test_ignored_positions() -> None:
    """Where positions do not mix, they may as well not be there."""
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    x, y = torch.randint(0, 6, (5, 7)), torch.randint(0, 4, (5, 7))
    ignored = torch.rand(5, 7) < 0.4
    want = gram(model, x[~ignored], y[~ignored])
    target = y.masked_fill(ignored, -100)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    assert_close(gram(model, x, target, loss), want, 1e-12)

    class ClassesFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).mT

    likelihood = pb.likelihoods.Categorical(dim=1)
    assert_close(gram(ClassesFirst(), x, target, likelihood=likelihood), want, 1e-12)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_sequence_first(sharing: str) -> None:
    one, two = nn.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4)
    two.load_state_dict(one.state_dict())
    x, y = torch.randn(5, 7, 3), torch.randn(5, 7, 4)
    options: dict[str, Any] = {"metric": pb.metrics.Euclidean(), "output": 0, "sharing": sharing}
    want = gram(one, x, y, lambda z, y: F.mse_loss(z[0], y), **options)
    turned = gram(
        two,
        x.transpose(0, 1),
        y.transpose(0, 1),
        lambda z, y: F.mse_loss(z[0], y),
        batch_dim=1,
        **options,
    )
    assert_close(turned, want, 1e-12)
    three = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    options.pop("output")
    want = gram(three, x, y, F.mse_loss, **options)
    swapped = gram(three, x.transpose(0, 1), y.transpose(0, 1), F.mse_loss, batch_dim=1, **options)
    assert_close(swapped, want, 1e-12)


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = nn.Sequential(net(), nn.Tanh(), nn.Linear(4, 4)), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "none":
            return self.net(x)
        x = checkpoint(self.net[0], x, use_reentrant=self.how == "reentrant")
        return self.net[2](self.net[1](x))


def test_activation_checkpointing() -> None:
    one, two = Checkpointed("none"), Checkpointed("new")
    two.load_state_dict(one.state_dict())
    assert_close(gram(two, *batch()), gram(one, *batch()), 1e-12)
    plain, (x, y) = net(), batch()
    want = gram(plain, x, y)
    opt = kfac(plain, fisher="exact", lr=0.0)
    F.cross_entropy(checkpoint(plain, x, use_reentrant=False), y).backward()  # from outside
    opt.step()
    assert_close(opt.gram().dense(), want, 1e-12)


def test_reentrant_checkpointing_is_refused() -> None:
    x, y = batch()
    model = Checkpointed("reentrant")
    for head in (True, False):
        model.net[2].requires_grad_(head)
        with kfac(model):
            z = model(x.requires_grad_())
            with pytest.raises(pb.PullbackError, match="use_reentrant=False"):
                F.cross_entropy(z, y).backward()


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net(), kind

    def forward(self, x: Tensor) -> Any:
        h = self.net[0](x)
        z = self.net[2](h.tanh())
        if self.kind == "dict":
            return {"logits": z, "hidden": h}
        return (h, z) if self.kind == "tuple" else Answer(z, h)


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("dict", "logits"),
        ("tuple", 1),
        ("dataclass", "logits"),
        ("dataclass", lambda out: out.logits),
    ],
)
def test_structured_outputs(kind: str, output: Any) -> None:
    model, (x, y) = Structured(kind), batch()
    want = gram(model.net, x, y)
    picks: dict[str, Any] = {
        "dict": lambda out: out["logits"],
        "tuple": lambda out: out[1],
        "dataclass": lambda out: out.logits,
    }

    def loss(out: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(picks[kind](out), y)

    assert_close(gram(model, x, y, loss, output=output), want, 1e-12)
    with kfac(model), pytest.raises(pb.PullbackError, match="output="):
        model(x)


def test_an_output_that_is_computed_is_refused() -> None:
    """The loss is made of the model's own tensors: no gradient would ever reach this one."""
    model, (x, _) = Structured("tuple"), batch()
    with (
        kfac(model, output=lambda out: torch.cat(out, 1)),
        pytest.raises(pb.PullbackError, match="in the model's forward"),
    ):
        model(x)


# --- freezing -------------------------------------------------------------------------------------


def test_frozen_and_unfrozen_layers() -> None:
    model = net()
    model[0].requires_grad_(False)
    opt = kfac(model, statistics_every=100)
    start = vector(model[0])
    assert train(opt, model, 2) == [True, False]
    assert [row.block for row in opt.coverage()][:2] == ["none", "none"]
    assert torch.equal(start, vector(model[0]))
    model[0].requires_grad_(True)
    assert train(opt, model, 2, start=2) == [True, False]  # at once
    assert not torch.equal(start, vector(model[0]))
    assert all("kronecker" in row.block for row in opt.coverage())
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = None
    assert train(opt, model, 2, start=4) == [True, False]  # the weight is by itself now
    assert ("0.weight",) in [k.names for k in opt.curvature.averages]
    model[0].bias.requires_grad_(True)
    assert train(opt, model, 2, start=6) == [True, False]
    assert ("0.weight", "0.bias") in [k.names for k in opt.curvature.averages]


def test_another_dtype_after_construction() -> None:
    model = net(torch.float32)
    opt = kfac(model, damping=Invariant(0.1))
    train(opt, model, 1, dtype=torch.float32)
    model.double()
    train(opt, model, 4, start=1)
    averages = [v for a in opt.curvature.averages.values() for v in a.value.values()]
    assert all(v.dtype == DOUBLE for v in averages)
    assert all(s["momentum"].dtype == DOUBLE for s in opt.state.values() if "momentum" in s)
    model.float()
    train(opt, model, 3, start=5, dtype=torch.float32)
    assert torch.isfinite(vector(model)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("at", [1, 2])
def test_another_device_after_construction(at: int) -> None:
    model = net()
    opt = kfac(model, damping=Invariant(0.1))
    train(opt, model, at)
    model.cuda()
    train(opt, lambda x: model(x.cuda()).cpu(), 5, start=at)
    averages = [v for a in opt.curvature.averages.values() for v in a.value.values()]
    assert all(v.is_cuda for v in averages)
    model.cpu()
    train(opt, model, 3, start=5 + at)


@pytest.mark.parametrize("inside", [False, True])
def test_tangents_of_the_users_own_are_left_aside(inside: bool) -> None:
    """Forward-mode derivatives in the loss, whose backward pass runs within their level or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    opt, x = pb.KFAC(model, 0.1, statistics_every=1), torch.randn(6, 4)
    for _ in range(2):
        opt.zero_grad()
        with forward_ad.dual_level():
            z = model(forward_ad.make_dual(x, torch.ones_like(x)))
            primal, tangent = forward_ad.unpack_dual(z)
            assert tangent is not None
            loss = primal.square().sum() + tangent.square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        opt.step()
        assert opt.info.taken
