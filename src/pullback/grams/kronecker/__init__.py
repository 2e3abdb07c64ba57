"""Kronecker-factored Grams: pure algebra, factors in and solves out."""

from .blocks import EigenBlock, GramBlock, Kronecker, Pair, Units, merge_pairs
from .cholesky_inverse import FactorInverses, invert_factors
from .packed_matrix import PackedMatrix

__all__ = [
    "EigenBlock",
    "FactorInverses",
    "GramBlock",
    "Kronecker",
    "PackedMatrix",
    "Pair",
    "Units",
    "invert_factors",
    "merge_pairs",
]
