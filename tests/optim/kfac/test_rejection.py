"""Input that is not finite or breaks off changes nothing; odd parameters have simpler blocks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from tests.pairs import all_pairs

from ..common import hooks, same
from .common import DOUBLE, batch, gram, kfac, net, train, vector

NAN = float("nan")
INF = float("inf")


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)


class Spoiled(nn.Module):
    """A network whose outputs `spoil` may change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.norm = nn.LayerNorm(4)
        self.spoil: Callable[[Tensor], Tensor] = lambda z: z

    def forward(self, x: Tensor) -> Tensor:
        return self.spoil(self.norm(self.net(x)))


def state(opt: pb.KFAC) -> Any:
    """Parameters, what is said of the blocks, and averages where there are some."""
    known = any("(" in row.block for row in opt.coverage())
    return vector(opt.model), opt.coverage(), opt.gram().dense() if known else None


def broken_pass(model: Spoiled, where: str) -> None:
    """A backward pass with a value that is not finite."""
    x, y = batch()
    value = NAN if where in ("loss", "input") else INF
    model.spoil = lambda z: z * (value if where == "output" else 1.0)
    loss = F.cross_entropy(model(x * (value if where == "input" else 1.0)), y)
    (loss * (value if where == "loss" else 1.0)).backward()
    model.spoil = lambda z: z
    if where == "entry":
        model.net[2].weight.grad[1, 2] = value


#: the first step, a plain one, one with statistics, and one with inversions
STEPS = {"first": 0, "plain": 1, "statistics": 2, "inversion": 4}


@pytest.mark.parametrize(
    ("where", "step_kind", "fisher"),
    all_pairs(["loss", "entry", "input", "output"], STEPS, ["exact", "empirical"]),
)
def test_a_gradient_that_is_not_finite_changes_nothing(
    where: str, step_kind: str, fisher: str
) -> None:
    at = STEPS[step_kind]
    """Parameters, momentum, averages and the schedule go on as if it had not been there."""
    model = Spoiled()
    opt = kfac(model, fisher=fisher, weight_decay=0.1)
    train(opt, model, at)
    twin = copy.deepcopy(opt)
    before = state(opt)
    due = opt.statistics_due
    opt.zero_grad()
    broken_pass(model, where)
    opt.step()
    assert (opt.info.accepted, opt.info.took_statistics) == (False, False)
    assert "not finite" in opt.info.reason
    assert same(before, state(opt))
    assert opt.statistics_due == due
    assert train(opt, model, 5, start=at) == train(twin, twin.model, 5, start=at)
    assert opt.info.accepted
    assert same(state(opt), state(twin))


@pytest.mark.parametrize(("how", "at"), [("mask", 0), ("mask", 2), ("huge", 2), ("huge", 4)])
def test_statistics_that_are_not_finite_are_left_and_told(how: str, at: int) -> None:
    """Beside finite gradients: one logit is masked in the loss, or squares of inputs overflow."""
    model = Spoiled()
    x = batch()[0]
    opt = kfac(model, metric=lambda z: torch.diag_embed(z * z), weight_decay=0.1)
    train(opt, model, at)
    if at:
        gram_before = opt.gram().dense()
    else:
        gram_before = None
    start = vector(model)
    if how == "mask":
        model.spoil = lambda z: torch.cat([z[:, :3], z[:, 3:] * INF], 1)
    opt.zero_grad()
    F.mse_loss(model(x * (1e200 if how == "huge" else 1.0))[:, :3], x).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.nan_to_num_()
    opt.step()
    assert (opt.info.accepted, opt.info.took_statistics) == (True, False)
    assert "not finite" in opt.info.notes["statistics"]
    assert torch.isfinite(vector(model)).all()
    assert not torch.equal(vector(model), start)
    assert gram_before is None or torch.equal(opt.gram().dense(), gram_before)
    model.spoil = lambda z: z
    assert any(train(opt, model, 2, start=at + 1))
    assert "statistics" not in opt.info.notes
    assert opt.coverage()[0].block == "kronecker (5 ⊗ 4)"


