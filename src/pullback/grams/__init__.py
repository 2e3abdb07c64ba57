"""Stage three, *grams*: in which form is G = AᵀA held?"""

from .assembly import FORMS, GramForm, assemble, assemble_stack
from .distributed_rows import DistributedRowStack
from .forms import Dense, FactoredGram, Gram, Kernel, Operator, Rows, Structure
from .kronecker import Kronecker
from .row_stack import RowBlock, RowStack, coverage

__all__ = [
    "FORMS",
    "Dense",
    "DistributedRowStack",
    "FactoredGram",
    "Gram",
    "GramForm",
    "Kernel",
    "Kronecker",
    "Operator",
    "RowBlock",
    "RowStack",
    "Rows",
    "Structure",
    "assemble",
    "assemble_stack",
    "coverage",
]
