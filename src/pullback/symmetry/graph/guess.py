"""An input for a model, from its first layer alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..._core.attention import unfused_attention
from ..._core.errors import PullbackError

_SIDES = (8, 16, 28, 32, 64, 96, 224)


def guessed(model: nn.Module) -> Tensor:
    """Random numbers that the model takes."""
    first = next(
        (m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None
    )
    for x in _candidates(first):
        try:
            with torch.no_grad(), unfused_attention():
                _quietly(model, x)
        except Exception:
            continue
        return x
    raise PullbackError(
        "The model's input is not known",
        "no example was given, and its first layer does not say what it takes",
        "Pass an example: find(model, x)",
    )


def _quietly(model: nn.Module, x: Tensor) -> None:
    """A forward pass that leaves buffers alone."""
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    torch.func.functional_call(model, buffers, (x,))


def _candidates(first: Any) -> list[Tensor]:
    if first is None:
        return []
    weight = next(first.parameters(recurse=False))
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    if isinstance(first, nn.Linear):
        return [normal(16, first.in_features), normal(4, 6, first.in_features)]
    if isinstance(first, nn.RNNBase):
        return [normal(4, 6, first.input_size)]
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        shape = (4, 6)
        tokens = torch.randint(first.num_embeddings, shape, generator=generator)
        return [tokens.to(weight.device)]
    if isinstance(first, nn.modules.conv._ConvNd):
        ndim = len(first.kernel_size)
        return [normal(2, first.in_channels, *[side] * ndim) for side in _SIDES]
    if isinstance(first, (nn.LayerNorm, nn.RMSNorm)):
        return [normal(4, 6, *first.normalized_shape), normal(4, *first.normalized_shape)]
    return []
