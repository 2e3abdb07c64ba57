"""K-FAC's state: the same keys whatever the data, draws from a counter, idle steps."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import pullback as pb
from pullback.testing import assert_close
from tests.kfac_options import kfac_of
from tests.pairs import each_once

from ..common import refused
from .common import batch, kfac, net, train, vector


class Zoo(nn.Module):
    """Layers of every kind, a tied weight, and a parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recur = nn.LSTM(8, 8, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, groups=2)
        self.up = nn.ConvTranspose1d(8, 8, 3)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        h = h + self.attend(h, h, h, need_weights=False)[0]
        h = self.recur(h)[0] * self.gain
        return self.head(self.up(self.conv(h.mT)).mT)


def outline(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: outline(value) for key, value in tree.items()}
    if isinstance(tree, Tensor):
        return (tree.shape, tree.dtype)
    return "number"


def zoo_step(opt: pb.KFAC, model: nn.Module, seed: int = 0, length: int = 5) -> None:
    x = torch.randint(0, 7, (3, length), generator=torch.Generator().manual_seed(seed))
    opt.zero_grad()
    F.cross_entropy(model(x).mT, x).backward()
    opt.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"ekfac": True}, {"max_factor": 6}, {"joint": False}, {"sharing": "reduce"}],
    ids=str,
)
def test_the_table_has_the_shapes_that_statistics_found(options: dict[str, Any]) -> None:
    """A fresh optimizer that has read the table alone has a state of the same keys and shapes."""
    torch.manual_seed(0)
    model = Zoo()
    opt = kfac(model, damping=0.1, statistics_every=1, **options)
    zoo_step(opt, model)
    want = {n: outline(s) for n, s in opt.state_dict()["state"].items()}
    fresh = kfac(Zoo(), damping=0.1, statistics_every=1, **options)
    saved = copy.deepcopy(opt.state_dict())
    known = fresh.state_dict()["state"]
    for number, entry in saved["state"].items():
        empty = {"state": {"ready": 0, "born": 0}, "average": {}, "mean": {}}
        saved["state"][number] = {key: empty.get(key, entry[key]) for key in known[number]}
    fresh.load_state_dict(saved)
    assert {n: outline(s) for n, s in fresh.state_dict()["state"].items()} == want
    with refused("loaded in part", "since this load", "a second time"):
        zoo_step(fresh, fresh.model)


def test_a_checkpoint_of_many_kinds_of_layers_resumes_to_the_same_bits() -> None:
    torch.manual_seed(0)
    one = Zoo()
    two = Zoo()
    first, second = (kfac(m, damping=0.1, statistics_every=2, invert_every=3) for m in (one, two))
    for i in range(4):
        zoo_step(first, one, i)
    saved = copy.deepcopy(get_optimizer_state_dict(one, first))
    two.load_state_dict(one.state_dict())
    set_optimizer_state_dict(two, second, saved)
    for i in range(4, 9):
        for opt, model in ((first, one), (second, two)):
            zoo_step(opt, model, i, length=4)
    assert torch.equal(vector(one), vector(two))
    assert str(first.coverage()) == str(second.coverage())


def test_draws_follow_from_seed_and_step_alone() -> None:
    """Another history of random numbers, and steps that were rejected, change no draw."""
    grams = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        opt = kfac(model := net(), lr=0.0, statistics_every=1, seed=3)
        for i in range(3):
            if disturbed:
                torch.rand(7 + i)
                x, y = batch(seed=i)
                opt.zero_grad()
                (F.cross_entropy(model(x), y) * float("nan")).backward()
                opt.step()
                assert not opt.info.accepted
            train(opt, model, 1, start=i)
        grams.append(opt.gram().dense())
    assert torch.equal(*grams)
    torch.manual_seed(0)
    opt = kfac(model := net(), lr=0.0, statistics_every=1, seed=4)
    train(opt, model, 3)
    assert not torch.allclose(opt.gram().dense(), grams[0])


