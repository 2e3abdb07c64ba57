"""Six problems beside Adam + L-BFGS and self-scaled Broyden, in the same CPU seconds.

Network, points and seed are the same for all methods, on one thread. Adam has a rate of 3e-3 for a
fifth of the time, then L-BFGS follows. Burgers' and the Allen–Cahn equation have the small set-ups
of `pde-unseen-seeds`, Helmholtz' the network of `network_for`. A fourth column is `pde.solve` with
`network_for` and no options.
"""

from __future__ import annotations

from .experiment import QuasiNewton

__all__ = ["EXPERIMENTS", "QuasiNewton"]

EXPERIMENTS = (QuasiNewton(),)
