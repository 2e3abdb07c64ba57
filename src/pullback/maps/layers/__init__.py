"""Layers whose structure is known. A new kind is one file with `@register` and a line here."""

from . import attention, conv, embedding, linear, recurrent, scale, transposed
from .affine import AffineBlock
from .base import Block, RowsBlock
from .compound import COMPOUNDS, Compound, Tap, find_compound, register_compound
from .registry import REGISTRY, Layer, Use, find, register

__all__ = [
    "COMPOUNDS",
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
    "embedding",
    "find",
    "find_compound",
    "linear",
    "recurrent",
    "register",
    "register_compound",
    "scale",
    "transposed",
]
