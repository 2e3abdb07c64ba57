"""One minimization in progress: samples, energies, steps, stops, checkpoints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._core.checkpoint_file import refuse_other_run
from .._core.errors import PullbackError
from .._core.processes import Processes
from ..grams import GramForm
from ..metrics import FubiniStudy
from ..optim import NaturalGradient, StepInfo
from ..solvers import Cholesky, Solver
from ..steps import Spring, Step
from .amplitude import EvaluationOptions, Evaluator, LogAmplitude
from .checkpoint import FORMAT
from .closure import EnergyClosure
from .energies import compute_local_energies, measure_frustration
from .hamiltonians import Hamiltonian, estimate_mean_energy
from .history import History
from .momentum import adaptive_step
from .refusals import refuse_unusable_hamiltonian, refuse_unusable_network
from .result import Result
from .sampler import MarkovChains, Metropolis, UndefinedAmplitude
from .statistics import EnergyStatistics, summarize
from .verdict import Evidence, StopReason, compute_v_score, judge

#: called with the run after every step; stops it by returning True
Callback = Callable[["Minimization"], Any]
LearningRate = float | Callable[[int], float]


@dataclass(frozen=True)
class Pace:
    """When a run prints, saves and gives up, and how many samples its result is measured with."""

    #: seconds between two lines on the terminal
    line: float = 10.0
    #: seconds between two checkpoints: a killed run loses a minute
    checkpoint: float = 60.0
    #: steps in a row that are rejected, each with other samples, before the run ends
    rejected_steps: int = 10
    #: samples of every chain that the energy is measured with: with 64 of them R̂ = 1.1 means an
    #: autocorrelation time of 7
    measured_length: int = 64
    #: samples of every fresh chain that the measured energy is compared with
    fresh_length: int = 8
    #: samples that the signs of ψ are compared at: enough to see one in a hundred
    sign_samples: int = 256


@dataclass(frozen=True)
class Settings:
    """The options of `minimize`, which explains them."""

    steps: int
    samples: int
    seed: int
    sampler: Metropolis
    lr: LearningRate
    solver: Solver | None
    step: Step | None
    gram: str | GramForm
    evaluation: EvaluationOptions
    measure: int
    tol: float | None
    patience: int | None
    budget: float | None
    callbacks: Sequence[Callback]
    progress: bool
    pace: Pace = Pace()


@dataclass(frozen=True)
class Batch:
    """Samples of all processes with their local energies."""

    samples: Tensor
    local_energies: Tensor
    statistics: EnergyStatistics


@dataclass
class StageSeconds:
    """Where the seconds of the last step went."""

    sampling: float = 0.0
    energies: float = 0.0
    solving: float = 0.0


class Minimization:
    """One minimization in progress.

    Attributes:
        hamiltonian, network: what is minimized, and over what.
        history: what happened so far.
        optimizer: the natural gradient.
        chains: the Markov chains of this process.
    """

    def __init__(
        self,
        hamiltonian: Hamiltonian,
        network: nn.Module,
        settings: Settings,
        checkpoint_path: Path | None,
        processes: Processes,
    ) -> None:
        self.hamiltonian = hamiltonian
        self.network = network
        self.history = History()
        self._settings = settings
        self._path = checkpoint_path
        self._processes = processes
        self._model = LogAmplitude(network)
        self._evaluator = Evaluator(self._model, settings.evaluation)
        self._device = self._evaluator.device
        self._chain_samples = -(-settings.samples // processes.size)
        self.chains = self._start_chains(settings.seed, settings.sampler, self._chain_samples)
        self._refuse_unusable_hamiltonian()
        refuse_unusable_network(self._evaluator, self.chains.configurations[:32])
        self._mean_energy = estimate_mean_energy(hamiltonian, self.chains.configurations[:256])
        processes.broadcast_first([*network.parameters(), *network.buffers()])
        self._rule = settings.step or adaptive_step()
        self._group_of_one = _make_group_of_one()
        self.optimizer = NaturalGradient(
            self._model,
            FubiniStudy(),
            settings.solver or Cholesky(1e-3),
            self._rule,
            lr=1.0,
            gram=settings.gram,
            group=self._group_of_one,
        )
        self._stage_seconds = StageSeconds()
        #: steps in a row that were rejected
        self._rejected = 0
        #: seconds of steps before this call, by a run that it goes on with
        self._seconds_before = 0.0

    def _start_chains(self, seed: int, sampler: Metropolis, samples: int) -> MarkovChains:
        own_seed = seed * 1_000_003 + self._processes.rank
        return MarkovChains(self.hamiltonian, sampler, samples, own_seed, self._device)

    def _refuse_unusable_hamiltonian(self) -> None:
        """Raise if H makes no sense where the chains are."""
        refuse_unusable_hamiltonian(self.hamiltonian, self.chains.configurations)

    @property
    def _is_first(self) -> bool:
        """Return True on the process that speaks and writes for all."""
        return self._processes.rank == 0

    @property
    def spent(self) -> float:
        """Seconds of steps in this call."""
        return self.history.spent - self._seconds_before

    def run(self) -> Result:
        """Step until a reason to stop, then measure the energy with longer chains.

        A run ends with it: the optimizer's group of processes is given back.
        """
        try:
            return self._run_and_measure()
        finally:
            if self._group_of_one is not None:
                dist.destroy_process_group(self._group_of_one)

    def _run_and_measure(self) -> Result:
        """Resume where there is a checkpoint, step, save, and measure."""
        if self._path is not None and self._path.exists():
            self._resume(self._path)
        self._seconds_before = self.history.spent
        reason = self._step_until_stop()
        if self._path is not None:
            self._save(self._path)
        return self._measure_result(reason)

    def _step_until_stop(self) -> StopReason:
        """Take steps, print and save now and then; return why no further one is taken."""
        last_line = last_save = time.monotonic()
        while (reason := self._find_stop_reason()) is None:
            try:
                self._step()
            except UndefinedAmplitude:
                if not self.history:
                    raise
                return StopReason.NOT_FINITE
            seconds = time.monotonic()
            if seconds - last_line >= self._settings.pace.line:
                self._print_progress()
                last_line = seconds
            if self._path is not None and seconds - last_save >= self._settings.pace.checkpoint:
                self._save(self._path)
                last_save = seconds
            if self._is_stopped_by_callback():
                return StopReason.CALLBACK
        return reason

    def _step(self) -> None:
        """Draw samples, take one natural-gradient step, and write both to the history."""
        start = self._read_clock()
        rate = self._read_learning_rate(len(self.history))
        batch = self._draw_batch(self.chains)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        before_solve = self._read_clock()
        info = self.optimizer.step(self._make_closure(batch, rate))
        self._stage_seconds.solving = self._read_clock() - before_solve
        self._rejected += 1
        if info.accepted:
            self._rejected = 0
        self._processes.broadcast_first([*self.network.parameters()])
        self._record(batch.statistics, info, rate, self._read_clock() - start)

    def _read_clock(self) -> float:
        """Return seconds, after all work that was launched on the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _draw_batch(self, chains: MarkovChains) -> Batch:
        """Return samples of |ψ|² and their local energies, joined over the processes."""
        drawn, local_energies = self._draw_on_all_processes(chains)
        real_energies = torch.view_as_real(local_energies)
        drawn, real_energies = self._processes.gather([drawn, real_energies], "samples")
        by_chain = torch.view_as_complex(real_energies)
        if not bool(torch.isfinite(real_energies).all()):
            raise UndefinedAmplitude(
                "A local energy is not finite",
                "ψ vanishes or overflows at a sample or next to it, or an element of H there is "
                "not finite",
                "Check the network and the Hamiltonian, or lower lr=",
            )
        statistics = summarize(by_chain, drawn)
        return Batch(drawn.flatten(0, 1), by_chain.flatten(), statistics)

    def _draw_on_all_processes(self, chains: MarkovChains) -> tuple[Tensor, Tensor]:
        """Return `_draw_here`; raise on all processes if the amplitude is undefined on one.

        Chains of one process may be where ψ vanishes while those of the others are not. The others
        would wait for its samples.
        """
        error: UndefinedAmplitude | None = None
        samples = None
        try:
            samples = self._draw_here(chains)
        except UndefinedAmplitude as undefined:
            error = undefined
        is_defined = self._processes.all_agree(error is None)
        if error is not None:
            raise error
        if not is_defined or samples is None:
            raise UndefinedAmplitude(
                "Another process has no amplitude",
                "log ψ is not finite where its chains are",
                "See its error",
            )
        return samples

    def _draw_here(self, chains: MarkovChains) -> tuple[Tensor, Tensor]:
        """Return samples of this process, (chains, per_chain, sites), and their local energies."""
        start = self._read_clock()
        self._evaluator.refresh()
        drawn = chains.draw(self._evaluator)
        after_sampling = self._read_clock()
        flat = drawn.flatten(0, 1)
        energies = compute_local_energies(self.hamiltonian, self._evaluator, flat)
        self._stage_seconds.sampling = after_sampling - start
        self._stage_seconds.energies = self._read_clock() - after_sampling
        return drawn, energies.values.view(drawn.shape[:2])

    def _make_closure(self, batch: Batch, rate: float) -> EnergyClosure:
        """Return the closure of one step."""
        return EnergyClosure(self._model, batch.samples, batch.local_energies, rate)

    def _read_learning_rate(self, step: int) -> float:
        """Return the learning rate of a step; raise if it is none."""
        rate = self._settings.lr
        if callable(rate):
            rate = rate(step)
        number = math.nan
        with suppress(TypeError, ValueError):
            number = float(rate)
        if not 0 <= number < math.inf:
            raise PullbackError(
                "lr= gives no learning rate",
                f"at step {step} it returned {rate!r}",
                "Return a finite number ≥ 0",
            )
        return number

    def _record(
        self, statistics: EnergyStatistics, info: StepInfo, rate: float, seconds: float
    ) -> None:
        """Write a step to the history."""
        momentum = 0.0
        if isinstance(self._rule, Spring):
            momentum = self._rule.momentum
        self.history.append(
            energy=statistics.energy,
            error=statistics.error,
            variance=statistics.variance,
            acceptance=self.chains.acceptance,
            rhat=statistics.rhat,
            lr=rate,
            damping=info.damping,
            momentum=momentum,
            seconds=self.history.spent + seconds,
            sampling_seconds=self._stage_seconds.sampling,
            energy_seconds=self._stage_seconds.energies,
            solving_seconds=self._stage_seconds.solving,
        )

    def _find_stop_reason(self) -> StopReason | None:
        """Return why the run ends here, the same on all processes; None if it goes on."""
        settings = self._settings
        history = self.history
        reason = None
        if len(history) >= settings.steps:
            reason = StopReason.ALL_STEPS
        elif settings.budget is not None and self.spent >= settings.budget:
            reason = StopReason.BUDGET_SPENT
        elif history and settings.tol is not None and self._compute_v_score() <= settings.tol:
            reason = StopReason.TOLERANCE_REACHED
        elif self._rejected >= settings.pace.rejected_steps:
            reason = StopReason.NO_STEP
        elif settings.patience is not None and self._has_stagnated(settings.patience):
            reason = StopReason.NO_PROGRESS
        return self._processes.broadcast_object(reason)

    def _compute_v_score(self) -> float:
        """Return the V-score of the last samples."""
        energy = self.history.energy[-1]
        variance = self.history.variance[-1]
        return compute_v_score(self.hamiltonian.sites, energy, variance, self._mean_energy)

    def _has_stagnated(self, patience: int) -> bool:
        """Return True if the mean energy of `patience` steps is not below that of those before."""
        energies = self.history.energy
        if len(energies) < 2 * patience:
            return False
        before = math.fsum(energies[-2 * patience : -patience]) / patience
        after = math.fsum(energies[-patience:]) / patience
        noise = math.fsum(self.history.error[-patience:]) / patience / math.sqrt(patience)
        return before - after < math.sqrt(2) * noise

    def _is_stopped_by_callback(self) -> bool:
        answers = [callback(self) is True for callback in self._settings.callbacks]
        return not self._processes.all_agree(not any(answers))

    def _print_progress(self) -> None:
        if not self._settings.progress or not self._is_first:
            return
        history = self.history
        print(
            f"vmc: step {len(history)}/{self._settings.steps}  energy {history.energy[-1]:.8g} ± "
            f"{history.error[-1]:.1g}  variance {history.variance[-1]:.2g}  after "
            f"{history.spent:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    def _measure_result(self, reason: StopReason) -> Result:
        """Return the energy from the chains of the steps, that from fresh chains, and the verdict.

        Fewer and longer chains than those of the steps go on from there, so that R̂ says whether
        they mix. Fresh ones start at random configurations. Where the two disagree, one of them is
        in a part of the configurations that it does not leave.
        """
        self._refuse_unusable_hamiltonian()  # training may have led the chains elsewhere
        pace = self._settings.pace
        samples_here = -(-self._settings.measure // self._processes.size)
        longest = -(-samples_here // pace.measured_length)
        fewer = max(1, min(self.chains.shape.chains, max(16, longest)))
        sampler = replace(self._settings.sampler, chains=fewer)
        seed = self._settings.seed
        chains = self._start_chains(seed + 7919, sampler, samples_here)
        chains.continue_from(self.chains)
        fresh_chains = self._start_chains(seed + 2 * 7919, sampler, fewer * pace.fresh_length)
        statistics = None
        fresh = None
        frustration = math.nan
        samples = chains.configurations
        try:
            batch = self._draw_batch(chains)
            fresh = self._draw_batch(fresh_chains).statistics
            statistics = batch.statistics
            samples = batch.samples
            few = samples[:: -(-len(samples) // pace.sign_samples)]
            frustration = measure_frustration(self.hamiltonian, self._evaluator, few)
        except UndefinedAmplitude:
            reason = StopReason.NOT_FINITE
        frozen_share = float((chains.accepted_by_chain == 0).double().mean())
        evidence = Evidence(
            stop_reason=reason,
            history=self.history,
            final=statistics,
            fresh=fresh,
            frozen_share=frozen_share,
            sites=self.hamiltonian.sites,
            sector=chains.magnetization,
            mean_energy=self._mean_energy,
            frustration=frustration,
        )
        verdict = self._processes.broadcast_object(judge(evidence))
        if statistics is None:
            nan = math.nan
            statistics = EnergyStatistics(nan, nan, nan, nan, nan, nan, 0)
        return Result(
            self.network, statistics, fresh, self.history, verdict, samples, chains.acceptance
        )

    def _describe_run(self) -> dict[str, Any]:
        """Return what a run that resumes from this one's checkpoint has to share."""
        return {
            "hamiltonian": repr(self.hamiltonian),
            "samples": self._settings.samples,
            "seed": self._settings.seed,
            "processes": self._processes.size,
            "chains": self.chains.shape.chains,
            "magnetization": self.chains.magnetization,
            "parameters": [(n, list(p.shape)) for n, p in self.network.named_parameters()],
            "dtype": str(self._evaluator.dtype),
        }

    def _save(self, path: Path) -> None:
        """Write what the run needs to go on to the same bits."""
        chain_states = self._processes.gather_objects(self.chains.state())
        if not self._is_first:
            return
        state = {
            "identity": self._describe_run(),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "chains": chain_states,
            "history": self.history.as_dict(),
            "rejected": self._rejected,
        }
        FORMAT.write(path, {"run": state})

    def _resume(self, path: Path) -> None:
        state = FORMAT.read(path)["run"]
        refuse_other_run(path, state["identity"], self._describe_run())
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.chains.load(state["chains"][self._processes.rank])
        self.history = History.from_dict(state["history"])
        self._rejected = state.get("rejected", 0)


def _make_group_of_one() -> Any:
    """Return a new group of this process alone, where `torch.distributed` knows others; else None.

    Each process solves for the samples of all, whichever of them work together.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
