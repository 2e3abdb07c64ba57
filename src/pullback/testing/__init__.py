"""Laws that metrics, likelihoods, Grams and solvers of yours can run on themselves, and the oracle.

Each `check_*` raises an `AssertionError` that says which law failed and the number measured.
"""

from .laws import assert_close, check_factor, check_gram, check_metric, check_solver, relative_error
from .likelihoods import check_likelihood
from .oracle import Oracle, jacobian, oracle

__all__ = [
    # laws, in the order of the pipeline
    "check_factor",
    "check_metric",
    "check_likelihood",
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
