"""What training is compared with: margins, least squares, and completion by the nuclear norm."""

from .completion import Completion, nuclear_norm_completion
from .least_squares import ordinary_least_squares, ridgeless
from .margins import Margin, l1_max_margin, l2_max_margin, lp_max_margin, separates

__all__ = [
    # classifiers
    "l2_max_margin",
    "l1_max_margin",
    "lp_max_margin",
    "separates",
    "Margin",
    # regression
    "ordinary_least_squares",
    "ridgeless",
    # matrices
    "nuclear_norm_completion",
    "Completion",
]
