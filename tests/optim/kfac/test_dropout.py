"""Dropout inside layers that torch fuses: the Gram is that of the layer without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pullback as pb
from pullback.testing import assert_close
from tests.optim.common import flat
from tests.optim.kfac import oracle as o

from .common import Then, kfac


@dataclass(frozen=True)
class Sizes:
    """How large the tensors of this file are."""

    samples: int = 6
    positions: int = 4
    inputs: int = 3
    width: int = 4


SIZES = Sizes()


class Recurrent(nn.Module):
    """A linear head, so that the cotangents do not depend on what was dropped."""

    def __init__(
        self, layer_type: Any, packed: bool = False, calls: int = 1, **options: Any
    ) -> None:
        super().__init__()
        self.layer = layer_type(SIZES.inputs, SIZES.width, 2, batch_first=True, **options)
        width = (options.get("proj_size") or SIZES.width) * (
            1 + options.get("bidirectional", False)
        )
        self.head = nn.Linear(width, 2)
        self.packed = packed
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            lengths = torch.tensor([2, 4, 1, 4, 3, 2])
            packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.layer(packed)[0], True)[0].sum(1))
        return self.head(sum(self.layer(x * (i + 1))[0].sum(1) for i in range(self.calls)))


class Attention(nn.Module):
    def __init__(self, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(SIZES.width, 2, **options)
        self.first = nn.Linear(SIZES.inputs, SIZES.width)
        self.head = nn.Linear(SIZES.width, 2)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).transpose(0, 1)
        return self.head(self.layer(h, h[:2], h[:2], need_weights=self.weights)[0].sum(0))


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "LSTM": lambda p: Recurrent(nn.LSTM, dropout=p),
    "LSTM projected": lambda p: Recurrent(nn.LSTM, dropout=p, proj_size=2),
    "GRU both ways": lambda p: Recurrent(nn.GRU, dropout=p, bidirectional=True),
    "RNN packed": lambda p: Recurrent(nn.RNN, dropout=p, packed=True),
    "LSTM called twice": lambda p: Recurrent(nn.LSTM, dropout=p, calls=2),
    "attention": lambda p: Attention(dropout=p),
    "attention with weights": lambda p: Attention(True, dropout=p),
}


def loss_of(model: nn.Module, half: bool = False) -> Tensor:
    """On fixed data; by halves under autocast."""
    g = torch.Generator().manual_seed(1)
    dtype = torch.float32 if half else torch.float64
    x, y = (
        torch.randn(*size, generator=g).to(dtype)
        for size in ((SIZES.samples, SIZES.positions, SIZES.inputs), (SIZES.samples, 2))
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return 0.5 * (model.to(dtype)(x) - y).square().sum(1).mean()


def stepped(model: nn.Module, half: bool = False) -> pb.KFAC:
    """After one step that moves nothing."""
    opt = kfac(model, metric=pb.metrics.Euclidean(), fisher="exact", lr=0.0)
    loss_of(model, half).backward()
    opt.step()
    return opt


@pytest.mark.parametrize("name", MODELS)
def test_the_gram_is_that_without_dropout_and_training_is_not_disturbed(name: str) -> None:
    model = MODELS[name](0.4)
    twin = MODELS[name](0.0)
    twin.load_state_dict(model.state_dict())
    other = copy.deepcopy(model)
    plain = stepped(twin)
    torch.manual_seed(3)
    opt = stepped(model)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    loss_of(other).backward()
    assert torch.equal(drawn, torch.rand(3)), "the same random numbers"
    gradients = [flat(p.grad for p in m.parameters()) for m in (model, other)]
    assert_close(*gradients, 1e-14, "the same masks and gradients")
    model.eval()  # which says nothing of the pass that the statistics came from
    inside = [n for n, _ in model.named_parameters() if n.startswith("layer.")]
    actual, want = (o.part(p.gram().dense(), model, inside) for p in (opt, plain))
    assert_close(actual, want, 1e-12, name)
    for row, other_row in zip(opt.coverage(), plain.coverage(), strict=True):
        assert row.block == other_row.block
        assert "without" not in other_row.reason
        assert ("replayed without dropout" in row.reason) == (row.name in inside)


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast(name: str) -> None:
    model = MODELS[name](0.4)
    try:
        loss_of(model, half=True)
    except RuntimeError:
        pytest.skip("torch has no such layer in bfloat16 on this machine")
    assert all(r.block.startswith("kronecker") for r in stepped(model, half=True).coverage())


@pytest.mark.parametrize("first", [False, True])
def test_transformer_layers_as_they_come_are_trained(first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=first)  # dropout=0.1
    model = nn.Sequential(
        nn.Linear(SIZES.inputs, 8),
        Then(lambda h: h if first else h.transpose(0, 1)),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        Then(lambda h: h.mean(int(first))),
        nn.Linear(8, 2),
    )
    x = torch.randn(64, SIZES.positions, SIZES.inputs)
    losses = []
    opt = kfac(model, lr=0.1, damping=0.01, kl_clip=1e-3, statistics_every=1, invert_every=1)
    for _ in range(8):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), (x.sum((1, 2)) > 0).long())
        loss.backward()
        opt.step()
        assert opt.info.accepted
        losses.append(float(loss.detach()))
    assert all(r.block.startswith(("kronecker", "units")) for r in opt.coverage())
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


class Elsewhere(nn.Module):
    """A weight of the layer is used once more: before it, after it or beside it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer = nn.GRU(SIZES.width, SIZES.width, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(SIZES.width, 2)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        h = F.pad(x, (0, SIZES.width - SIZES.inputs))
        weight = dict(self.layer.named_parameters())["weight_hh_l1"][: SIZES.width]
        more = F.linear(h, weight)
        y = self.layer(more if self.where == "before" else h)[0]
        y = {"before": y, "after": F.linear(y, weight), "beside": y + more}[self.where]
        return self.head(y.sum(1))


@pytest.mark.parametrize("where", ["before", "after", "beside"])
@pytest.mark.parametrize("half", [False, True])
def test_a_weight_that_is_used_elsewhere_is_noticed(where: str, half: bool) -> None:
    """Autocast casts a weight once for all of its uses: they share a node of the graph."""
    rows = {r.name: r for r in stepped(Elsewhere(where), half).coverage()}
    shared = rows.pop("layer.weight_hh_l1")
    assert shared.block == "diagonal"
    assert shared.reason.startswith("it is also used outside its layer, whose dropout")
    assert all(r.block.startswith("kronecker") for r in rows.values()), "the rest is known"


class Tied(nn.Module):
    """An attention's last map is a layer of its own as well."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(SIZES.width, 2, dropout=dropout, batch_first=True)
        self.other = nn.Linear(SIZES.width, SIZES.width, bias=False)
        self.head = nn.Linear(SIZES.width, 2)
        self.other.weight = self.layer.out_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        h = F.pad(x, (0, SIZES.width - SIZES.inputs))
        return self.head(self.other(self.layer(h, h, h, need_weights=False)[0]).sum(1))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_weight_shared_with_another_layer_is_a_diagonal_under_dropout(dropout: float) -> None:
    rows = {r.name: r for r in stepped(Tied(dropout)).coverage()}
    shared = rows.pop("layer.out_proj.weight")
    assert shared.block.startswith("diagonal" if dropout else "kronecker")
    assert ("whose dropout" in shared.reason) == bool(dropout)
    assert all(r.block.startswith("kronecker") for r in rows.values())


def test_a_layer_that_was_changed_is_noticed() -> None:
    model: Any = Attention(dropout=0.2)
    forward = model.layer.forward
    model.layer.forward = lambda *args, **kwargs: (3 * forward(*args, **kwargs)[0], None)
    rows = stepped(model).coverage()
    assert {r.block for r in rows if r.name.startswith("layer.")} == {"diagonal"}
    assert model.layer.dropout == 0.2
