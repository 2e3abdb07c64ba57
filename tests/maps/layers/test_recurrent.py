"""Recurrent layers, replayed: every option against the fused kernels."""

from __future__ import annotations

from itertools import chain, product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pullback.maps.layers import Compound, find_layer
from tests.maps.layers.replays import check
from tests.pairs import each_once

KINDS = {
    "tanh": lambda *a, **k: nn.RNN(*a, **k),
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "GRU": lambda *a, **k: nn.GRU(*a, **k),
    "LSTM": lambda *a, **k: nn.LSTM(*a, **k),
    "LSTM projected": lambda *a, **k: nn.LSTM(*a, proj_size=2, **k),
}
CELLS = {
    "tanh": nn.RNNCell,
    "relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
    "GRU": nn.GRUCell,
    "LSTM": nn.LSTMCell,
}
SHAPES = ("padded", "batch first", "unbatched", "packed", "packed, unsorted")


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def sequences(shape: str) -> Tensor | PackedSequence:
    """Inputs of 3 features; four samples, up to five times."""
    if shape.startswith("packed"):
        if shape == "packed":
            lengths = (5, 3, 3, 1)
        else:
            lengths = (3, 1, 5, 3)
        return pack_sequence([draw(t, 3) for t in lengths], enforce_sorted=shape == "packed")
    return {"padded": draw(5, 4, 3), "batch first": draw(4, 5, 3), "unbatched": draw(5, 3)}[shape]


def state(module: nn.RNNBase, shape: str) -> Tensor | tuple[Tensor, Tensor]:
    lead = [module.num_layers * (1 + module.bidirectional)]
    lead += [] if shape == "unbatched" else [4]
    h = draw(*lead, module.proj_size or module.hidden_size)
    if isinstance(module, nn.LSTM):
        return (h, draw(*lead, module.hidden_size))
    return h


@pytest.mark.parametrize(("cell_name", "shape"), each_once(KINDS, SHAPES))
def test_layers(cell_name: str, shape: str) -> None:
    torch.manual_seed(0)
    for layers, is_bidirectional, bias in product((1, 2), (False, True), (False, True)):
        module = KINDS[cell_name](
            3,
            4,
            num_layers=layers,
            bidirectional=is_bidirectional,
            bias=bias,
            batch_first=shape == "batch first",
        ).double()
        taps = check(module, sequences(shape))
        per = 3 if cell_name == "LSTM projected" else 2
        assert len(taps) == layers * (1 + is_bidirectional) * per
        assert {t.positions for t in taps} == {
            ({"unbatched": (5,)} | dict.fromkeys(SHAPES[3:], (12,))).get(shape, (20,))
        }
        check(module, sequences(shape), state(module, shape))
        check(module, hx=state(module, shape), input=sequences(shape))


@pytest.mark.parametrize("cell_name", CELLS)
def test_cells(cell_name: str) -> None:
    torch.manual_seed(0)
    for bias, lead in product((False, True), ((4,), ())):
        module = CELLS[cell_name](3, 5, bias=bias).double()
        h = draw(*lead, 5)
        check(module, draw(*lead, 3))
        check(module, draw(*lead, 3), (h, draw(*lead, 5)) if cell_name == "LSTM" else h)


def test_the_gru_gates_part_at_n_only() -> None:
    """δ of u and v agree at r and z; at n, v's is r times u's."""
    torch.manual_seed(0)
    module = nn.GRUCell(3, 2).double()
    compound = find_layer(module, Compound)
    assert compound is not None
    outputs, (ih, hh) = compound.replay(module, (draw(4, 3), draw(4, 2)), {})
    u, v = torch.autograd.grad(outputs, [*ih.outputs, *hh.outputs], [draw(4, 2)])
    assert torch.allclose(u[..., :4], v[..., :4], rtol=1e-14)
    r = torch.sigmoid((ih.outputs[0] + hh.outputs[0])[..., :2])
    assert torch.allclose(v[..., 4:], r * u[..., 4:], rtol=1e-14)


def test_several_covectors_from_one_replay() -> None:
    torch.manual_seed(0)
    module = nn.LSTM(3, 4, num_layers=2).double()
    compound = find_layer(module, Compound)
    assert compound is not None
    outputs, taps = compound.replay(module, (draw(5, 2, 3),), {})
    tap_outputs = list(chain.from_iterable(tap.outputs for tap in taps))
    one = draw(*outputs[0].shape)
    two = draw(*outputs[0].shape)
    # the last states were not used by the loss: their outputs are left out

    def pull(c: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(outputs[:1], tap_outputs, [c], retain_graph=True))

    for a, b, c in zip(pull(one), pull(two), pull(one + two), strict=True):
        assert torch.allclose(a + b, c, atol=1e-13)


def test_dropout_between_layers_is_named() -> None:
    module = nn.GRU(3, 4, num_layers=2, dropout=0.5)
    compound = find_layer(module, Compound)
    assert compound is not None
    assert compound.describe_omission(module) == "dropout between layers"
    assert compound.describe_omission(module.eval()) == ""
    assert compound.describe_omission(nn.GRU(3, 4, num_layers=2)) == ""
    assert compound.describe_omission(nn.GRUCell(3, 4)) == ""
    check(module.double(), draw(5, 4, 3))