@pytest.mark.parametrize("where", ["forward", "metric", "first of two calls", "closure"])
def test_an_exception_reaches_the_caller_and_the_next_step_is_as_ever(where: str) -> None:
    model = Spoiled()
    broken = set()

    def meets(stage: str, z: Tensor) -> Tensor:
        if stage in broken:
            raise ValueError("broken off")
        if stage == "metric":
            return torch.eye(4).expand(len(z), 4, 4)
        return z

    model.spoil = lambda z: meets("forward", z)
    opt = kfac(model, metric=lambda z: meets("metric", z), statistics_every=1)
    train(opt, model)
    before = state(opt)
    count = hooks(model)
    x, y = batch(seed=1)

    def closure() -> None:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if where == "first of two calls":
            broken.add("metric")
            loss = F.cross_entropy(model(2 * x), y) + loss
        loss.backward()
        meets("closure", x)

    broken.add(where)
    with pytest.raises(ValueError, match="broken off"):
        opt.step(closure)
    broken.clear()
    assert same(before, state(opt))
    assert hooks(model) == count
    assert train(opt, model, 2) == [True, True]


def test_statistics_touch_neither_gradients_nor_random_numbers() -> None:
    model = net()
    x, y = batch()
    want = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    state = torch.get_rng_state()
    with kfac(model, draws=3):
        F.cross_entropy(model(x), y).backward()
    assert torch.equal(state, torch.get_rng_state())
    assert same([p.grad for p in model.parameters()], list(want))


def test_classes_may_be_masked_by_infinite_logits() -> None:
    model = Spoiled()
    model.spoil = lambda z: z + torch.tensor([0.0, 0.0, 0.0, -INF])
    assert gram(model, batch()[0], batch()[1].clamp(max=2)).isfinite().all()


class Doubling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Odd(nn.Module):
    """A plain parameter, an unused one, a weight used twice, and a subclass of its own mind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.doubling = Doubling(3, 4)
        self.scale = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(torch.tanh(self.fc(x)), 2 * self.fc.weight.T)
        return self.doubling(h * self.scale)


@pytest.mark.parametrize("head", [False, True])
def test_parameters_in_odd_places_have_simpler_blocks_and_the_reason_is_told(head: bool) -> None:
    """Also below a head that starts at zero, whose first gradients prove nothing."""
    model: Any = nn.Sequential(Odd(), *[nn.Linear(4, 4)][: int(head)])
    if head:
        nn.init.zeros_(model[1].weight)
    opt = kfac(model, statistics_every=1)
    start = copy.deepcopy(model[0])
    train(opt, model, 3)
    rows = {row.name.removeprefix("0."): row for row in opt.coverage()}
    assert rows["fc.weight"].block == "diagonal"
    assert "used outside its layer" in rows["fc.weight"].reason
    assert "kronecker" in rows["fc.bias"].block
    for name in ("doubling.weight", "doubling.bias"):
        assert rows[name].block == "kronecker (4 ⊗ 4)"
        assert rows[name].reason == "a function uses it as Linear does"
    assert rows["scale"].block == "units"
    assert rows["scale"].reason == "a function uses it, in an elementwise product or sum"
    assert (rows["unused"].block, "no output" in rows["unused"].reason) == ("gradient", True)
    assert torch.equal(start.unused, model[0].unused)
    assert not torch.equal(start.scale, model[0].scale)
    assert str(opt.coverage()).count("\n") == len(rows)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return [branch(x) for branch in self.branches][self.chosen]  # both run, one counts


def test_branches_that_come_and_go() -> None:
    model = Branching()
    opt = kfac(model, statistics_every=1)
    train(opt, model)
    assert opt.coverage()[2].block == "gradient"
    for i in (1, 0):
        model.chosen = i
        train(opt, model)
    assert all("kronecker" in r.block for r in opt.coverage())
