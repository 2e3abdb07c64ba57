"""The assignment table: saved with the state, refused for other models, with true reasons."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import pullback as pb
from pullback.optim.kfac import KFACLoadPlanner
from tests.pairs import each_once

from ..common import refused
from .common import vector


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], len(self.bias))
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Bare(nn.Module):
    """x @ w with a parameter of no layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def weight_normed(inputs: int, outputs: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(inputs, outputs))


class Recurrent(nn.Module):
    """The last state of an LSTM."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(inputs, outputs, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[:, None].expand(-1, 3, -1))[0][:, -1]


class Attending(nn.Module):
    """Attention over three copies of a vector, projected."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(inputs, 2, batch_first=True)
        self.projection = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.arange(1.0, 4.0)[:, None]
        return self.projection(self.attention(x, x, x, need_weights=False)[0].mean(1))


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "Conv1D": Conv1D,
    "bare parameter": Bare,
    "weight_norm": weight_normed,
    "LSTM": Recurrent,
    "attention": Attending,
}


def build(layer: str, rule: str) -> tuple[nn.Module, pb.KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[layer](4, 6), nn.Tanh(), LAYERS[layer](6, 5), nn.Tanh())
    model.append(nn.Linear(5, 3))
    return model, pb.KFAC(model, 0.02, rule=rule, statistics_every=2, invert_every=4)


def train(model: nn.Module, opt: pb.KFAC, steps: range) -> Tensor:
    for number in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        opt.zero_grad()
        F.cross_entropy(model(x), torch.arange(8) % 3).backward()
        opt.step()
    return vector(model)


def load(model: nn.Module, opt: pb.KFAC, path: Path, planner: Any = None) -> None:
    state = {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, opt)}
    dcp.load(state, checkpoint_id=path, no_dist=True, planner=planner)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, opt, state["opt"])


@pytest.mark.parametrize(
    ("layer", "rule"), each_once(LAYERS, ["natural", "eigenbasis", "spectral", "two-sided"])
)
def test_distributed_checkpoints_load_before_the_first_step(
    layer: str, rule: str, tmp_path: Path
) -> None:
    """Weights that no layer of torch holds too: the table says what to read."""
    model, opt = build(layer, rule)
    train(model, opt, range(5))
    state = {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, opt)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    resumed, fresh = build(layer, rule)
    load(resumed, fresh, tmp_path, KFACLoadPlanner())
    expected = train(model, opt, range(5, 9))
    assert torch.equal(train(resumed, fresh, range(5, 9)), expected)
    for row, want in zip(fresh.coverage(), opt.coverage(), strict=True):
        assert (row.rule, row.block) == (want.rule, want.block)
    resumed, fresh = build(layer, rule)
    load(resumed, fresh, tmp_path)  # as torch does it by itself
    with refused("loaded in part", "since this load", "KFACLoadPlanner()"):
        train(resumed, fresh, range(5, 6))
    load(resumed, fresh, tmp_path)
    assert torch.equal(train(resumed, fresh, range(5, 9)), expected)


def test_one_load_of_the_plain_state_dict_suffices(tmp_path: Path) -> None:
    """Parameters are numbered in it; the optimizer itself may be handed over too."""
    model, opt = build("LSTM", "natural")
    train(model, opt, range(3))
    dcp.save({"model": model, "opt": opt}, checkpoint_id=tmp_path, no_dist=True)
    expected = train(model, opt, range(3, 6))
    resumed, fresh = build("LSTM", "natural")
    planner = KFACLoadPlanner()
    dcp.load(
        {"model": resumed, "opt": fresh}, checkpoint_id=tmp_path, no_dist=True, planner=planner
    )
    assert torch.equal(train(resumed, fresh, range(3, 6)), expected)


def test_a_loaded_state_tells_the_roles_of_its_table() -> None:
    """The text of a reason is not saved; the next statistics give it again."""
    model, opt = build("Conv1D", "eigenbasis")
    train(model, opt, range(2))
    resumed, fresh = build("Conv1D", "eigenbasis")
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(opt.state_dict())
    roles = {row.name: row.role.value for row in fresh._assignment.roles.values()}
    loaded = {row.name: row.reason for row in fresh.coverage()}
    assert roles.keys() == loaded.keys()
    for name, reason in loaded.items():
        assert reason.startswith(f"{roles[name]} by the saved table")


def test_the_table_of_another_model_is_refused() -> None:
    model, opt = build("Conv1D", "eigenbasis")
    train(model, opt, range(2))
    other = nn.Sequential(Conv1D(4, 7), nn.Tanh(), Conv1D(7, 5), nn.Tanh(), nn.Linear(5, 3))
    fresh = pb.KFAC(other, rule="eigenbasis")
    saved = opt.state_dict()
    with refused("another network", "had", "built in the same way"):
        fresh.load_state_dict(saved)
    for number, entry in saved["state"].items():  # the table alone, as a first load gives it
        empty: dict[str, Any] = {"state": {"ready": 0, "born": 0}, "average": {}}
        saved["state"][number] = {**entry, **empty}
    with refused("another network", "had", "built in the same way"):
        fresh.load_state_dict(saved)
    newer = copy.deepcopy(saved)
    newer["state"][0]["table"]["role"] = 77
    with refused("newer version", "role of number 77", "that wrote it"):
        fresh.load_state_dict(newer)


class Experts(nn.Module):
    """Two experts, of which one gets no rows at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.used = 1

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for expert in self.experts[: self.used]:
            h = h + expert(h)
        return self.head(h)


@pytest.mark.parametrize("rule", ["natural", "eigenbasis", "spectral"])
def test_an_expert_without_rows_is_named_and_covered_later(rule: str) -> None:
    model = Experts()
    opt = pb.KFAC(model, rule=rule, statistics_every=1)
    train(model, opt, range(2))
    row = next(row for row in opt.coverage() if row.name == "experts.1.weight")
    assert "no forward pass so far gave it any rows" in row.reason
    model.used = 2
    train(model, opt, range(2, 4))
    row = next(row for row in opt.coverage() if row.name == "experts.1.weight")
    assert (row.rule, row.block.split()[0]) == (rule, "kronecker")


def test_a_gradient_hook_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].weight.register_hook(lambda g: 2 * g)
    opt = pb.KFAC(model, rule="eigenbasis")
    with pytest.warns(RuntimeWarning, match="a gradient hook on it changes its gradient"):
        train(model, opt, range(1))
    row = opt.coverage()[0]
    assert (row.rule, row.reason) == ("adam", "a gradient hook on it changes its gradient")


class TwoHeads(nn.Module):
    """A second output, which the metric does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)
        self.side = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"logits": self.head(h), "side": self.side(h)}


def test_a_head_that_the_measured_output_does_not_see_is_named_under_eigenbasis() -> None:
    opt = pb.KFAC(model := TwoHeads(), rule="eigenbasis", output="logits")
    for number in range(2):
        opt.zero_grad()
        output = model(torch.randn(8, 4))
        loss = F.cross_entropy(output["logits"], torch.arange(8) % 3)
        (loss + output["side"].square().mean()).backward()
        if number:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                opt.step()
            continue
        with pytest.warns(RuntimeWarning, match=r"reaches side\.weight, on which"):
            opt.step()


def test_a_frozen_head_does_not_make_another_layer_the_head() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[4].requires_grad_(False)
    opt = pb.KFAC(model, rule="spectral")
    train(model, opt, range(1))
    rules = {row.name: row.rule for row in opt.coverage()}
    assert rules["0.weight"] == rules["2.weight"] == "spectral"
