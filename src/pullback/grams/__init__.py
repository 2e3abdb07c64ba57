"""Stage three, *grams*: in which form is G = AᵀA held?"""

from .assemble import FORMS, assemble, assemble_stack, coverage
from .forms import Dense, FactoredGram, Gram, Kernel, Operator, Rows, Structure
from .kronecker import Kronecker
from .stack import Part, Stack

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
