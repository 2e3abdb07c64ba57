"""What takes the steps of a solve: the natural gradient in function space, or another optimizer."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim import Optimizer

from ..._core.processes import Processes
from ...grams import GramForm
from ...optim import KFAC, NaturalGradient, Objective, StepInfo
from ...solvers import PseudoInverse, Sketched, Solver
from ...steps import TargetRatio
from ..discretization.trial import Trial
from .progress import duration
from .settings import Settings

_CUT = 5e-14  # singular values below this share of the largest are noise, in float64
_LARGE = 2500  # parameters above which a step moves in a random subspace
_SUBSPACE = 1000  # its dimension
#: steps whose reduction of the loss is nearly what was predicted, from tiny ones on
SHORT = TargetRatio(0.9, radii=48, window=1e3)
_PROBE = 512  # the side of the matrices that a device's speed is measured with


def make_optimizer(
    trial: Trial, settings: Settings, dtype: torch.dtype, processes: Processes, rows: int
) -> Optimizer:
    """The settings' optimizer, or a natural gradient of their stages, for so many residuals."""
    if settings.optimizer is not None:
        return settings.optimizer(trial)
    return NaturalGradient(
        trial,
        solver=settings.solver or default_solver(trial, dtype, rows),
        step=settings.step or TargetRatio(),
        gram=GramForm(settings.gram, settings.memory),
        group=processes.group,
    )


def default_solver(trial: Trial, dtype: torch.dtype, rows: int) -> Solver:
    """All dampings from one factorization, of singular values down to the noise.

    The usual cut at max(n, p)·ε leaves directions out that the last digits need: the loss then
    stalls, for some seeds at errors of 1e-9 (`benchmarks/trust.py`). Where both residuals and
    parameters are many, a step moves in a random subspace, which is drawn anew every time.
    """
    cut = _CUT if dtype == torch.float64 else None
    if min(rows, size(trial)) > _LARGE:
        return Sketched(columns=_SUBSPACE, rcond=cut, double=True)
    return PseudoInverse(rcond=cut, double=True)


def size(trial: Trial) -> int:
    """The number of parameters that are solved for."""
    return sum(p.numel() for p in trial.parameters() if p.requires_grad)


def costs(trial: Trial, settings: Settings, rows: int) -> str:
    """What a step of the default method will take, where there are many parameters; else nothing.

    The operations are those of A, its cosine transform, QR and SVD, in products of matrices; the
    device's speed at these is measured.
    """
    p, like = size(trial), next(trial.parameters())
    chosen = settings.solver is None and settings.optimizer is None
    if not chosen or min(rows, p) <= _LARGE:
        return ""
    k = _SUBSPACE
    operations = 400 * rows * p + 3 * rows * k**2 + 20 * k**3
    exact = 3 * rows * p * min(rows, p) + 20 * min(rows, p) ** 3
    seconds = 1 / _speed(like.device)
    held = min(rows * p * like.element_size(), settings.memory) + 3 * rows * k * 8
    return (
        f"{p:,} parameters and {rows:,} residuals: every step moves in a random subspace of {k:,} "
        f"directions, about {duration(operations * seconds)} and {held / 2**30:.2g} GiB a step. "
        f"solver=PseudoInverse() would use all, at about {duration(exact * seconds)} a step"
    )


def _speed(device: torch.device) -> float:
    """Operations a second in products of float64 matrices."""
    a = torch.ones(_PROBE, _PROBE, dtype=torch.float64, device=device)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * _PROBE**3 / best


def take_step(
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
