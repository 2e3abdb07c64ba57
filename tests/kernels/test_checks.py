"""What is refused, and what a second call may rely on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pullback._core.errors import PullbackError
from pullback.kernels import Tangent, ntk
from pullback.kernels.tiles import MEMORY, choose_memory
from pullback.testing import assert_close
from tests.kernels.nets import blocks, build, dense, draw, inputs


class Gated(nn.Module):
    """Samples meet where the gate is open: x ↦ W x + gate·mean(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.gate * x.mean(0)


class Weighted(nn.Module):
    """A weighted mean over places: with equal weights all of them have one cotangent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 5)
        self.read = nn.Linear(5, 2)
        self.w = torch.ones(6, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(torch.tanh(self.first(x)))
        return self.read((h * self.w).mean(1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_parameters_are_named_as_the_cause(value: float) -> None:
    model = build("mlp")
    x = inputs("mlp", 5)
    ntk(model, x)
    next(model.parameters()).data.view(-1)[0] = value
    with pytest.raises(PullbackError, match="The parameters are not finite"):
        ntk(model, x)
    with pytest.raises(PullbackError, match="The parameters are not finite"):
        Tangent(model)


def test_a_norm_that_overflows_is_no_infinity() -> None:
    model = nn.Linear(2, 1)
    x = torch.full((3, 2), 1e30)
    with torch.no_grad():
        model.weight.fill_(1e-30)
    k = ntk(model, torch.cat([x, 1e-30 * x]))
    assert k.shape == (6, 6, 1, 1)


def test_a_model_that_begins_to_couple_is_refused() -> None:
    model = Gated().double()
    x = draw(9, 3)
    for _ in range(2):
        assert ntk(model, x).shape == (9, 9, 3, 3)
    model.gate = 0.1
    for chunk in (None, 1, 3):
        with pytest.raises(PullbackError, match="couples the samples"):
            ntk(model, x, chunk=chunk)


@pytest.mark.parametrize("net", ["mlp", "attention", "embedding", "tied"])
def test_a_second_call_is_the_first(net: str) -> None:
    model = build(net)
    x = inputs(net, 5)
    first = ntk(model, x)
    assert torch.equal(ntk(model, x), first)


@pytest.mark.parametrize("equal_first", [True, False])
def test_what_was_seen_of_cotangents_is_proved_anew(equal_first: bool) -> None:
    model = Weighted().double()
    x = draw(4, 6, 3)
    weights = [model.w, torch.arange(6, dtype=torch.float64)[:, None]]
    for w in weights if equal_first else reversed(weights):
        model.w = w
        j = dense(model, x)
        for _ in range(2):
            assert_close(ntk(model, x), blocks(j @ j.T, 4, 4), 1e-12, "Θ")
            trace = blocks(j @ j.T, 4, 4).diagonal(dim1=2, dim2=3).sum(-1)
            assert_close(ntk(model, x, layout="trace"), trace, 1e-12, "tr Θ")


def test_memory_is_fixed_where_nothing_can_be_asked() -> None:
    assert choose_memory(torch.device("cpu"), 2**50) == MEMORY


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_gpu_follows_the_jacobian() -> None:
    device = torch.device("cuda")
    assert choose_memory(device, 2**20) == MEMORY
    free = torch.cuda.mem_get_info(device)[1]
    assert MEMORY <= choose_memory(device, 2**50) <= max(MEMORY, free // 4)
    assert choose_memory(device, 4 * MEMORY + 4) <= MEMORY + 1
