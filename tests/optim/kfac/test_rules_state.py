"""The rules for matrices as citizens of torch: state, rejected steps, and unusual loops."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pullback as pb
from pullback.optim.kfac import Adaptive, Eigenbasis, Exact, Spectral
from pullback.steps import QuadraticModel
from tests.kfac_options import kfac_of
from tests.pairs import each_once

from ..common import expect_unchanged, refused, same, vector
from .common import DOUBLE, batch, kfac, train

RULES = ["eigenbasis", "spectral"]
pytestmark = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)
    torch.manual_seed(0)


def net(dtype: torch.dtype = DOUBLE) -> Any:
    """Two matrices of one shape, which are stacked, and a last layer."""
    inner = [nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5)]
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), *inner, nn.Linear(5, 4)).to(dtype)


def made(model: nn.Module, rule: Any, **options: Any) -> pb.KFAC:
    chosen = {"lr": 0.01, "statistics_every": 2, "invert_every": 4} | options
    return kfac_of(model, rule=rule, **chosen)


def backward(model: Callable[[Tensor], Tensor], seed: int = 0, samples: int = 8) -> Tensor:
    x, y = batch(samples, seed=seed)
    parameter = next(model.parameters()) if isinstance(model, nn.Module) else x
    loss = F.cross_entropy(model(x.to(parameter.dtype)), y)
    loss.backward()
    return loss.detach()


# --- saved and resumed --------------------------------------------------------------------------


@pytest.mark.parametrize("finished_steps", [1, 3, 4])
def test_resumed_to_the_same_bits(rule: str, finished_steps: int) -> None:
    """In the middle of the schedule; also a copy and a pickle, which bring their model along."""
    opt = made(model := net(), rule)
    train(opt, model, finished_steps)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    copies = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    file.seek(0)
    saved = torch.load(file)
    other = net()
    other.load_state_dict(saved["model"])
    fresh = made(other, rule)
    fresh.load_state_dict(saved["opt"])
    train(opt, model, 6, start=finished_steps)
    for one in (fresh, *copies):
        train(one, one.model, 6, start=finished_steps)
        assert torch.equal(vector(one.model), vector(model))
        assert same(one.state_dict(), opt.state_dict())


def test_resumed_between_micro_batches(rule: str) -> None:
    opt = made(model := net(), rule)
    train(opt, model, 2)
    twin = net()
    twin.load_state_dict(model.state_dict())
    other = made(twin, rule)
    other.load_state_dict(opt.state_dict())
    for one, net_of_optimizer in ((opt, model), (other, twin)):
        for step in range(4):
            one.zero_grad()
            for micro_batch in range(3):
                backward(net_of_optimizer, 10 * step + micro_batch, samples=3 + micro_batch)
            one.step()
    assert torch.equal(vector(model), vector(twin))


def keys(tree: Any) -> Any:
    return {k: keys(v) for k, v in tree.items()} if isinstance(tree, dict) else None


def test_keys_are_there_from_the_first_statistics_on(rule: str) -> None:
    opt = made(model := net(), rule)
    train(opt, model, 1)
    before = [keys(opt.state[p]) for p in model.parameters()]
    train(opt, model, 4, start=1)
    assert [keys(opt.state[p]) for p in model.parameters()] == before
    for name, p in model.named_parameters():
        ruled = {r.name: r.rule for r in opt.coverage()}[name] == rule
        assert bool(opt.state[p]["average"]) == ruled
        assert opt.state[p]["schedule"]["step"] == 5


def test_another_rules_state_is_refused(rule: str) -> None:
    model = net()
    other = made(net(), next(r for r in RULES if r != rule))
    train(other, other.model, 3)
    opt = made(model, rule)
    natural = kfac(net(), joint=False)
    train(natural, natural.model, 1)
    for state in (other.state_dict(), natural.state_dict()):
        with (
            expect_unchanged(model, opt),
            refused("of another rule", "keeps for", "the same rule="),
        ):
            opt.load_state_dict(state)


def test_memory_counts_all_moments(rule: str) -> None:
    opt = made(model := net(), rule)
    train(opt, model, 2)
    states = (opt.state[p]["state"] for p in model.parameters())
    entries = list(chain.from_iterable(state.values() for state in states))
    assert opt.memory()["states"] == sum(t.nbytes for t in entries if isinstance(t, Tensor)) > 0


# --- steps that change nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    each_once(["2.weight", "6.weight", "0.bias", "5.weight"], [float("nan"), float("inf")]),
)
def test_a_broken_gradient_changes_nothing(rule: str, name: str, value: float) -> None:
    opt = made(model := net(), rule, weight_decay=0.1)
    train(opt, model, 2)
    opt.zero_grad()
    backward(model, 2)
    model.get_parameter(name).grad.view(-1)[1] = value
    with expect_unchanged(model, opt):
        opt.step()
    assert not opt.info.accepted
    assert "not finite" in opt.info.reason
    losses = train(opt, model, 3, start=3)
    assert losses == [True, False, True], "the statistics that were due come with the next step"
    assert opt.info.accepted


def first_moment(entry: Any) -> Tensor:
    return entry["state"].get("first", entry["state"].get("momentum"))


def test_no_gradient_moves_nothing_and_forgets_nothing(rule: str) -> None:
    """A parameter whose gradient is missing keeps its moments, beside one of its shape."""
    opt = made(model := net(), rule)
    train(opt, model, 3)
    for name in ("2.weight", "0.weight", "6.bias"):
        p = model.get_parameter(name)
        opt.zero_grad()
        backward(model, 3)
        p.grad = None
        before, state = p.detach().clone(), copy.deepcopy(opt.state_dict()["state"])
        number = [n for n, _ in model.named_parameters()].index(name)
        moments = first_moment(state[number])
        assert bool(moments.any())
        lacking = copy.deepcopy(opt)  # so that each name starts from the same
        lacking.model.load_state_dict(model.state_dict())
        for q, r in zip(lacking.model.parameters(), model.parameters(), strict=True):
            q.grad = None if r.grad is None else r.grad.clone()
        lacking.step()
        assert torch.equal(dict(lacking.model.named_parameters())[name], before)
        entry = lacking.state_dict()["state"][number]
        assert torch.equal(first_moment(entry), moments)


def test_without_any_gradient(rule: str) -> None:
    """Zeros give no NaN, also as the first gradients of all."""
    opt = made(model := net(), rule)
    before = vector(model)
    for _ in range(2):
        opt.zero_grad()
        (0.0 * model(batch()[0]).sum()).backward()
        opt.step()
    assert torch.equal(vector(model), before)
    train(opt, model, 5)
    assert bool(torch.isfinite(vector(model)).all())
    assert not torch.equal(vector(model), before)


def test_an_output_layer_of_zeros(rule: str) -> None:
    """No gradient comes to the layers below in the first step."""
    opt = made(model := net(), rule)
    with torch.no_grad():
        model[6].weight.zero_()
    before = vector(model)
    train(opt, model, 6)
    assert bool(torch.isfinite(vector(model)).all())
    assert bool((vector(model) != before).all())


def test_an_empty_batch(rule: str) -> None:
    opt = made(model := net(), rule)
    train(opt, model, 1)
    before, nothing = vector(model), torch.zeros(0, 3)
    opt.zero_grad()
    model(nothing).sum().backward()  # a step between statistics, with a gradient of zeros
    opt.step()
    assert opt.info.accepted
    assert bool(torch.isfinite(vector(model)).all())
    assert not torch.equal(vector(model), before)  # by momentum
    with refused("The batch is empty", "(0, 4)", "Skip empty batches"):
        model(nothing)
    train(opt, model, 3, start=3)
    assert opt.info.accepted


# --- loops --------------------------------------------------------------------------------------


def test_micro_batches_are_one_batch(rule: str) -> None:
    opt, whole = made(model := net(), rule), made(twin := net(), rule)
    twin.load_state_dict(model.state_dict())
    for step in range(4):
        opt.zero_grad()
        whole.zero_grad()
        x, y = batch(12, seed=step)
        F.cross_entropy(twin(x), y).backward()
        for a, b in zip(x.split(4), y.split(4), strict=True):
            (F.cross_entropy(model(a), b) / 3).backward()
        opt.step()
        whole.step()
    torch.testing.assert_close(vector(model), vector(twin), rtol=1e-7, atol=1e-9)


def test_gradients_cleared_after_the_forward_pass(rule: str) -> None:
    ends = []
    for is_cleared_late in (False, True):
        torch.manual_seed(0)
        opt = made(model := net(), rule)
        for step in range(4):
            x, y = batch(seed=step)
            if not is_cleared_late:
                opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if is_cleared_late:
                opt.zero_grad()
            loss.backward()
            opt.step()
        ends.append(vector(model))
    assert torch.equal(*ends)


class Saving(nn.Module):
    """The same network, whose body may run once more for its gradients."""

    def __init__(self, saving: bool) -> None:
        super().__init__()
        self.body, self.head, self.saving = net()[:6], nn.Linear(5, 4), saving

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.body, x, use_reentrant=False) if self.saving else self.body(x)
        return self.head(h)


def test_gradient_checkpointing(rule: str) -> None:
    ends = []
    for saving in (False, True):
        torch.manual_seed(0)
        opt = made(model := Saving(saving), rule)
        train(opt, model, 5)
        ends.append(vector(model))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_compiled(rule: str) -> None:
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = net()
        opt = made(model, rule)
        train(opt, torch.compile(model, backend="eager") if compiled else model, 5)
        ends.append(vector(model))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


def test_autocast_and_a_scaler(rule: str) -> None:
    model = net(torch.float32)
    opt = made(model, rule)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    for step in range(12):
        x, y = batch(seed=0, dtype=torch.float32)
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        before = vector(model)
        if step == 5:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(opt)
        scaler.update()
        assert torch.equal(vector(model), before) == (step == 5)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes(rule: str, dtype: torch.dtype) -> None:
    model = net(dtype)
    opt = made(model, rule)
    losses = []
    for _ in range(12):
        opt.zero_grad()
        losses.append(float(backward(model)))
        opt.step()
    assert all(p.dtype == dtype for p in model.parameters())
    assert losses[-1] < 0.95 * losses[0]
    fresh = made(copy.deepcopy(model), rule)
    fresh.load_state_dict(opt.state_dict())
    for one in (opt, fresh):
        one.zero_grad()
        backward(one.model, 3)
        one.step()
    assert torch.equal(vector(fresh.model), vector(model))


def test_a_model_that_changes_its_dtype(rule: str) -> None:
    model = net(torch.float32)
    opt = made(model, rule)
    train(opt, model, 3, dtype=torch.float32)
    model.double()
    train(opt, model, 4, start=3)
    assert opt.info.accepted
    assert all(
        t.dtype == DOUBLE
        for p in model.parameters()
        for t in opt.state[p]["state"].values()
        if isinstance(t, Tensor)
    )
    assert bool(torch.isfinite(vector(model)).all())


def test_frozen_and_unfrozen(rule: str) -> None:
    model = net()
    model[2].requires_grad_(False)
    opt = made(model, rule)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(opt, model, 3)
    assert torch.equal(model[2].weight, before["2.weight"])
    assert {r.rule for r in opt.coverage() if r.name.startswith("2.")} == {"none"}
    model[2].requires_grad_(True)
    train(opt, model, 3, start=3)
    assert {r.name: r.rule for r in opt.coverage()}["2.weight"] == rule
    assert all(bool((p != before[n]).any()) for n, p in model.named_parameters())


def test_all_matrices_frozen(rule: str) -> None:
    """Biases and gains alone are trained, by AdamW."""
    model = net()
    for n, p in model.named_parameters():
        p.requires_grad_(n.endswith("bias"))
    opt = made(model, rule)
    before = vector(model)
    train(opt, model, 3)
    assert int((vector(model) != before).sum()) == 5 * 4 + 4


def test_groups_that_come_later(rule: str) -> None:
    model = net()
    opt = made(model, rule, params=list(model[:2].parameters()))
    train(opt, model, 2)
    opt.add_param_group({"params": list(model[2:4].parameters()), "lr": 0.02})
    opt.add_param_group({"params": list(model[4:].parameters()), "rule": "adam"})
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(opt, model, 3, start=2)
    assert all(bool((p != before[n]).any()) for n, p in model.named_parameters())
    rules = {r.name: r.rule for r in opt.coverage()}
    assert [rules[f"{i}.weight"] for i in (0, 2, 4, 6)] == [rule, rule, "adam", "adam"]


def test_schedulers(rule: str) -> None:
    model = net()
    opt = made(model, rule)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=8)
    betas = set()
    for step in range(6):
        train(opt, model, 1, start=step)
        scheduler.step()
        betas.add(opt.param_groups[0]["betas"])
        assert opt.info.accepted
    assert len(betas) > 3
    saved = copy.deepcopy(opt.state_dict())
    fresh = made(net(), rule)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["betas"] == opt.param_groups[0]["betas"]


def test_a_rate_that_is_a_tensor(rule: str) -> None:
    ends = []
    for lr in (0.02, torch.tensor(0.02)):
        torch.manual_seed(0)
        opt = made(model := net(), rule)
        opt.param_groups[0]["lr"] = lr
        train(opt, model, 4)
        ends.append(vector(model))
    torch.testing.assert_close(*ends, rtol=1e-7, atol=1e-9)


def test_closures(rule: str) -> None:
    ends = []
    for closed in (False, True):
        torch.manual_seed(0)
        opt = made(model := net(), rule)

        def closure(opt: pb.KFAC = opt, model: Any = model) -> Tensor:
            opt.zero_grad()
            return backward(model)

        for _ in range(4):
            if closed:
                assert opt.step(closure) is not None
            else:
                closure()
                opt.step()
        ends.append(vector(model))
    assert torch.equal(*ends)


def test_options_of_groups_that_the_rule_does_not_read(rule: str) -> None:
    model = net()
    with refused("its own momentum=", "only lr, weight_decay, betas, rule", "leave it out"):
        made(model, rule, params=[{"params": model.parameters(), "momentum": 0.9}])


# --- refused ------------------------------------------------------------------------------------


def test_arguments_of_the_natural_gradient(rule: str) -> None:
    with refused("step= does not go with", "another rule", "rule='natural'"):
        made(net(), rule, step=QuadraticModel())


@pytest.mark.parametrize("damping", [Adaptive(0.1), Exact(0.1), 0.0])
def test_dampings(rule: str, damping: Any) -> None:
    """A number > 0 is what roots need; eigenbases need none."""
    options = {"rule": rule, "lr": 0.01, "damping": damping}
    if rule == "spectral":
        with refused("damping= is not usable", "got", "Use a number > 0"):
            pb.KFAC(net(), **options)
    else:
        with refused("damping= does not go with", "another rule", "Leave it out"):
            pb.KFAC(net(), **options)


def test_options_beside_a_rule_that_is_an_object(rule: str) -> None:
    configured = Eigenbasis() if rule == "eigenbasis" else Spectral()
    with refused("damping= was given beside", "has its own options", "Give it to the rule"):
        pb.KFAC(net(), rule=configured, damping=0.1)
    with refused("likelihood= was given beside", "has its own options", "Give it to the rule"):
        pb.KFAC(net(), rule=configured, likelihood=nn.CrossEntropyLoss())


def test_an_objective(rule: str) -> None:
    model = net()
    opt = made(model, rule)
    x = batch()[0]
    with (
        expect_unchanged(model, opt),
        refused("An objective does not go", "metric", "rule='natural'"),
    ):
        opt.step(objective=lambda p: torch.func.functional_call(model, p, x).square().sum())


@pytest.mark.parametrize("wrong", ["muon", 3, Eigenbasis, Spectral])
def test_unknown_rules(rule: str, wrong: Any) -> None:
    with refused("rule= is not usable", "got", "Use one of natural, eigenbasis, spectral"):
        made(net(), wrong)


@pytest.mark.parametrize("wrong", [(0.9,), (0.9, 1.0), (-0.1, 0.9), 0.9, ("a", "b"), None])
def test_betas(rule: str, wrong: Any) -> None:
    if rule == "eigenbasis":
        with refused("betas= is not usable", f"got {wrong!r}", "two numbers in [0, 1)"):
            made(net(), Eigenbasis(wrong))
    model = net()
    with refused("betas= is not usable", f"got {wrong!r}", "two numbers in [0, 1)"):
        made(model, rule, params=[{"params": model.parameters(), "betas": wrong}])


def test_arguments_of_the_rules(rule: str) -> None:
    wrong = {
        "eigenbasis": [("eps", lambda: Eigenbasis(eps=-1.0))],
        "spectral": [
            ("momentum", lambda: Spectral(momentum=1.0)), ("adapt", lambda: Spectral(adapt=-0.1))
        ],
    }  # fmt: skip
    for name, make in wrong[rule]:
        with refused(f"{name}= is not usable", "got", "Use a number"):
            made(net(), make())
