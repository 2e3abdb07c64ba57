"""`nn.Embedding`: a linear layer whose one-hot input stays an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.space import compute_dtype
from .base import Block, joined
from .gather import GatherBlock
from .moments import Moments, Sharing, counted, second_moment
from .registry import Layer, Use, register


@register(nn.Embedding)
class Embedding(Layer):
    """index (N, T), δ (N, R, T, D); `padding_idx` receives no gradient.

    For K-FAC the one-hot inputs have a diagonal second moment, how often each index occurs, which
    stands on the left: the weight has a row per index.
    """

    curvature, input_first, one_hot = "kronecker", True, True

    def parameters(self, module: Any) -> dict[str, Tensor | None]:
        return {"weight": module._parameters.get("weight")}

    def form(self, module: Any) -> tuple[int, int, int]:
        return 1, module.num_embeddings, module.embedding_dim

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        module = uses[0].module
        index = joined([u.input[:, None].flatten(1) for u in uses], 1)
        delta = joined([u.delta[:, :, None].flatten(2, -2) for u in uses], 2)
        if module.padding_idx is not None:
            delta = delta * (index != module.padding_idx)[:, None, :, None]
        name = names["weight"]
        assert name is not None
        return GatherBlock(name, (module.num_embeddings, module.embedding_dim), index, delta)

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        return counted(delta, keep)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        like = module.weight
        if module.padding_idx is not None:
            words = x != module.padding_idx
            keep = words if keep is None else words & keep
        ones = torch.ones_like(x, dtype=compute_dtype(like.dtype))
        ones = ones if keep is None else ones * keep
        counts = ones.new_zeros(module.num_embeddings).index_add_(0, x.flatten(), ones.flatten())
        places = x.numel() if keep is None else keep.sum().clamp(min=1)  # all may be padding
        return Moments(counts[None], counts[None], places)

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if module.padding_idx is not None:
            delta = delta * (x != module.padding_idx)[..., None]
        return second_moment(delta.reshape(1, -1, delta.shape[-1]), sharing)
