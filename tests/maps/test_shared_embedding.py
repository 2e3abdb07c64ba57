"""Positions that are looked up once for all samples have gradients by sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from pullback.maps import Call, ModuleMap
from pullback.testing import assert_close, jacobian


@dataclass(frozen=True)
class Sizes:
    """How large the tensors of this file are."""

    samples: int = 3
    length: int = 4
    width: int = 5


SIZES = Sizes()


class Reader(nn.Module):
    """Embedded tokens joined with embedded positions by a function: (N, T) to (N, T, 2)."""

    def __init__(self, positions: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, SIZES.width)
        self.positions = nn.Embedding(SIZES.length, SIZES.width)
        self.head = nn.Linear(SIZES.width, 2)
        self.join = join
        self.register_buffer("indices", positions)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.join(self.tokens(tokens), self.positions(self.indices))))


def add_in_place(tokens: Tensor, positions: Tensor) -> Tensor:
    hidden = tokens * 1.5
    hidden += positions
    return hidden


LINE = torch.arange(SIZES.length)
ADDED = {
    "indices (T,)": (LINE, torch.add),
    "indices (1, T)": (LINE[None], torch.add),
    "in place": (LINE[None], add_in_place),
    "indices (N, T)": (LINE.expand(SIZES.samples, SIZES.length), torch.add),
}
#: uses for which a repeated output would be another function, or an error
OTHERS = {
    "added up": (LINE[None], lambda tokens, positions: tokens * positions.sum()),
    "reshaped": (
        LINE[None],
        lambda tokens, positions: tokens + positions.view(SIZES.length, SIZES.width),
    ),
    "multiplied": (LINE, lambda tokens, positions: tokens * positions),
    "detached sum": (LINE[None], lambda t, positions: t + positions + positions.detach().sum()),
}


def check_rows(model: Reader) -> dict[str, str]:
    """Compare the rows of random covectors with autograd's; return the reasons by parameter."""
    model = model.double()
    tokens = torch.randint(0, 7, (SIZES.samples, SIZES.length))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    linear = ModuleMap(model, Call.of(tokens)).linearize(parameters)
    covectors = torch.randn(2, *linear.value.shape, dtype=torch.float64)
    pulled = linear.pullback(covectors)
    full = jacobian(model(tokens), list(model.parameters())).view(
        SIZES.samples, -1, linear.space.size
    )
    expected = torch.einsum("rne,nep->nrp", covectors.flatten(2), full)
    assert_close(linear.value, model(tokens).detach(), 1e-14, "the value")
    assert_close(pulled.rows(), expected.reshape(pulled.rows().shape), 1e-12, "the rows")
    return {row.name: row.reason for row in pulled.coverage}


@pytest.mark.parametrize("name", ADDED)
def test_shared_positions_are_explained_by_their_layer(name: str) -> None:
    torch.manual_seed(0)
    reasons = check_rows(Reader(*ADDED[name]))
    assert set(reasons.values()) == {"known layer"}


@pytest.mark.parametrize("name", OTHERS)
def test_other_uses_of_shared_positions_stay_right(name: str) -> None:
    torch.manual_seed(0)
    reasons = check_rows(Reader(*OTHERS[name]))
    assert reasons["positions.weight"] != "known layer"
    assert reasons["tokens.weight"] == "known layer"
