"""Sequences filled up by positions that the loss ignores: inside attention and recurrences too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.testing import assert_close

from .common import kfac

V, E = 5, 4


class Net(nn.Module):
    """Causal: what comes after a position does not touch it."""

    def __init__(self, kind: str, first: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.first = nn.Embedding(V, E), nn.Linear(E, V), first
        self.kind = kind
        if kind == "attention":
            self.layer = nn.MultiheadAttention(E, 2, batch_first=first)
        elif kind == "sizes of its own":
            self.layer = nn.MultiheadAttention(E, 2, batch_first=first, kdim=3)
        else:
            self.layer = getattr(nn, kind)(E, E, 2, batch_first=first)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        h = h if self.first else h.transpose(0, 1)
        if isinstance(self.layer, nn.MultiheadAttention):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            k = h if self.kind == "attention" else h[..., :3]
            h, _ = self.layer(h, k, h, attn_mask=mask, need_weights=False)
        else:
            h = self.layer(h)[0]
        return self.head(h if self.first else h.transpose(0, 1))


def factors(kind: str, first: bool, x: Tensor, y: Tensor, **options: Any) -> dict[Any, Any]:
    torch.manual_seed(3)
    model = Net(kind, first).double()
    with kfac(model, lr=0.0, **{"fisher": "exact"} | options) as opt:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        opt.step()
        assert not [r for r in opt.coverage() if r.block == "diagonal"]
        return {k.names: opt.curvature.block(k) for k in opt.curvature.averages}


@pytest.mark.parametrize("kind", ["attention", "sizes of its own", "LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("first", [False, True])
def test_padding_changes_nothing(kind: str, first: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, V, (3, 4)), torch.randint(0, V, (3, 4))
    more = torch.zeros(3, 5, dtype=torch.long)
    padded = torch.cat([x, more], 1), torch.cat([y, more - 100], 1)
    want, found = factors(kind, first, x, y), factors(kind, first, *padded)
    assert found.keys() == want.keys()
    for names, block in want.items():
        assert_close(found[names].left, block.left, 1e-13, f"R of {names}")
        assert_close(found[names].right, block.right, 1e-13, f"C of {names}")


@pytest.mark.parametrize("kind", ["attention", "LSTM"])
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_positions_that_others_read_count(kind: str, fisher: str) -> None:
    """An ignored prompt is read by what follows: its keys, values and states have cotangents."""
    torch.manual_seed(0)
    x, y = torch.randint(0, V, (3, 4)), torch.randint(0, V, (3, 4))
    y[:, :2] = -100
    found = factors(kind, True, x, y, fisher=fisher)
    torch.manual_seed(3)
    model = Net(kind, True).double()
    h = model.embedding(x).detach().flatten(0, 1)
    every = h.T @ h / len(h)
    if kind == "LSTM":
        got = found["layer.weight_ih_l0", "layer.bias_ih_l0"].right[0]
        assert_close(got[:-1, :-1], every, 1e-13, "all inputs")
        return
    q, k, v = found["layer.in_proj_weight", "layer.in_proj_bias"].right[:, :-1, :-1]
    late = h.unflatten(0, (3, 4))[:, 2:].flatten(0, 1)
    assert_close(q, late.T @ late / len(late), 1e-13, "the queries that count")
    assert_close(k, every, 1e-13, "all keys")
    assert_close(v, every, 1e-13, "all values")


def test_a_batch_that_is_all_padding_of_a_table() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(3, 2, padding_idx=0), nn.Linear(2, 2))
    opt = pb.KFAC(net, 0.1, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
    for index in (torch.zeros(2, 4, dtype=torch.long), torch.randint(0, 3, (2, 4))):
        opt.zero_grad()
        F.cross_entropy(net(index).flatten(0, 1), torch.zeros(8, dtype=torch.long)).backward()
        opt.step()
        assert opt.info.taken
        assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_long_patches_of_samples_that_are_ignored() -> None:
    """A side above `max_factor` is a diagonal, of the samples that count."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)).double()
    x, y = torch.randn(6, 3, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 2, -100, 1, 2])
    found = []
    for longest, some in ((8192, slice(None)), (9, slice(None)), (9, y >= 0)):
        opt = pb.KFAC(
            net, 0.0, likelihood=pb.likelihoods.Categorical(), fisher="exact", max_factor=longest
        )
        F.cross_entropy(net(x[some]), y[some]).backward()
        opt.step()
        found.append(next(iter(opt.curvature.averages.values())).corrected()["Conv.last.inputs"])
        opt.close()
    torch.testing.assert_close(found[1][0], found[0][0].diagonal(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[1], found[2], rtol=1e-10, atol=1e-12)
