r"""The benchmark set of PDEs: natural gradients in function space beside Adam and L-BFGS.

Every method has the same network, the same points (also where these are refined) and the same
seconds for each problem of `targets.TARGETS`, but for those that are solved in slabs of time:

    Gauss–Newton   what `pde.solve` does unless told otherwise: every damped direction from one
                   factorization of A, and the largest good trust radius
    E-NGD          the energy natural gradient: dense Gram, minimum norm, a grid of step sizes
    E-NGD-OGA      the same on some greedily chosen tangent vectors
    L-BFGS, Adam   torch's; Adam with the best of some rates, by the loss on a seed of its own

Targets are errors that others report for these problems. Seconds are of steps alone; a run that
cannot get on ends before them.
"""

from __future__ import annotations

from .experiment import Benchmarks

__all__ = ["EXPERIMENTS", "Benchmarks"]

EXPERIMENTS = (Benchmarks(),)
