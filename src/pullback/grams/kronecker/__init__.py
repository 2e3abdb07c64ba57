"""Kronecker-factored Grams: pure algebra, factors in and solves out."""

from .blocks import Block, Pair, Rotated, Units, merged
from .gram import Kronecker
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
