"""Places that share one cotangent are one place, whose input is their sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pullback.kernels import Tangent, ntk
from pullback.maps import identity_covectors
from pullback.maps.layers import AffineBlock
from pullback.maps.layers.gram import Route
from pullback.testing import assert_close
from tests.maps.layers.grams import gram
from tests.pairs import all_pairs


def block(n: int, seed: int, *, pooled: bool, height: Tensor | None = None) -> AffineBlock:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 5, 3, generator=generator, dtype=torch.float64)
    delta = torch.randn(n, 2, 2, 5, 4, generator=generator, dtype=torch.float64)
    if pooled:
        delta = delta[:, :, :, :1].expand(delta.shape).contiguous()
    return AffineBlock("w", "b", x, delta, height)


@pytest.mark.parametrize(
    ("jet", "route", "other"),
    all_pairs([True, False], ["hadamard", "materialized", "contracted"], [True, False]),
)
def test_it_is_the_gram_of_rows(
    jet: bool, route: str, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against itself, and against a block whose places are pooled too or are not."""
    monkeypatch.setattr(AffineBlock, "_choose_route", lambda self, other: Route(route))
    if jet:
        height = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0], dtype=torch.float64)
    else:
        height = None
    a = block(4, 0, pooled=True, height=height)
    b = block(3, 1, pooled=other, height=height)
    rows = [torch.cat(list(x.rows().values()), -1).flatten(0, 1) for x in (a, b)]
    assert_close(gram(a, b), rows[0] @ rows[1].T, 1e-13, "two blocks")
    assert_close(gram(b, a), rows[1] @ rows[0].T, 1e-13, "the other way")
    assert_close(gram(a, a), rows[0] @ rows[0].T, 1e-13, "one block")
    assert_close(gram(a.narrow(1, 3), b), rows[0][2:6] @ rows[1].T, 1e-13, "a part")
    traced = torch.einsum("irp,jrp->ij", rows[0].view(4, 2, -1), rows[1].view(3, 2, -1))
    assert_close(gram(a.trace_covectors(), b.trace_covectors()), traced, 1e-13, "trace")


class Mean(nn.Module):
    """A mean over tokens; the last layer before it sees one cotangent."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 4)
        self.two = nn.Linear(4, 16)
        self.read = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.read((x + self.two(torch.tanh(self.one(x)))).mean(1))


def test_a_mean_over_places_is_seen() -> None:
    torch.manual_seed(0)
    model = Mean().double()
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    linear = Tangent(model).at(x)
    pulled = linear.pullback(identity_covectors(linear.value))
    assert {c.name: c.route for c in pulled.coverage}["two.weight"] == "hadamard"
    rows = linear.rows()
    assert_close(ntk(model, x).transpose(1, 2).reshape(30, 30), rows @ rows.T, 1e-13, "kernel")
