"""What takes the steps of a solve: the natural gradient in function space, or another optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from .._core.processes import Processes
from ..optim import KFAC, NaturalGradient, Objective, StepInfo
from ..solvers import PseudoInverse
from ..steps import TargetRatio
from .discretize import Trial
from .settings import Settings

_CUT = 5e-14  # singular values below this share of the largest are noise, in float64


def optimizer(
    trial: Trial, settings: Settings, dtype: torch.dtype, processes: Processes
) -> Optimizer:
    """The settings' optimizer, or a natural gradient of their stages."""
    if settings.optimizer is not None:
        return settings.optimizer(trial)
    return NaturalGradient(
        trial,
        solver=settings.solver or _spectral(dtype),
        step=settings.step or TargetRatio(),
        gram=settings.gram,
        memory=settings.memory,
        group=processes.group,
    )


def _spectral(dtype: torch.dtype) -> PseudoInverse:
    """All dampings from one factorization, of singular values down to the noise.

    The usual cut at max(n, p)·ε leaves directions out that the last digits need: the loss then
    stalls, for some seeds at errors of 1e-9 (`benchmarks/trust.py`).
    """
    return PseudoInverse(rcond=_CUT if dtype == torch.float64 else None, double=True)


def stepped(
    optimizer: Optimizer, objective: Objective, trial: Trial, processes: Processes
) -> StepInfo:
    """One step, whatever the optimizer wants to be given."""
    if isinstance(optimizer, NaturalGradient):
        return optimizer.step(objective=objective)
    if isinstance(optimizer, KFAC):
        loss = optimizer.step(objective=objective)
        done = optimizer.info
        return StepInfo(loss, done.accepted, damping=done.damping, reason=done.reason)

    def closure() -> Any:  # torch's closures return a float
        optimizer.zero_grad()
        params = dict(trial.named_parameters())
        value = objective.loss(params) if objective.terms else next(iter(params.values())).sum() * 0
        value.backward()
        found = [p for p in params.values() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in found]
        value, *grads = processes.sum([value.detach(), *grads], "gradients")
        for p, g in zip(found, grads, strict=True):
            p.grad = g
        return value

    return StepInfo(float(optimizer.step(closure)), accepted=True)
