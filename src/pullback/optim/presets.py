"""Named algorithms: compositions of the stages, nothing more."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import steps
from ..likelihoods import MSE, Likelihood
from ..metrics import Fisher
from ..solvers import Cholesky, ConjugateGradient, PseudoInverse
from .natural_gradient import NaturalGradient


def GaussNewton(
    model: nn.Module, likelihood: Likelihood | None = None, *, lr: float = 1.0, **options: Any
) -> NaturalGradient:
    """w ← w − lr·A⁺r: undamped minimum-norm steps; by default for `F.mse_loss`."""
    metric = Fisher(likelihood or MSE())
    return NaturalGradient(model, metric, PseudoInverse(), steps.Constant(lr), **options)


def LevenbergMarquardt(
    model: nn.Module, likelihood: Likelihood | None = None, *, damping: float = 1e-3, **options: Any
) -> NaturalGradient:
    """Damped Gauss–Newton with the damping set by the actual over the predicted reduction."""
    metric, rule = Fisher(likelihood or MSE()), steps.LevenbergMarquardt(damping)
    return NaturalGradient(model, metric, Cholesky(damping), rule, **options)


def HessianFree(
    model: nn.Module, likelihood: Likelihood, *, damping: float = 1e-2, **options: Any
) -> NaturalGradient:
    """Truncated conjugate gradients on matrix-free products, Levenberg–Marquardt damping."""
    solver = ConjugateGradient(damping, tol=1e-6, progress=5e-4, max_iterations=250)
    rule = steps.LevenbergMarquardt(damping)
    return NaturalGradient(model, Fisher(likelihood), solver, rule, **options)
