"""`nn.Embedding`: a linear layer whose one-hot input stays an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .base import Block, joined
from .gather import GatherBlock
from .registry import Layer, Use, register


@register(nn.Embedding)
class Embedding(Layer):
    """index (N, T), δ (N, R, T, D); `padding_idx` receives no gradient."""

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
