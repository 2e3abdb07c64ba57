r"""`nn.MultiheadAttention`: the projections inside, and the one after.

    q = W_q x_q + b_q,   k = W_k x_k + b_k,   v = W_v x_v + b_v
    P = softmax(q kᵀ/√d + mask) per head,    y = W_o (P v) + b_o

`in_proj_weight` packs W_q, W_k, W_v by rows: a tap of three groups, where the shorter of source and
target is padded by positions that count nowhere. With `kdim` or `vdim` the weights are separate,
but `in_proj_bias` is still one parameter: a tap of its own, without inputs. So are `bias_k` and
`bias_v`, one extra key and value per sample.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compound import AffineMap, Compound, Tap
from .registry import register


@register(nn.MultiheadAttention)
class Attention(Compound):
    """Results: the output, and the attention weights where they were asked for."""

    use = "attention"

    def select_outputs(self, module: Any, output: Any) -> list[Tensor]:
        return [y for y in output if y is not None]

    def list_affine_maps(self, module: Any) -> list[AffineMap]:
        if module.in_proj_weight is not None:
            projections = [AffineMap(module.in_proj_weight, module.in_proj_bias, 3)]
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            projections = [AffineMap(weight, None, 1) for weight in weights]
            projections.append(AffineMap(None, module.in_proj_bias, 3))
        extra_keys = [AffineMap(None, module.bias_k, 1), AffineMap(None, module.bias_v, 1)]
        output = AffineMap(module.out_proj.weight, module.out_proj.bias, 1)
        return [*projections, *extra_keys, output]

    def describe_omission(self, module: Any) -> str:
        has_dropout = module.training and module.dropout > 0
        if has_dropout:
            return "dropout of attention weights"
        return ""

    def replay_steps(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[list[Tensor], list[Tap]]:
        sources = _arrange_batch_first(module, (query, key, value))
        mask = _combine_masks(module, sources[0], key_padding_mask, attn_mask)
        (q, k, v), taps = _project_sources(module, sources)
        k, v = _append_extra_keys(module, k, v, taps)
        q, k, v = (_split_heads(x, module.num_heads) for x in (q, k, v))

        attention_weights = []
        if need_weights:
            mixed, weights = _attend_with_weights(q, k, v, mask)
            if average_attn_weights:
                weights = weights.mean(1)
            attention_weights.append(weights)
        elif is_causal and key_padding_mask is None:  # the hint replaces the mask it describes
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        mixed = mixed.transpose(1, 2).flatten(2)  # (B, L, E)
        output_map = Tap(module.out_proj.weight, module.out_proj.bias)
        y = output_map(mixed.flatten(0, 1)[None])[0].unflatten(0, mixed.shape[:2])
        taps.append(output_map.finish([(*mixed.shape[:2],)]))
        results = _arrange_results(module, y, attention_weights, is_batched=query.ndim == 3)
        return results, taps


def _arrange_batch_first(module: Any, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return query, key and value as (B, length, ·), from any layout that the module takes."""
    if tensors[0].ndim == 2:
        return [x[None] for x in tensors]
    if module.batch_first:
        return list(tensors)
    return [x.transpose(0, 1) for x in tensors]


def _arrange_results(
    module: Any, y: Tensor, weights: list[Tensor], *, is_batched: bool
) -> list[Tensor]:
    """Return the output y (B, L, E) and the attention weights in the layout of the module."""
    if not is_batched:
        return [result[0] for result in (y, *weights)]
    if module.batch_first:
        return [y, *weights]
    return [y.transpose(0, 1), *weights]


def _attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return P v and P = softmax(q kᵀ/√d + mask), by head."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    return weights @ v, weights


