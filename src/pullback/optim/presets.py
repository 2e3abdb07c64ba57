"""Named algorithms: compositions of the stages, nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import steps
from ..likelihoods import MSE, Likelihood
from ..solvers import Cholesky, ConjugateGradient, PseudoInverse
from .natural_gradient import NaturalGradient

Loss = Likelihood | Callable[..., Tensor]


def GaussNewton(
    model: nn.Module, likelihood: Loss | None = None, *, lr: float | None = None, **options: Any
) -> NaturalGradient:
    """w ← w − A⁺r, undamped minimum-norm steps, by default for `F.mse_loss`.

    `TargetRatio` keeps a step within the radius where the quadratic model holds, and takes all of
    it where that is wide enough. With `lr` it is w ← w − lr·A⁺r, whatever becomes of the loss.
    """
    rule = steps.TargetRatio(radii=8, window=10.0) if lr is None else steps.Constant(lr)
    options = {"likelihood": likelihood or MSE(), "step": rule, **options}
    return NaturalGradient(model, solver=PseudoInverse(), **options)


def DampedGaussNewton(
    model: nn.Module, likelihood: Loss | None = None, *, damping: float = 1e-3, **options: Any
) -> NaturalGradient:
    """Damped Gauss–Newton with the damping set by the actual over the predicted reduction."""
    options = {"likelihood": likelihood or MSE(), **options}
    rule = steps.LevenbergMarquardt(damping)
    return NaturalGradient(model, None, Cholesky(damping), rule, **options)


def HessianFree(
    model: nn.Module, likelihood: Loss, *, damping: float = 1e-2, **options: Any
) -> NaturalGradient:
    """Truncated conjugate gradients on matrix-free products, Levenberg–Marquardt damping."""
    solver = ConjugateGradient(damping, tol=1e-6, progress=5e-4, max_iterations=250)
    rule = steps.LevenbergMarquardt(damping)
    return NaturalGradient(model, None, solver, rule, likelihood=likelihood, **options)