@pytest.mark.parametrize("trained", [0, 3])
def test_a_step_with_zero_gradients_and_no_rate_changes_nothing(trained: int) -> None:
    opt = kfac(model := net())
    train(opt, model, trained)
    if trained:  # also after a pass
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in opt.param_groups]
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(opt.state_dict())
    weights = vector(model)
    opt.step(closure=None)
    after = opt.state_dict()
    assert torch.equal(vector(model), weights)
    for key, entry in before["state"].items():
        assert outline(entry) == outline(after["state"][key])
        assert entry["schedule"] == after["state"][key]["schedule"]
        assert torch.equal(entry["momentum"], after["state"][key]["momentum"])
    for group, lr in zip(opt.param_groups, rates, strict=True):
        group["lr"] = lr
    train(opt, model, 1)  # and goes on


GROUPS: dict[str, Any] = {
    "momentum in one": lambda ps: [{"params": ps[::2]}, {"params": ps[1::2], "momentum": 0.0}],
    "momentum in the other": lambda ps: [
        {"params": ps[::2], "momentum": 0.0},
        {"params": ps[1::2]},
    ],
    "no decay of biases": lambda ps: [{"params": ps[::2]}, {"params": ps[1::2], "lr": 0.01}],
}


@pytest.mark.parametrize(("groups", "frozen"), each_once(GROUPS, [False, True]))
def test_groups_and_frozen_weights_keep_keys_and_bits(groups: str, frozen: bool) -> None:
    """Weights and biases in groups of their own share blocks; a clip adds up in a fixed order."""

    def make() -> tuple[nn.Module, pb.KFAC]:
        torch.manual_seed(0)
        model = net()
        model[0].weight.requires_grad_(not frozen)
        return model, kfac(model, params=GROUPS[groups](list(model.parameters())), kl_clip=1e-3)

    model, opt = make()
    train(opt, model, 1)
    before = [outline(opt.state[p]) for p in model.parameters()]
    train(opt, model, 4, start=1)
    assert [outline(opt.state[p]) for p in model.parameters()] == before
    resumed, fresh = make()
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    for entry, one in ((opt, model), (fresh, resumed)):
        train(entry, one, 12, start=5)
    assert torch.equal(vector(model), vector(resumed))


def test_a_clip_without_statistics_clips_nothing() -> None:
    opt = kfac(model := net(), kl_clip=1e-3)
    opt.close()
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    assert opt.info.accepted


def test_states_of_another_layout_are_refused() -> None:
    """Momentum by parameter, and the rest elsewhere."""
    opt = kfac(net())
    state = opt.state_dict()
    old = {number: {"momentum": entry["momentum"]} for number, entry in state["state"].items()}
    with refused("not KFAC's", "no table of blocks", "start anew"):
        opt.load_state_dict(state_dict={**state, "state": {**old, "pullback": {"steps": 1}}})


def test_large_matrices_are_packed_and_the_numbers_stay() -> None:
    """A side of 2100 entries is held in half of its memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2100, 3), nn.Linear(3, 2))
    x = torch.randn(6, 2100)
    y = torch.randint(0, 2, (6,))
    opt = kfac_of(model, 0.0, likelihood=pb.likelihoods.Categorical(), fisher="exact", damping=0.1)
    F.cross_entropy(model(x), y).backward()
    opt.step()

    def right_side(optimizer: pb.KFAC) -> Tensor:
        sides = [
            t
            for entry in optimizer.average().values()
            for f, t in entry.items()
            if f.side == "right"
        ]
        return max(sides, key=Tensor.numel)

    right = right_side(opt)
    assert_close(right[0], x.T @ x / 6, 1e-5, "mean aaᵀ")
    assert opt.memory()["averages"] < 1.2 * 4 * 2100 * 2100 / 2
    other = copy.deepcopy(opt)
    other.load_state_dict(state_dict=opt.state_dict())
    assert torch.equal(right_side(other), right)


@pytest.mark.parametrize("rule", ["natural", "spectral"])
def test_moments_of_another_shape_are_refused(rule: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = pb.KFAC(model, rule=rule)
    model(torch.randn(5, 3)).square().mean().backward()
    opt.step()
    saved = opt.state_dict()
    entry = saved["state"][1]
    if rule == "natural":
        entry["momentum"] = torch.zeros(2, 2)
    else:
        entry["state"]["first"] = torch.zeros(2, 2)
    with pytest.raises(pb.PullbackError, match="another shape"):
        opt.load_state_dict(saved)
