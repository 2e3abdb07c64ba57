"""What takes the steps of a solve: the natural gradient in function space, or another optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._core.errors import require
from ..._core.processes import Processes
from ...grams import GramForm
from ...optim import KFAC, NaturalGradient, Objective, StepInfo
from ...solvers import PseudoInverse, Sketched, Solver
from ...steps import Step, TargetRatio
from ..discretization.trial import Trial
from .progress import duration
from .settings import MethodOptions


@dataclass(frozen=True)
class SolverThresholds:
    """How the linear system of a step is solved by default."""

    #: singular values below this share of the largest are noise in float64; with the usual cut at
    #: max(n, p)·ε some seeds stall at errors of 1e-9 (`pullback bench trust`)
    noise_share: float = 5e-14
    #: residuals and parameters above which a step moves in a random subspace, because a full
    #: factorization is cubic in them
    dense_size: int = 2500
    #: dimension of that subspace: its factorization takes (2.5)³ = 16 times less than the largest
    #: full one
    subspace_size: int = 1000
    #: side of the matrices with which the speed of a device is measured: 0.3 GFLOP, milliseconds
    probe_size: int = 512


THRESHOLDS = SolverThresholds()
#: steps whose reduction of the loss is nearly what was predicted, from tiny ones on
SHORT_STEP = TargetRatio(0.9, radii=48, window=1e3)


def make_optimizer(
    trial: Trial,
    method: MethodOptions,
    *,
    dtype: torch.dtype,
    processes: Processes,
    residual_count: int,
    is_short: bool,
) -> Optimizer:
    """Return the caller's optimizer, or a natural gradient of the given and default stages.

    Args:
        trial: the module whose parameters are solved for.
        method: the options of the caller.
        dtype: the precision of the solve.
        processes: those that solve together.
        residual_count: rows of the Jacobian.
        is_short: whether steps are short ones, which go down to the floor of a valley.
    """
    if method.optimizer is not None:
        return _call_maker(method.optimizer, trial)
    return NaturalGradient(
        trial,
        solver=method.solver or default_solver(trial, dtype, residual_count),
        step=_choose_step(method, is_short=is_short),
        gram=GramForm(method.gram, method.memory),
        group=processes.group,
    )


def _call_maker(maker: Callable[[nn.Module], Optimizer], trial: Trial) -> Optimizer:
    """Return the optimizer that the caller's function makes; raise where it makes none."""
    remedy = "Give a function of the module: lambda m: torch.optim.Adam(m.parameters())"
    takes_module = not isinstance(maker, type) or issubclass(maker, (KFAC, NaturalGradient))
    require(takes_module, "optimizer=", maker, remedy)
    optimizer = maker(trial)
    require(isinstance(optimizer, Optimizer), "The result of optimizer=", optimizer, remedy)
    return optimizer


def _choose_step(method: MethodOptions, *, is_short: bool) -> Step:
    """Return the rule of short steps, or the caller's or the default rule of long ones."""
    if is_short:
        return SHORT_STEP
    return method.step or TargetRatio()


def default_solver(trial: Trial, dtype: torch.dtype, residual_count: int) -> Solver:
    """Return a solver of all dampings from one factorization, down to singular values of noise.

    If residuals and parameters are both many, every step moves in another random subspace.
    """
    noise_share = THRESHOLDS.noise_share if dtype == torch.float64 else None
    if _is_sketched(trial, residual_count):
        return Sketched(columns=THRESHOLDS.subspace_size, rcond=noise_share, double=True)
    return PseudoInverse(rcond=noise_share, double=True)


def _is_sketched(trial: Trial, residual_count: int) -> bool:
    """Return True if residuals and parameters are too many for a full factorization."""
    return min(residual_count, count_parameters(trial)) > THRESHOLDS.dense_size


def count_parameters(trial: Trial) -> int:
    """Return the number of parameters that are solved for."""
    return sum(p.numel() for p in trial.parameters() if p.requires_grad)


def describe_cost(trial: Trial, method: MethodOptions, residual_count: int) -> str:
    """Return in words what a step in a random subspace takes; empty if steps are no such ones.

    The operations are those of A, its random directions, QR and SVD, in products of matrices; the
    speed of the device at these is measured.
    """
    is_default = method.solver is None and method.optimizer is None
    if not is_default or not _is_sketched(trial, residual_count):
        return ""
    n = residual_count
    p = count_parameters(trial)
    k = THRESHOLDS.subspace_size
    parameter = next(trial.parameters())
    seconds_per_operation = 1 / _measure_speed(parameter.device)
    sketched = 400 * n * p + 3 * n * k**2 + 20 * k**3
    dense = 3 * n * p * min(n, p) + 20 * min(n, p) ** 3
    step_bytes = min(n * p * parameter.element_size(), method.memory) + 3 * n * k * 8
    return (
        f"{p:,} parameters and {n:,} residuals: every step moves in a random subspace of {k:,} "
        f"directions, about {duration(sketched * seconds_per_operation)} and "
        f"{step_bytes / 2**30:.2g} GiB a step. solver=PseudoInverse() would use all, at about "
        f"{duration(dense * seconds_per_operation)} a step"
    )


def _measure_speed(device: torch.device) -> float:
    """Return the operations a second in products of float64 matrices, the best of three."""
    size = THRESHOLDS.probe_size
    matrix = torch.ones(size, size, dtype=torch.float64, device=device)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def take_step(
    optimizer: Optimizer, objective: Objective, trial: Trial, processes: Processes
) -> StepInfo:
    """Take one step with any optimizer; ours get the objective, those of torch a closure."""
    if isinstance(optimizer, NaturalGradient):
        return optimizer.step(objective=objective)
    if isinstance(optimizer, KFAC):
        loss = optimizer.step(objective=objective)
        report = optimizer.info
        return StepInfo(loss, report.accepted, damping=report.damping, reason=report.reason)

    def closure() -> Any:  # torch's closures return a float
        optimizer.zero_grad()
        return _compute_gradients(objective, trial, processes)

    return StepInfo(float(optimizer.step(closure)), accepted=True)


def _compute_gradients(objective: Objective, trial: Trial, processes: Processes) -> Tensor:
    """Return the loss of all processes, and leave its gradients in the parameters."""
    parameters = dict(trial.named_parameters())
    if objective.terms:
        loss = objective.loss(parameters)
    else:  # this process has no points
        loss = next(iter(parameters.values())).sum() * 0
    loss.backward()
    trained = [p for p in parameters.values() if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    loss, *gradients = processes.sum([loss.detach(), *gradients], "gradients")
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    return loss
