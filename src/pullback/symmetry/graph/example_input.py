"""Random inputs for models that are used without an example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..._core.errors import PullbackError
from ..._core.graph import disable_fused_attention

#: the sides of square images that are tried, smallest first: common inputs of published networks
IMAGE_SIDES = (8, 16, 28, 32, 64, 96, 224)


def guess_input(model: nn.Module) -> Tensor:
    """Return random numbers that the model takes.

    Raises:
        PullbackError: if the model fails on all shapes that its first layer suggests.
    """
    for x in _suggest_inputs(_find_first_layer(model)):
        if _can_run(model, x):
            return x
    raise PullbackError(
        "The model's input is not known",
        "no example was given, and its first layer does not say what it takes",
        "Pass an example: find(model, x)",
    )


def _can_run(model: nn.Module, x: Tensor) -> bool:
    try:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad(), disable_fused_attention():
            functional_call(model, buffers, (x,))
    except Exception:
        return False
    return True


def _find_first_layer(model: nn.Module) -> nn.Module | None:
    """Return the first module that has parameters of its own."""
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            return module
    return None


def _suggest_inputs(layer: Any) -> list[Tensor]:
    """Return random inputs of shapes that a layer takes."""
    if layer is None:
        return []
    weight = next(layer.parameters(recurse=False))
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    if isinstance(layer, nn.Linear):
        return [normal(16, layer.in_features), normal(4, 6, layer.in_features)]
    if isinstance(layer, nn.RNNBase):
        return [normal(4, 6, layer.input_size)]
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        tokens = torch.randint(layer.num_embeddings, (4, 6), generator=generator)
        return [tokens.to(weight.device)]
    if isinstance(layer, nn.modules.conv._ConvNd):
        ndim = len(layer.kernel_size)
        return [normal(2, layer.in_channels, *[side] * ndim) for side in IMAGE_SIDES]
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return [normal(4, 6, *layer.normalized_shape), normal(4, *layer.normalized_shape)]
    return []
