"""`nn.Embedding`: a linear layer whose one-hot input stays an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.space import compute_dtype
from .base import Block, joined
from .gather import GatherBlock
from .moments import Moments, Sharing, second_moment
from .registry import Layer, Use, register


@register(nn.Embedding)
class Embedding(Layer):
    """index (N, T), δ (N, R, T, D); `padding_idx` receives no gradient.

    For K-FAC the one-hot inputs have a diagonal second moment, how often each index occurs, which
    stands on the left: the weight has a row per index.
    """

    curvature, input_first = "kronecker", True

    def parameters(self, module: Any) -> dict[str, Tensor | None]:
        return {"weight": module._parameters.get("weight")}

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        module = uses[0].module
        index = joined([u.input.reshape(u.input.shape[0], -1) for u in uses], 1)
        delta = joined(
            [u.delta.reshape(*u.delta.shape[:2], -1, u.delta.shape[-1]) for u in uses], 2
        )
        if module.padding_idx is not None:
            delta = delta * (index != module.padding_idx)[:, None, :, None]
        name = names["weight"]
        assert name is not None
        return GatherBlock(name, (module.num_embeddings, module.embedding_dim), index, delta)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        like = module.weight
        counted = x != module.padding_idx if module.padding_idx is not None else None
        if keep is not None and keep.shape == x.shape:
            counted = keep if counted is None else counted & keep
        ones = torch.ones_like(x, dtype=compute_dtype(like.dtype))
        ones = ones if counted is None else ones * counted
        counts = ones.new_zeros(module.num_embeddings).index_add_(0, x.flatten(), ones.flatten())
        places = x.numel() if counted is None else counted.sum()
        return Moments(counts[None], counts[None], places)

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        return second_moment(delta.reshape(1, -1, delta.shape[-1]), sharing)
