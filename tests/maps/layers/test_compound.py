"""The registry of compound layers, and what a replay leaves untouched."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pullback.maps.layers import REGISTRY, Compound, find_layer

MODULES = {
    nn.RNN: lambda: nn.RNN(3, 4),
    nn.GRU: lambda: nn.GRU(3, 4),
    nn.LSTM: lambda: nn.LSTM(3, 4),
    nn.RNNCell: lambda: nn.RNNCell(3, 4),
    nn.GRUCell: lambda: nn.GRUCell(3, 4),
    nn.LSTMCell: lambda: nn.LSTMCell(3, 4),
    nn.MultiheadAttention: lambda: nn.MultiheadAttention(4, 2),
}


def arguments(module: nn.Module) -> tuple[torch.Tensor, ...]:
    if isinstance(module, nn.MultiheadAttention):
        return (torch.randn(5, 2, 4),) * 3
    return (torch.randn(*(() if isinstance(module, nn.RNNCellBase) else (5,)), 2, 3),)


def test_every_compound_is_found_and_is_no_simple_layer() -> None:
    assert {k for k, v in REGISTRY.items() if isinstance(v, Compound)} == set(MODULES)
    for kind, make in MODULES.items():
        module = make()
        assert find_layer(module, Compound) is REGISTRY[kind]
        assert find_layer(module) is None
    assert find_layer(nn.Linear(2, 3), Compound) is None


def test_a_subclass_with_its_own_forward_is_not_trusted() -> None:
    class Doubled(nn.GRUCell):
        def forward(self, input, hx=None):
            return 2 * super().forward(input, hx)

    class Plain(nn.GRUCell):
        """Keeps forward."""

    assert find_layer(Doubled(3, 4), Compound) is None
    assert find_layer(Plain(3, 4), Compound) is REGISTRY[nn.GRUCell]


@pytest.mark.parametrize("kind", MODULES, ids=lambda k: k.__name__)
def test_half_precision_is_replayed_in_float32(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    args = arguments(module)
    compound = REGISTRY[kind]
    want, _ = compound.replay(module, args, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = tuple(a.bfloat16() for a in args)
        outputs, taps = compound.replay(module, half, {})
    for got, exact in zip(outputs, want, strict=True):
        assert got.dtype == torch.float32
        assert torch.allclose(got, exact, atol=0.05)
    assert {t.dtype for tap in taps for t in (*tap.inputs, *tap.outputs)} == {torch.float32}

    module.bfloat16()
    outputs, taps = compound.replay(module, half, {})
    assert {y.dtype for y in outputs} == {torch.float32}
    assert {id(p) for t in taps for p in (t.weight, t.bias) if p is not None} == {
        id(p) for p in module.parameters()
    }


@pytest.mark.parametrize("kind", MODULES, ids=lambda k: k.__name__)
def test_no_gradient_leaves_the_replay(kind: type[nn.Module]) -> None:
    """Backward through it touches neither parameters nor the layer's arguments."""
    torch.manual_seed(0)
    module = MODULES[kind]()
    args = tuple(a.requires_grad_() for a in arguments(module))
    outputs, _ = REGISTRY[kind].replay(module, args, {})
    torch.stack([y.sum() for y in outputs]).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    assert all(a.grad is None for a in args)


DROPPING = (nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention)


@pytest.mark.parametrize("kind", DROPPING, ids=lambda k: k.__name__)
def test_a_layer_alone_has_no_dropout(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    if kind is nn.MultiheadAttention:
        sizes = (4, 2)
    else:
        sizes = (3, 4, 2)
    module = kind(*sizes, dropout=0.5).double()
    args = tuple(a.double().requires_grad_() for a in arguments(module))
    compound = REGISTRY[kind]
    before = torch.get_rng_state()
    alone = compound.run_without_dropout(module, args, {})
    replayed, _ = compound.replay(module, args, {})
    assert torch.equal(before, torch.get_rng_state())
    assert module.dropout == 0.5
    assert module.training
    want = compound.select_outputs(module.eval(), module(*args))
    for got, again, y in zip(alone, replayed, want, strict=True):
        assert torch.allclose(got, y, atol=1e-14)
        assert torch.allclose(again, y, atol=1e-14)
    torch.autograd.grad(alone[0].sum(), list(module.parameters()))  # reaches its parameters
    assert all(a.grad is None for a in args)
    with pytest.raises((RuntimeError, AttributeError, TypeError)):
        compound.run_without_dropout(module, (None,) * len(args), {})
    assert module.dropout == 0.5


def test_a_parametrized_weight_is_no_parameter() -> None:
    """The values are right; the tensor is the parametrization's result, and no one's parameter."""

    class Twice(nn.Module):
        def forward(self, w):
            return 2 * w

    torch.manual_seed(0)
    module = nn.GRUCell(3, 4)
    parametrize.register_parametrization(module, "weight_hh", Twice())
    x = torch.randn(2, 3)
    h = torch.randn(2, 4)
    compound = REGISTRY[nn.GRUCell]
    (y,), taps = compound.replay(module, (x, h), {})
    assert torch.allclose(y, module(x, h), atol=1e-6)
    ids = {id(p) for p in module.parameters()}
    assert [id(t.weight) in ids for t in taps] == [True, False]
