"""Solve a PDE with a network and the natural gradient in function space."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..solvers import Solver
from ..steps import Step
from .arguments import is_integer, is_number, require, require_problem
from .discretization.plan import Refine
from .domains.sampling import Sampler
from .judgement.solution import PDESolution
from .judgement.verdict import Outcome
from .networks.modules import Hard
from .problem.problem import Problem
from .runs.run import Run, find_solve_processes
from .runs.settings import Callback, Limits, MethodOptions, SamplingOptions, Settings
from .runs.slabs import SlabMarch
from .runs.strategy import Strategy, should_use_strategy


def solve(
    problem: Problem,
    network: nn.Module,
    *,
    steps: int = 400,
    points: int | Mapping[str, int] | None = None,
    sampler: str | Sampler | None = None,
    seed: int = 0,
    resample: int | None = None,
    refine: Refine | str | None = "auto",
    solver: Solver | None = None,
    step: Step | None = None,
    gram: str = "auto",
    memory: int = 2**32,
    causal: bool = False,
    slabs: int | str | Sequence[float] = 1,
    tol: float | None = None,
    patience: int | None = 50,
    budget: float | None = None,
    measure: int = 10,
    checkpoint: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    device: str | torch.device | None = None,
    progress: bool = True,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    group: Any = None,
) -> PDESolution:
    """Fit the network to the problem's conditions; its parameters change in place.

    With slabs every piece of time has a copy of the network, and the given one stays as it is.

    Args:
        problem: what must hold, and where.
        network: (N, d) ↦ (N, fields); its dtype is the precision of the solve.
        steps: at most this many. A network that creeps after a quarter of them is replaced by
            others with other initial values, which takes about as many steps again at most. If
            none of these gets on, an initial value problem is solved in slabs of time; an ordinary
            one at once, with small networks. The verdict says what was tried.
        points: of the equations (others get a quarter), or by condition name.
        sampler: "grid", "gauss", "sobol", "lhs", "uniform"; by default a grid in up to two
            dimensions of space, and Sobol points beyond or where there is time.
        seed: of the points.
        resample: draw all points anew every so many steps.
        refine: a schedule that moves points to where the residual is large. By default that
            happens whenever the loss at fresh points is twice that at the run's own.
        solver, step, gram, memory: stages of the `NaturalGradient` underneath; by default every
            damped solution from one factorization, and the largest good trust radius; small ones
            in the last ten steps.
        causal: let later times count once earlier ones are solved.
        slabs: time is cut into so many pieces, or at these times, that are solved one after the
            other. With "auto" they are as long as they converge. Each has at most so many steps.
        tol: stop when the error (the loss, where no solution is known) is at most this.
        patience: stop when the loss fell by less than 1 % in so many steps. None tries no other
            network either.
        budget: seconds; a run with a checkpoint goes on from there when called again.
        measure: steps between two measurements of the error.
        checkpoint: file that the run is saved to, after every minute of steps and at the end, and
            resumed from where it exists.
        callbacks: called with (run, info) after every step; True stops the run.
        device: where to solve; by default where the network is.
        progress: show a line on the terminal.
        optimizer: instead of solver and step, a function that makes the optimizer of a module,
            `lambda module: KFAC(module, ...)` say, or one of torch's.
        group: the processes that solve together, each with a share of the points; by default all
            that `torch.distributed` knows. Callbacks run on every process, and any of them stops
            all; the first process shows progress and reads and writes the checkpoint.
    """
    require_problem(problem, "solve()")
    usable = isinstance(network, nn.Module)
    require(usable, "The network", network, "Pass a module, such as network_for(problem)")
    settings = Settings(
        sampling=SamplingOptions(
            points=points, sampler=sampler, seed=seed, resample=resample, refine=refine
        ),
        method=MethodOptions(
            solver=solver, step=step, gram=gram, memory=memory, optimizer=optimizer
        ),
        limits=Limits(steps=steps, tol=tol, patience=patience, budget=budget),
        causal=causal,
        measure=measure,
        callbacks=callbacks,
        device=device,
        progress=progress,
        group=group,
    )
    _check_slabs(slabs)
    _warn_of_soft_network(problem, network)
    evolves = problem.domain.evolves or problem.domain.names == ("t",)
    has_slabs = slabs != 1 and (slabs != "auto" or evolves)
    has_checkpoint = checkpoint is not None
    if has_slabs:
        solution = SlabMarch(problem, network, checkpoint, settings).solve(slabs)
    elif should_use_strategy(problem, settings, has_checkpoint=has_checkpoint):
        solution = Strategy(problem, network, settings).solve()
    else:
        solution = Run(problem, network, settings, checkpoint).advance()
    _complete_verdict(solution)
    if solution.verdict.alarming and find_solve_processes(group).rank == 0:
        warnings.warn(f"{problem.name}: {solution.stopped}", stacklevel=2)
    return solution


def _complete_verdict(solution: PDESolution) -> None:
    """Add an estimate of the error if the run converged, else where the residual is largest."""
    verdict = solution.verdict
    if verdict.name is Outcome.CONVERGED and verdict.estimated is None:
        solution.verdict = solution.judge_error()
    elif verdict.name in {Outcome.STALLED, Outcome.UNFINISHED, Outcome.OVERFITTED}:
        solution.verdict = solution.judge_residuals()


def _check_slabs(slabs: object) -> None:
    """Raise for slabs that are no number, no list of times and not "auto"."""
    is_list_of_times = isinstance(slabs, (list, tuple)) and all(map(is_number, slabs))
    usable = is_list_of_times or slabs == "auto" or is_integer(slabs, 1)
    require(usable, "slabs=", slabs, 'Use an integer ≥ 1, a list of times, or "auto"')


def _warn_of_soft_network(problem: Problem, network: nn.Module) -> None:
    """Warn if the problem leaves conditions to the network, which does not build them in."""
    if problem.hard and not any(isinstance(module, Hard) for module in network.modules()):
        warnings.warn(
            f"{problem.name}: its hard conditions are not in the loss, and the network does not "
            "build them in. Use problem.wrap(network), or hard=False",
            stacklevel=3,
        )