def _project_sources(module: Any, sources: list[Tensor]) -> tuple[list[Tensor], list[Tap]]:
    """Return q, k, v, each (B, length, E), from their sources (B, length, ·), and the taps."""
    grids = [(*x.shape[:2],) for x in sources]
    if module.in_proj_weight is not None:
        packed = Tap(module.in_proj_weight, module.in_proj_bias, groups=3)
        projected = list(packed(_stack_sources(sources)))
        taps = [packed.finish(grids)]
    else:
        projected, taps = _project_separately(module, sources, grids)
    unpadded = []
    for z, (samples, length) in zip(projected, grids, strict=True):
        unpadded.append(z[: samples * length].unflatten(0, (samples, length)))
    return unpadded, taps


def _project_separately(
    module: Any, sources: list[Tensor], grids: list[tuple[int, ...]]
) -> tuple[list[Tensor], list[Tap]]:
    """Return W_q x_q + b_q and so on, (P, E), where the three weights are separate parameters."""
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    projected = []
    taps = []
    for name, source, grid in zip(names, sources, grids, strict=True):
        tap = Tap(getattr(module, name), None)
        projected.append(tap(source.flatten(0, 1)[None])[0])
        taps.append(tap.finish([grid]))
    if module.in_proj_bias is not None:
        bias_tap = Tap(None, module.in_proj_bias, groups=3)
        longest = max(len(z) for z in projected)
        biases = bias_tap(projected[0].new_empty(3, longest, 0))
        projected = [z + b[: len(z)] for z, b in zip(projected, biases, strict=True)]
        taps.append(bias_tap.finish(grids))
    return projected, taps


def _stack_sources(sources: list[Tensor]) -> Tensor:
    """Return the sources (B, length, I) as (3, P, I), shorter ones padded by zeros.

    If all three are the same tensor, the result is an expanded view of it.
    """
    if len({(x.data_ptr(), x.shape, x.stride()) for x in sources}) == 1:
        return sources[0].flatten(0, 1).expand(3, -1, -1)
    flat = [x.flatten(0, 1) for x in sources]
    positions = max(len(x) for x in flat)
    return torch.stack([F.pad(x, (0, 0, 0, positions - len(x))) for x in flat])


def _append_extra_keys(module: Any, k: Tensor, v: Tensor, taps: list[Tap]) -> tuple[Tensor, Tensor]:
    """Return keys and values followed by the learned pair and the pair of zeros, if any."""
    if module.bias_k is not None:
        no_input = k.new_empty(1, len(k), 0)
        key_tap = Tap(None, module.bias_k)
        value_tap = Tap(None, module.bias_v)
        k = torch.cat([k, key_tap(no_input)[0][:, None]], 1)
        v = torch.cat([v, value_tap(no_input)[0][:, None]], 1)
        taps.extend((key_tap.finish(), value_tap.finish()))
    if module.add_zero_attn:
        k = F.pad(k, (0, 0, 0, 1))
        v = F.pad(v, (0, 0, 0, 1))
    return k, v


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (B, length, E) as (B, heads, length, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _combine_masks(
    module: Any, query: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Return what is added to the scores, broadcast to (B, heads, L, S'), or None.

    `mask` is (L, S) or (B·heads, L, S), `padding` (B, S) or (S). The keys that
    `_append_extra_keys` adds are open to all queries.
    """
    total: Tensor | None = None
    if mask is not None:
        if mask.ndim != 2:
            mask = mask.unflatten(0, (len(query), -1))
        total = _to_additive(mask, query)
    if padding is not None:
        padding = _to_additive(padding, query).reshape(len(query), 1, 1, -1)
        if total is None:
            total = padding
        else:
            total = total + padding
    if total is None:
        return None
    extra_keys = int(module.bias_k is not None) + int(module.add_zero_attn)
    return F.pad(total, (0, extra_keys))


def _to_additive(mask: Tensor, reference: Tensor) -> Tensor:
    """Return 0 where a Boolean mask is False and −∞ where it is True, in the reference's dtype."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=reference.dtype).masked_fill_(mask, float("-inf"))
