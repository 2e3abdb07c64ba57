"""Rules for operations: importing this package registers all of them."""

from . import layers, normalization, pointwise, reductions, structure

__all__ = ["layers", "normalization", "pointwise", "reductions", "structure"]
