"""Estimated beside true errors of PDE solutions: is a verdict ever wrong in silence?

Every problem has a known solution and is solved by defaults (`network_for`, `solve`) within some
seconds. The verdict and the estimate of the error do not know that solution. What counts is the
largest error, of all fields together and of each by itself.
"""

from __future__ import annotations

from .experiment import Honesty

__all__ = ["EXPERIMENTS", "Honesty"]

EXPERIMENTS = (Honesty(),)
