"""Ground states of spin Hamiltonians by variational Monte Carlo."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._core.errors import PullbackError, require, require_type
from .._core.processes import Processes
from ..grams import GramForm
from ..solvers import Solver
from ..steps import Step
from .amplitude import EvaluationOptions
from .hamiltonians import Hamiltonian
from .result import Result
from .run import Callback, LearningRate, Minimization, Settings
from .sampler import Metropolis


def minimize(
    hamiltonian: Hamiltonian,
    network: nn.Module,
    *,
    steps: int = 300,
    samples: int = 1024,
    seed: int = 0,
    sampler: Metropolis | None = None,
    lr: LearningRate = 0.05,
    solver: Solver | None = None,
    step: Step | None = None,
    gram: str | GramForm = "auto",
    evaluation: EvaluationOptions | None = None,
    measure: int | None = None,
    tol: float | None = None,
    patience: int | None = None,
    budget: float | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    device: str | torch.device | None = None,
    progress: bool = True,
    group: Any = None,
) -> Result:
    r"""Minimize ⟨ψ|H|ψ⟩/⟨ψ|ψ⟩ over a network's parameters, which change in place.

    Every step draws samples of |ψ|², computes local energies E(s) = Σ_s' H(s, s') ψ(s')/ψ(s), and
    takes a natural-gradient step in the Fubini–Study metric (stochastic reconfiguration): with the
    quantum geometric tensor S, (S + λ) x = ∇⟨H⟩ and w ← w − lr·x. The gradient is ∇⟨H⟩, twice the
    "force" of the literature. Few parameters are solved for in parameter space, many in the space
    of samples, without storing the Jacobian where the layers allow it.

    Args:
        hamiltonian: `TransverseFieldIsing`, `Heisenberg`, or one of your own, by
            `FunctionHamiltonian(function, sites)`.
        network: (N, sites) of ±1 ↦ log ψ: (N,) real, (N, 2) log-amplitude and phase, or (N,)
            complex. Its dtype is the precision of the run, its device the default one.
        steps: at most this many.
        samples: of every step, over all processes.
        seed: of the chains. The network is initialized by the caller.
        sampler: chains, moves and kind of proposal.
        lr: η, or a function of the step's number. The length of a step in units of H⁻¹.
        solver: of (S + λ) x = g, by default `Cholesky`.
        step: by default `adaptive_step()`, SPRING with a momentum and a damping that need no
            tuning. `steps.Spring(0.9)` and `steps.Constant()` use the solver's damping, which is
            1e-3 by default.
        gram: form of the Gram, or `grams.GramForm` with the bytes that one matrix may take.
        evaluation: chunk size and precision of forward passes without gradients.
        measure: samples of the final energy, by default sixteen times `samples`.
        tol: stop when the V-score sites·variance/(energy − mean energy)² of a step's samples is at
            most this; the mean is tr H over the number of states.
        patience: stop when the energy has not fallen by more than its error in so many steps.
        budget: seconds of steps; a run with a checkpoint goes on from there when called again.
        checkpoint: file that the run is saved to, every minute and at the end, and resumed from
            where it exists.
        callbacks: called with the run after every step; True stops it.
        device: where to work; by default where the network is.
        progress: print a line every ten seconds.
        group: the processes that work together, each with a share of the chains; by default all
            that `torch.distributed` knows. Chains and local energies are divided. The linear
            system is solved by every process alike.

    Returns:
        The energy from chains that go on from those of the steps with its error, the history, and
        a verdict, which compares it with fresh chains. A warning repeats a verdict that says that
        the energy must not be used.
    """
    remedy = "Pass TransverseFieldIsing, Heisenberg or FunctionHamiltonian(function, sites)"
    require(isinstance(hamiltonian, Hamiltonian), "The Hamiltonian", hamiltonian, remedy)
    require(isinstance(network, nn.Module), "The network", network, "Pass an nn.Module")
    _require_count("steps=", steps, 0)
    _require_count("samples=", samples, 2)
    _require_rate(lr)
    _require_seed(seed)
    _require_positive("budget=", budget, "seconds")
    _require_positive("tol=", tol, "a number")
    if patience is not None:
        _require_count("patience=", patience, 1)
    require(
        all(callable(callback) for callback in callbacks),
        "callbacks=",
        callbacks,
        "Pass functions of the run",
    )
    require_type("solver", solver, Solver)
    require_type("step", step, Step)
    require(
        isinstance(sampler, Metropolis | None), "sampler=", sampler, "Pass a Metropolis, or None"
    )
    require(
        isinstance(evaluation, EvaluationOptions | None),
        "evaluation=",
        evaluation,
        "Pass EvaluationOptions, or None",
    )
    if measure is None:
        measure = 16 * samples
    _require_count("measure=", measure, 2)
    if device is not None:
        network.to(device)
    settings = Settings(
        steps=steps,
        samples=samples,
        seed=seed,
        sampler=sampler or Metropolis(),
        lr=lr,
        solver=solver,
        step=step,
        gram=gram,
        evaluation=evaluation or EvaluationOptions(),
        measure=measure,
        tol=tol,
        patience=patience,
        budget=budget,
        callbacks=callbacks,
        progress=progress,
    )
    path = None if checkpoint is None else Path(checkpoint)
    processes = _find_processes(group)
    result = Minimization(hamiltonian, network, settings, path, processes).run()
    if result.verdict.is_alarming and processes.rank == 0:
        warnings.warn(f"{hamiltonian!r}: {result.stopped}", stacklevel=2)
    return result


def cosine_decay(lr: float, steps: int, last: float = 0.1) -> Callable[[int], float]:
    """A learning rate that falls from `lr` to `last`·lr along a cosine over `steps`."""

    def rate(step: int) -> float:
        progress = min(1.0, step / max(1, steps - 1))
        return lr * (last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2)

    return rate


def _find_processes(group: Any) -> Processes:
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return Processes(group)


def _require_count(name: str, value: object, least: int) -> None:
    usable = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(usable, name, value, f"Use an integer ≥ {least}")


def _require_seed(seed: object) -> None:
    usable = isinstance(seed, int) and abs(seed) < 2**40  # chains multiply it by a million
    require(usable, "seed=", seed, "Use an integer below 2^40")


def _require_positive(name: str, value: object, unit: str) -> None:
    usable = value is None or (isinstance(value, (int, float)) and value > 0)
    require(usable, name, value, f"Use {unit} > 0, or None")


def _require_rate(lr: object) -> None:
    if callable(lr):
        return
    if not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise PullbackError(
            "lr= is not usable", f"got {lr!r}", "Use a positive number or a function of the step"
        )
