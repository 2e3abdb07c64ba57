"""Kronecker-factored Grams: pure algebra, factors in and solves out."""

from .blocks import Block, Pair, Rotated, Units, merged
from .gram import Kronecker
from .inverting import Inverses, inverses

__all__ = ["Block", "Inverses", "Kronecker", "Pair", "Rotated", "Units", "inverses", "merged"]
