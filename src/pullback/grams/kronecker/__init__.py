"""Kronecker-factored Grams: pure algebra, factors in and solves out."""

from .blocks import GramBlock, Kronecker, Pair, Rotated, Units, merged
from .inverting import Inverses, inverses
from .packed import Packed

__all__ = [
    "GramBlock",
    "Inverses",
    "Kronecker",
    "Packed",
    "Pair",
    "Rotated",
    "Units",
    "inverses",
    "merged",
]
