"""Layers whose structure is known. A new kind is one file with `@register` and a line here."""

from . import conv, embedding, linear, scale
from .affine import AffineBlock
from .base import Block, RowsBlock
from .registry import REGISTRY, Layer, Use, find, register

__all__ = [
    "REGISTRY",
    "AffineBlock",
    "Block",
    "Layer",
    "RowsBlock",
    "Use",
    "conv",
    "embedding",
    "find",
    "linear",
    "register",
    "scale",
]
