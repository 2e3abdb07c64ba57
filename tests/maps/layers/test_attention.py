"""Attention, replayed: every option against the module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback.maps.layers import Compound, find_layer
from tests.maps.layers.replays import check
from tests.pairs import all_pairs, each_once


@dataclass(frozen=True)
class Sizes:
    """How large the tensors of this file are."""

    batch: int = 3
    queries: int = 4
    keys: int = 5
    width: int = 6
    heads: int = 2


SIZES = Sizes()


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
    "padding": lambda: {"key_padding_mask": boolean(SIZES.batch, SIZES.keys)},
    "padding, float": lambda: {"key_padding_mask": draw(SIZES.batch, SIZES.keys)},
    "mask": lambda: {"attn_mask": boolean(SIZES.queries, SIZES.keys)},
    "mask per head": lambda: {
        "attn_mask": boolean(SIZES.batch * SIZES.heads, SIZES.queries, SIZES.keys)
    },
    "mask, float": lambda: {"attn_mask": draw(SIZES.queries, SIZES.keys)},
    "both": lambda: {
        "attn_mask": boolean(SIZES.batch * SIZES.heads, SIZES.queries, SIZES.keys),
        "key_padding_mask": boolean(SIZES.batch, SIZES.keys),
    },
    "both, float": lambda: {
        "attn_mask": draw(SIZES.queries, SIZES.keys),
        "key_padding_mask": draw(SIZES.batch, SIZES.keys),
    },
    "causal": lambda: {
        "attn_mask": ~torch.ones(SIZES.queries, SIZES.keys).tril().bool(),
        "is_causal": True,
    },
    # without weights, the module trusts the hint and does not look at the mask
    "causal, it says": lambda: {"attn_mask": boolean(SIZES.queries, SIZES.keys), "is_causal": True},
    "causal and padding": lambda: {
        "attn_mask": ~torch.ones(SIZES.queries, SIZES.keys).tril().bool(),
        "is_causal": True,
        "key_padding_mask": boolean(SIZES.batch, SIZES.keys),
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
        module = nn.MultiheadAttention(
            SIZES.width, SIZES.heads, batch_first=first, **OPTIONS[option]
        ).double()
        q = draw(SIZES.batch, SIZES.queries, SIZES.width)
        k = draw(SIZES.batch, SIZES.keys, module.kdim)
        v = draw(SIZES.batch, SIZES.keys, module.vdim)
        if not first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        taps = check(module, q, k, v, **MASKS[mask](), **RESULTS[result])
        packed = [t for t in taps if len(t.positions) == 3]
        assert all(
            t.positions
            == (SIZES.batch * SIZES.queries, SIZES.batch * SIZES.keys, SIZES.batch * SIZES.keys)
            for t in packed
        )


@pytest.mark.parametrize(("option", "result"), each_once(OPTIONS, RESULTS))
def test_unbatched(option: str, result: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(SIZES.width, SIZES.heads, **OPTIONS[option]).double()
    sides = (
        draw(SIZES.queries, SIZES.width),
        draw(SIZES.keys, module.kdim),
        draw(SIZES.keys, module.vdim),
    )
    check(module, *sides, **RESULTS[result])
    check(module, *sides, key_padding_mask=boolean(SIZES.keys), **RESULTS[result])
    check(
        module,
        *sides,
        boolean(SIZES.keys),
        result != "output",
        boolean(SIZES.heads, SIZES.queries, SIZES.keys),
    )


@pytest.mark.parametrize("first", [False, True])
def test_self_attention_holds_its_input_once(first: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(SIZES.width, SIZES.heads, batch_first=first).double()
    x = draw(SIZES.batch, SIZES.queries, SIZES.width).requires_grad_()
    (a,) = check(module, x, x, x)[0].inputs
    assert a.untyped_storage().nbytes() == 8 * x.numel()


def test_a_row_without_any_key_gives_zero_without_weights() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(SIZES.width, SIZES.heads, batch_first=True).double()
    x = draw(SIZES.batch, SIZES.queries, SIZES.width)
    mask = torch.zeros(SIZES.queries, SIZES.queries, dtype=torch.bool)
    mask[1] = True
    check(module, x, x, x, attn_mask=mask, need_weights=False)


def test_dropout_of_weights_is_named() -> None:
    module = nn.MultiheadAttention(SIZES.width, SIZES.heads, dropout=0.3)
    compound = find_layer(module, Compound)
    assert compound is not None
    assert compound.describe_omission(module) == "dropout of attention weights"
    assert compound.describe_omission(module.eval()) == ""
    check(module.double(), *(draw(SIZES.queries, SIZES.batch, SIZES.width),) * 3)
