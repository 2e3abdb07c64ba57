"""The Gram of rows by contraction of one side first, against the rows themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pullback.maps.layers import AffineBlock
from pullback.maps.layers import gram as module
from pullback.maps.layers.gram import Route
from pullback.testing import assert_close
from tests.maps.layers.grams import gram
from tests.pairs import all_pairs


def block(n: int, seed: int, *, bias: bool = True, height: Tensor | None = None) -> AffineBlock:
    generator = torch.Generator().manual_seed(seed)
    r = 3
    g = 2
    t = 4
    i = 5
    o = 6
    x = torch.randn(n, g, t, i, generator=generator, dtype=torch.float64)
    delta = torch.randn(n, r, g, t, o, generator=generator, dtype=torch.float64)
    name = "b" if bias else None
    return AffineBlock("w", name, x, delta, height)


@pytest.mark.parametrize(
    ("bias", "jet", "cache"), all_pairs([True, False], [True, False], [1, 400, 2**20])
)
def test_it_is_the_gram_of_rows(
    bias: bool, jet: bool, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CACHE", replace(module._CACHE, contracted=cache))
    monkeypatch.setattr(AffineBlock, "_choose_route", lambda self, other: Route.CONTRACTED)
    if jet:
        height = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    else:
        height = None
    a = block(5, 0, bias=bias, height=height)
    b = block(4, 1, bias=bias, height=height)
    rows = [torch.cat(list(x.rows().values()), -1).flatten(0, 1) for x in (a, b)]
    assert_close(gram(a, b), rows[0] @ rows[1].T, 1e-13, "two blocks")
    actual = gram(a, a)
    assert_close(actual, rows[0] @ rows[0].T, 1e-13, "one block")
    assert torch.equal(actual, actual.T)


def test_few_places_and_many_covectors_choose_it() -> None:
    x = torch.zeros(64, 1, 16, 256)
    delta = torch.randn(64, 10, 1, 16, 256)
    chosen = AffineBlock("w", None, x, delta)
    assert chosen.route == "contracted"
    assert torch.equal(gram(chosen, chosen), torch.zeros(640, 640))


@pytest.mark.parametrize("bias", [True, False])
def test_a_trace_over_covectors(bias: bool) -> None:
    a = block(5, 0, bias=bias)
    b = block(4, 1, bias=bias)
    whole = gram(a, b).view(5, 3, 4, 3)
    want = torch.einsum("iaja->ij", whole)
    assert_close(gram(a.trace_covectors(), b.trace_covectors()), want, 1e-13, "Σ_r")
