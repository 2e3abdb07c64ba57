"""Dropout inside layers that are replayed: the factors are those of the layer without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pullback as pb
from pullback.testing import assert_close

from .common import kfac

N, T, D, H = 6, 4, 3, 4


class Recurrent(nn.Module):
    """A linear head, so that the cotangents do not depend on what was dropped."""

    def __init__(self, kind: Any, packed: bool = False, calls: int = 1, **options: Any) -> None:
        super().__init__()
        self.layer = kind(D, H, 2, batch_first=True, **options)
        width = (options.get("proj_size") or H) * (1 + options.get("bidirectional", False))
        self.head, self.packed, self.calls = nn.Linear(width, 2), packed, calls

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            lengths = torch.tensor([2, 4, 1, 4, 3, 2])
            packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            y = pad_packed_sequence(self.layer(packed)[0], True)[0]
            return self.head(y.sum(1))
        return self.head(sum(self.layer(x * (i + 1))[0].sum(1) for i in range(self.calls)))


class Attention(nn.Module):
    def __init__(self, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(H, 2, **options)
        self.first, self.head, self.weights = nn.Linear(D, H), nn.Linear(H, 2), weights

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).transpose(0, 1)
        return self.head(self.layer(h, h[:2], h[:2], need_weights=self.weights)[0].sum(0))


MODELS = {
    "LSTM": lambda p: Recurrent(nn.LSTM, dropout=p),
    "LSTM projected": lambda p: Recurrent(nn.LSTM, dropout=p, proj_size=2),
    "GRU both ways": lambda p: Recurrent(nn.GRU, dropout=p, bidirectional=True),
    "RNN packed": lambda p: Recurrent(nn.RNN, dropout=p, packed=True),
    "LSTM called twice": lambda p: Recurrent(nn.LSTM, dropout=p, calls=2),
    "attention": lambda p: Attention(dropout=p),
    "attention with weights": lambda p: Attention(True, dropout=p),
}


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, T, D, generator=g, dtype=torch.float64)
    return x, torch.randn(N, 2, generator=g, dtype=torch.float64)


def blocks(model: nn.Module) -> tuple[dict[Any, Tensor], pb.KFAC]:
    x, y = data()
    with kfac(model, metric=pb.metrics.Euclidean(), fisher="exact", lr=0.0) as opt:
        (0.5 * (model(x) - y).square().sum(1).mean()).backward()
        opt.step()
        held = opt.curvature
        model.eval()  # which says nothing of the pass that the statistics came from
        return {k.names: held.block(k).dense() for k in held.averages}, opt


@pytest.mark.parametrize("name", MODELS)
def test_the_factors_are_those_without_dropout(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](0.4).double()
    twin = MODELS[name](0.0).double()
    twin.load_state_dict(model.state_dict())
    (found, opt), (want, plain) = blocks(model), blocks(twin)
    inside = [names for names in want if names[0].startswith("layer.")]
    assert inside
    assert found.keys() == want.keys()
    for names in inside:
        assert_close(found[names], want[names], 1e-12, str(names))
    rows = {r.name: r for r in opt.coverage()}
    for row in plain.coverage():
        assert rows[row.name].block == row.block
        assert "without" not in row.reason
        inner = row.name.startswith("layer.")
        assert ("replayed without dropout" in rows[row.name].reason) == inner


@pytest.mark.parametrize("first", [False, True])
def test_transformer_layers_as_they_come(first: bool) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(D, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=first)  # dropout=0.1
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.head(self.layers(h if first else h.transpose(0, 1)).mean(int(first)))

    torch.manual_seed(0)
    model = Encoder().double()
    x = torch.randn(64, T, D, dtype=torch.float64)
    y = (x.sum((1, 2)) > 0).long()
    opt = kfac(model, lr=0.1, damping=0.01, kl_clip=1e-3, statistics_every=1, invert_every=1)
    losses = []
    for _ in range(30):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
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
        self.layer = nn.GRU(H, H, 2, batch_first=True, dropout=0.3)
        self.head, self.where = nn.Linear(H, 2), where

    def forward(self, x: Tensor) -> Tensor:
        h, weight = F.pad(x, (0, H - D)), dict(self.layer.named_parameters())["weight_hh_l1"][:H]
        more = F.linear(h, weight)
        y = self.layer(more if self.where == "before" else h)[0]
        if self.where == "after":
            y = F.linear(y, weight)
        return self.head((y + more if self.where == "beside" else y).sum(1))


@pytest.mark.parametrize("where", ["before", "after", "beside"])
@pytest.mark.parametrize("half", [False, True])
def test_a_weight_that_is_used_elsewhere_is_noticed(where: str, half: bool) -> None:
    """Autocast casts a weight once for all of its uses: they share a node of the graph."""
    torch.manual_seed(0)
    model, (x, y) = Elsewhere(where).to(torch.float32 if half else torch.float64), data()
    opt = kfac(model, metric=pb.metrics.Euclidean())
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = (model(x.float() if half else x) - y).square().mean()
    loss.backward()
    opt.step()
    rows = {r.name: r for r in opt.coverage()}
    tied = rows.pop("layer.weight_hh_l1")
    assert tied.block == "diagonal"
    assert tied.reason.startswith("it is also used outside its layer, whose dropout")
    # the rest of the last layer is known
    assert all(r.block.startswith("kronecker") for r in rows.values())


class Tied(nn.Module):
    """An attention's last map is a layer of its own as well."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(H, 2, dropout=dropout, batch_first=True)
        self.other, self.head = nn.Linear(H, H, bias=False), nn.Linear(H, 2)
        self.other.weight = self.layer.out_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        h = F.pad(x, (0, H - D))
        return self.head(self.other(self.layer(h, h, h, need_weights=False)[0]).sum(1))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_said_of_a_weight_shared_with_another_layer(dropout: float) -> None:
    torch.manual_seed(0)
    model, (x, y) = Tied(dropout).double(), data()
    opt = kfac(model, metric=pb.metrics.Euclidean())
    (model(x) - y).square().mean().backward()
    opt.step()
    rows = {r.name: r for r in opt.coverage()}
    tied = rows.pop("layer.out_proj.weight")
    assert tied.block.startswith("diagonal" if dropout else "kronecker")
    assert ("whose dropout" in tied.reason) == bool(dropout)
    assert all(r.block.startswith("kronecker") for r in rows.values())


