"""The Gram of rows where covectors and places separate, against the rows themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pullback.kernels import ntk
from pullback.maps.layers import AffineBlock
from pullback.maps.layers import gram as module
from pullback.maps.layers.gram import Route, SeparatedCotangents
from pullback.testing import assert_close
from tests.maps.layers.grams import gram
from tests.pairs import all_pairs, each_once


def block(
    n: int, seed: int, *, bias: bool = True, height: Tensor | None = None, r: int = 3
) -> AffineBlock:
    generator = torch.Generator().manual_seed(seed)
    g = 2
    t = 4
    i = 5
    o = 6

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = draw(n, g, t, i)
    gate = draw(n, 1, g, t, o).relu()
    gate[..., 0] = 0  # a dead unit
    delta = gate * draw(1, r, g, 1, o)
    return AffineBlock("w", "b" if bias else None, x, delta, height)


@pytest.mark.parametrize(
    ("bias", "jet", "cache"), all_pairs([True, False], [True, False], [1, 200, 2**20])
)
def test_it_is_the_gram_of_rows(
    bias: bool, jet: bool, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CACHE", replace(module._CACHE, products=cache))
    monkeypatch.setattr(AffineBlock, "_choose_route", lambda self, other: Route.SEPARATED)
    if jet:
        height = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    else:
        height = None
    a = block(5, 0, bias=bias, height=height)
    b = block(4, 1, bias=bias, height=height, r=2)
    rows = [torch.cat(list(x.rows().values()), -1).flatten(0, 1) for x in (a, b)]
    assert_close(gram(a, b), rows[0] @ rows[1].T, 1e-13, "two blocks")
    actual = gram(a, a)
    assert_close(actual, rows[0] @ rows[0].T, 1e-13, "one block")
    assert torch.equal(actual, actual.T)


def test_what_does_not_separate_is_refused() -> None:
    delta = block(5, 0)._delta[:, :, 0]
    assert SeparatedCotangents.of(delta) is not None
    for entry in ((0, 0, 0, 1), (4, 2, 3, 5)):  # seen by few, and by all of them alone
        changed = delta.clone()
        changed[entry] += 1e-6
        assert SeparatedCotangents.of(changed) is None
    assert SeparatedCotangents.of(torch.zeros(3, 2, 2, 4)) is not None
    assert SeparatedCotangents.of(torch.full((3, 2, 2, 4), torch.nan)) is None


class Pooling(nn.Module):
    """A read-out of the mean over places of an activation."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 24)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))).mean(1))


@pytest.mark.parametrize(
    ("layout", "linear"), each_once(["full", "trace", "diagonal"], [True, False])
)
def test_networks_that_read_out_a_mean(layout: str, linear: bool) -> None:
    torch.manual_seed(0)
    if linear:
        last = nn.Linear(24, 10)
    else:
        last = nn.Sequential(nn.Tanh(), nn.Linear(24, 10))
    model = Pooling(last).double()
    x = torch.randn(40, 16, 6, dtype=torch.float64)
    params = list(model.parameters())
    z = model(x)
    eye = torch.eye(z.numel(), dtype=z.dtype)
    gradients = torch.autograd.grad(z.flatten(), params, eye, is_grads_batched=True)
    rows = torch.cat([g.flatten(1) for g in gradients], 1)
    want = (rows @ rows.T).view(40, 10, 40, 10).transpose(1, 2)
    if layout != "full":
        want = want.diagonal(dim1=2, dim2=3)
        if layout == "trace":
            want = want.sum(-1)
    assert_close(ntk(model, x, layout=layout), want, 1e-12, layout)
