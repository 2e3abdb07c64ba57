"""Stage three, *grams*: in which form is G = AᵀA held?"""

from .assemble import FORMS, Part, assemble, coverage
from .base import FactoredGram, Gram, Structure
from .forms import Dense, Kernel, Operator, Rows

__all__ = [
    "FORMS",
    "Dense",
    "FactoredGram",
    "Gram",
    "Kernel",
    "Operator",
    "Part",
    "Rows",
    "Structure",
    "assemble",
    "coverage",
]
