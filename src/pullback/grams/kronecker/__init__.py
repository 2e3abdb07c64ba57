"""Kronecker-factored Grams: pure algebra, factors in and solves out."""

from .blocks import Block, Kronecker, Pair, Rotated, Units, merged
from .inverting import Inverses, inverses
from .packed import Packed

__all__ = [
    "Block",
    "Inverses",
    "Kronecker",
    "Packed",
    "Pair",
    "Rotated",
    "Units",
    "inverses",
    "merged",
]