def test_a_layer_that_was_changed_is_noticed() -> None:
    torch.manual_seed(0)
    model, (x, y) = Attention(dropout=0.2).double(), data()
    own = model.layer.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        y, weights = own(*args, **kwargs)
        return 3 * y, weights

    model.layer.forward = scaled
    opt = kfac(model, metric=pb.metrics.Euclidean())
    (model(x) - y).square().mean().backward()
    opt.step()
    inner = [r for r in opt.coverage() if r.name.startswith("layer.")]
    assert {r.block for r in inner} == {"diagonal"}
    assert model.layer.dropout == 0.2


@pytest.mark.parametrize("name", MODELS)
def test_training_is_not_disturbed(name: str) -> None:
    """The same masks, random numbers and gradients as without the optimizer."""
    torch.manual_seed(0)
    model, (x, y) = MODELS[name](0.4).double(), data()
    other = copy.deepcopy(model)
    opt = kfac(model, metric=pb.metrics.Euclidean(), lr=0.0)
    found = []
    for one in (model, other):
        torch.manual_seed(3)
        (one(x) - y).square().mean().backward()
        if one is model:
            opt.step()
        found.append(([p.grad for p in one.parameters()], torch.rand(3)))
    assert torch.equal(found[0][1], found[1][1])
    for got, want in zip(found[0][0], found[1][0], strict=True):
        assert got is not None
        assert_close(got, want, 1e-14, "the gradient")


def runs_in_half(model: nn.Module, x: Tensor) -> bool:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = MODELS[name](0.4), data()
    if not runs_in_half(model, x.float()):
        pytest.skip("torch has no such layer in bfloat16 on this machine")
    opt = kfac(model, metric=pb.metrics.Euclidean())
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x.float()) - y).square().mean()
    loss.backward()
    opt.step()
    assert all(r.block.startswith("kronecker") for r in opt.coverage())
