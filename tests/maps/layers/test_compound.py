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
    for module_class, make in MODULES.items():
        module = make()
        assert find_layer(module, Compound) is REGISTRY[module_class]
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


@pytest.mark.parametrize("module_class", MODULES, ids=lambda k: k.__name__)
def test_half_precision_is_replayed_in_float32(module_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = MODULES[module_class]()
    args = arguments(module)
    compound = REGISTRY[module_class]
    want, _ = compound.replay(module, args, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = tuple(a.bfloat16() for a in args)
        outputs, taps = compound.replay(module, half, {})
    for actual, exact in zip(outputs, want, strict=True):
        assert actual.dtype == torch.float32
        assert torch.allclose(actual, exact, atol=0.05)
    for tap in taps:
        assert all(t.dtype == torch.float32 for t in (*tap.inputs, *tap.outputs))

    module.bfloat16()
    outputs, taps = compound.replay(module, half, {})
    assert {y.dtype for y in outputs} == {torch.float32}
    assert {id(p) for t in taps for p in (t.weight, t.bias) if p is not None} == {
        id(p) for p in module.parameters()
    }


@pytest.mark.parametrize("module_class", MODULES, ids=lambda k: k.__name__)
def test_no_gradient_leaves_the_replay(module_class: type[nn.Module]) -> None:
    """Backward through it touches neither parameters nor the layer's arguments."""
    torch.manual_seed(0)
    module = MODULES[module_class]()
    args = tuple(a.requires_grad_() for a in arguments(module))
    outputs, _ = REGISTRY[module_class].replay(module, args, {})
    torch.stack([y.sum() for y in outputs]).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    assert all(a.grad is None for a in args)


DROPPING = (nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention)


@pytest.mark.parametrize("module_class", DROPPING, ids=lambda k: k.__name__)
def test_a_layer_alone_has_no_dropout(module_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    if module_class is nn.MultiheadAttention:
        sizes = (4, 2)
    else:
        sizes = (3, 4, 2)
    module = module_class(*sizes, dropout=0.5).double()
    args = tuple(a.double().requires_grad_() for a in arguments(module))
    compound = REGISTRY[module_class]
    before = torch.get_rng_state()
    separate = compound.run_without_dropout(module, args, {})
    replayed, _ = compound.replay(module, args, {})
    assert torch.equal(before, torch.get_rng_state())
    assert module.dropout == 0.5
    assert module.training
    want = compound.select_outputs(module.eval(), module(*args))
    for actual, replay, y in zip(separate, replayed, want, strict=True):
        assert torch.allclose(actual, y, atol=1e-14)
        assert torch.allclose(replay, y, atol=1e-14)
    torch.autograd.grad(separate[0].sum(), list(module.parameters()))  # reaches its parameters
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
