"""Stage three, *grams*: in which form is G = AᵀA held?"""

from .assemble import FORMS, Part, assemble, coverage
from .base import FactoredGram, Gram, Structure
from .forms import Dense, Kernel, Operator, Rows
from .joined import Stack, assemble_stack
from .kronecker import Kronecker

__all__ = [
    "FORMS",
    "Dense",
    "FactoredGram",
    "Gram",
    "Kernel",
    "Kronecker",
    "Operator",
    "Part",
    "Rows",
    "Stack",
    "Structure",
    "assemble",
    "assemble_stack",
    "coverage",
]
