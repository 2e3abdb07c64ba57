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

from .compound import Compound, Tap
from .registry import register


@register(nn.MultiheadAttention)
class Attention(Compound):
    """Results: the output, and the attention weights where they were asked for."""

    use = "attention"

    def outputs(self, module: Any, output: Any) -> list[Tensor]:
        return [y for y in output if y is not None]

    def maps(self, module: Any) -> list[tuple[Tensor | None, Tensor | None, int]]:
        if module.in_proj_weight is not None:
            found = [(module.in_proj_weight, module.in_proj_bias, 3)]
        else:
            apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            found = [(w, None, 1) for w in apart] + [(None, module.in_proj_bias, 3)]
        found += [(None, module.bias_k, 1), (None, module.bias_v, 1)]
        return [*found, (module.out_proj.weight, module.out_proj.bias, 1)]

    def note(self, module: Any) -> str:
        drops = module.training and module.dropout > 0
        if drops:
            return "dropout of attention weights"
        return ""

    def steps(
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
        batched = query.ndim == 3
        first = module.batch_first or not batched
        sides = [x if batched else x[None] for x in (query, key, value)]
        sides = [x if first else x.transpose(0, 1) for x in sides]  # each (B, length, ·)
        mask = _mask(module, sides[0], key_padding_mask, attn_mask)
        causal = is_causal and key_padding_mask is None and not need_weights

        (q, k, v), taps = _projected(module, sides)
        k, v = _extended(module, k, v, taps)
        q, k, v = (_heads(x, module.num_heads) for x in (q, k, v))
        weights = None
        if need_weights:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            mixed = weights @ v
        else:  # the hint replaces the mask it speaks of
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None if causal else mask, is_causal=causal
            )
        mixed = mixed.transpose(1, 2).flatten(2)  # (B, L, E)
        out = Tap(module.out_proj.weight, module.out_proj.bias)
        y = out(mixed.flatten(0, 1)[None])[0].unflatten(0, mixed.shape[:2])
        taps.append(out.finish([(*mixed.shape[:2],)]))

        results = [y if first else y.transpose(0, 1)]
        if weights is not None:
            results.append(weights.mean(1) if average_attn_weights else weights)
        if not batched:
            results = [r[0] for r in results]
        return results, taps


def _projected(module: Any, sides: list[Tensor]) -> tuple[list[Tensor], list[Tap]]:
    """q, k, v, each (B, length, E), from their inputs (B, length, ·)."""
    grids = [(*x.shape[:2],) for x in sides]
    positions = [samples * length for samples, length in grids]
    if module.in_proj_weight is not None:
        packed = Tap(module.in_proj_weight, module.in_proj_bias, groups=3)
        z = list(packed(_stacked(sides)))
        taps = [packed.finish(grids)]
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        apart = [Tap(getattr(module, name), None) for name in names]
        z = [w(x.flatten(0, 1)[None])[0] for w, x in zip(apart, sides, strict=True)]
        taps = [w.finish([grid]) for w, grid in zip(apart, grids, strict=True)]
        if module.in_proj_bias is not None:
            shift = Tap(None, module.in_proj_bias, groups=3)
            b = shift(z[0].new_empty(3, max(positions), 0))
            z = [x + y[: len(x)] for x, y in zip(z, b, strict=True)]
            taps.append(shift.finish(grids))
    return [y[:n].unflatten(0, g) for y, n, g in zip(z, positions, grids, strict=True)], taps


def _stacked(sides: list[Tensor]) -> Tensor:
    """(B, length, I) each -> (3, P, I), the shorter padded by zeros; equal ones are one tensor."""
    if len({(x.data_ptr(), x.shape, x.stride()) for x in sides}) == 1:
        return sides[0].flatten(0, 1).expand(3, -1, -1)
    flat = [x.flatten(0, 1) for x in sides]
    positions = max(len(x) for x in flat)
    return torch.stack([F.pad(x, (0, 0, 0, positions - len(x))) for x in flat])


def _extended(module: Any, k: Tensor, v: Tensor, taps: list[Tap]) -> tuple[Tensor, Tensor]:
    """Keys and values with the learned place, and the place of zeros, at the end of the source."""
    if module.bias_k is not None:
        place = k.new_empty(1, len(k), 0)
        one = Tap(None, module.bias_k)
        two = Tap(None, module.bias_v)
        k = torch.cat([k, one(place)[0][:, None]], 1)
        v = torch.cat([v, two(place)[0][:, None]], 1)
        taps.extend((one.finish(), two.finish()))
    if module.add_zero_attn:
        k = F.pad(k, (0, 0, 0, 1))
        v = F.pad(v, (0, 0, 0, 1))
    return k, v


def _heads(x: Tensor, heads: int) -> Tensor:
    """(B, length, E) -> (B, heads, length, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _mask(module: Any, query: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """What is added to the scores, broadcast to (B, heads, L, S'), or None.

    `mask` is (L, S) or (B·heads, L, S), `padding` (B, S) or (S); the positions that `_extended`
    adds are open to all.
    """
    total: Tensor | None = None
    if mask is not None:
        if mask.ndim != 2:
            mask = mask.unflatten(0, (len(query), -1))
        total = _additive(mask, query)
    if padding is not None:
        padding = _additive(padding, query).reshape(len(query), 1, 1, -1)
        if total is None:
            total = padding
        else:
            total = total + padding
    extra = int(module.bias_k is not None) + int(module.add_zero_attn)
    if total is None:
        return total
    return F.pad(total, (0, extra))


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """0 where a Boolean mask is False, −∞ where it is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
