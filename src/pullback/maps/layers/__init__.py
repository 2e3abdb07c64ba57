"""Layers whose structure is known. A new kind is one file with `@register` and a line here."""

from . import attention, conv, embedding, linear, recurrent, scale, transposed
from .affine import AffineBlock
from .base import Block, RowsBlock
from .compound import Compound, Tap
from .registry import REGISTRY, Layer, Use, find, register

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
    "embedding",
    "find",
    "linear",
    "recurrent",
    "register",
    "scale",
    "transposed",
]
