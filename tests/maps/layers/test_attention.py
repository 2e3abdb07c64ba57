"""Attention, replayed: every option against the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback.maps.layers import Compound, find_layer
from tests.maps.layers.replays import check
from tests.pairs import all_pairs, each_once

B = 3
L = 4
S = 5
E = 6
H = 2


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 4},
    "kdim and vdim, no bias": {"kdim": 4, "vdim": 7, "bias": False},
    "vdim, learned place": {"vdim": 7, "add_bias_kv": True},
    "learned place": {"add_bias_kv": True},
    "zero place": {"add_zero_attn": True},
    "both places": {"add_bias_kv": True, "add_zero_attn": True},
}


def boolean(*shape: int) -> Tensor:
    """Some places hidden, never the first: a row of −∞ has no softmax."""
    mask = torch.rand(*shape) < 0.4
    mask[..., 0] = False
    return mask


MASKS = {
    "none": lambda: {},
    "padding": lambda: {"key_padding_mask": boolean(B, S)},
    "padding, float": lambda: {"key_padding_mask": draw(B, S)},
    "mask": lambda: {"attn_mask": boolean(L, S)},
    "mask per head": lambda: {"attn_mask": boolean(B * H, L, S)},
    "mask, float": lambda: {"attn_mask": draw(L, S)},
    "both": lambda: {"attn_mask": boolean(B * H, L, S), "key_padding_mask": boolean(B, S)},
    "both, float": lambda: {"attn_mask": draw(L, S), "key_padding_mask": draw(B, S)},
    "causal": lambda: {"attn_mask": ~torch.ones(L, S).tril().bool(), "is_causal": True},
    # without weights, the module trusts the hint and does not look at the mask
    "causal, it says": lambda: {"attn_mask": boolean(L, S), "is_causal": True},
    "causal and padding": lambda: {
        "attn_mask": ~torch.ones(L, S).tril().bool(),
        "is_causal": True,
        "key_padding_mask": boolean(B, S),
    },
}
RESULTS = {
    "output": {"need_weights": False},
    "mean weights": {},
    "weights per head": {"average_attn_weights": False},
}


@pytest.mark.parametrize(("option", "mask", "result"), all_pairs(OPTIONS, MASKS, RESULTS))
def test_cross_attention(option: str, mask: str, result: str) -> None:
    torch.manual_seed(0)
    for first in (False, True):
        module = nn.MultiheadAttention(E, H, batch_first=first, **OPTIONS[option]).double()
        q = draw(B, L, E)
        k = draw(B, S, module.kdim)
        v = draw(B, S, module.vdim)
        if not first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        taps = check(module, q, k, v, **MASKS[mask](), **RESULTS[result])
        packed = [t for t in taps if len(t.positions) == 3]
        assert all(t.positions == (B * L, B * S, B * S) for t in packed)


@pytest.mark.parametrize(("option", "result"), each_once(OPTIONS, RESULTS))
def test_unbatched(option: str, result: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, **OPTIONS[option]).double()
    sides = draw(L, E), draw(S, module.kdim), draw(S, module.vdim)
    check(module, *sides, **RESULTS[result])
    check(module, *sides, key_padding_mask=boolean(S), **RESULTS[result])
    check(module, *sides, boolean(S), result != "output", boolean(H, L, S))


@pytest.mark.parametrize("first", [False, True])
def test_self_attention_holds_its_input_once(first: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=first).double()
    x = draw(B, L, E).requires_grad_()
    (a,) = check(module, x, x, x)[0].inputs
    assert a.untyped_storage().nbytes() == 8 * x.numel()


def test_a_row_without_any_key_gives_zero_without_weights() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, batch_first=True).double()
    x = draw(B, L, E)
    mask = torch.zeros(L, L, dtype=torch.bool)
    mask[1] = True
    check(module, x, x, x, attn_mask=mask, need_weights=False)


def test_dropout_of_weights_is_named() -> None:
    module = nn.MultiheadAttention(E, H, dropout=0.3)
    compound = find_layer(module, Compound)
    assert compound is not None
    assert compound.describe_omission(module) == "dropout of attention weights"
    assert compound.describe_omission(module.eval()) == ""
    check(module.double(), *(draw(L, B, E),) * 3)
