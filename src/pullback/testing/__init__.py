"""Laws that a metric, a Gram or a solver of yours can run on itself, and the dense oracle.

Each `check_*` raises an `AssertionError` that says which law failed and the number measured.
"""

from .assertions import assert_close, relative_error
from .grams import check_gram
from .metrics import check_factor, check_metric
from .oracle import Oracle, jacobian, oracle
from .solvers import check_solver

__all__ = [
    # laws, in the order of the pipeline
    "check_factor",
    "check_metric",
    "check_gram",
    "check_solver",
    # the slow, obvious answer
    "oracle",
    "Oracle",
    "jacobian",
    # how results are compared
    "assert_close",
    "relative_error",
]
