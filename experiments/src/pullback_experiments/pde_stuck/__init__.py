"""Problems on which a solve by defaults once got stuck, with new seeds.

Each is solved by `network_for` and `solve` without options but a budget of 90 CPU seconds on one
thread. A solve counts as good if it has two digits, or if its verdict warns and tells what to
change.
"""

from __future__ import annotations

from .experiment import StuckProblems

__all__ = ["EXPERIMENTS", "StuckProblems"]

EXPERIMENTS = (StuckProblems(),)
