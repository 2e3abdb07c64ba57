"""Derivatives of a network in its inputs, carried forward through its layers."""

from . import rules as rules
from . import shapes as shapes  # both enter the rules
from .jet import Jet, Tape, Unsupported
from .scheme import Index, Scheme, differentiate_nested

__all__ = ["Index", "Jet", "Scheme", "Tape", "Unsupported", "differentiate_nested"]
