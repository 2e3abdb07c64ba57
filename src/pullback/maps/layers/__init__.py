"""Layers whose structure is known. A new kind is one file with `@register` and a line here."""

from . import (
    attention,
    conv,
    embedding,
    linear,
    product,
    recurrent,
    scale,
    transposed_convolution,
    weight_norm,
)
from .affine import AffineBlock
from .compound import Compound, Tap
from .registry import (
    REGISTRY,
    Block,
    Layer,
    RowsBlock,
    Use,
    describe_layer,
    find_layer,
    register,
)

__all__ = [
    "REGISTRY",
    "AffineBlock",
    "Block",
    "Compound",
    "Layer",
    "RowsBlock",
    "Tap",
    "Use",
    "attention",
    "conv",
    "describe_layer",
    "embedding",
    "find_layer",
    "linear",
    "product",
    "recurrent",
    "register",
    "scale",
    "transposed_convolution",
    "weight_norm",
]
