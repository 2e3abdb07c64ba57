"""The experiment: two spin chains with known energies, six seeds each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from pullback import vmc

from ..framework.check import Check
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table


@dataclass(frozen=True)
class SpinChain:
    """A chain, its exact ground energy, and how it is minimized.

    Attributes:
        name: of the item.
        sites: number of spins.
        model: "ising" at the critical field, or "heisenberg".
        exact: ground energy in Pauli matrices.
        target: relative error to reach.
        features: filters of the restricted Boltzmann machine.
        steps, samples: of the minimization.
        moves: proposals between two samples of a chain.
        lr: learning rate, which falls to a tenth along a cosine.
        measure: samples of the final energy.
        seconds: goal for the whole run by the clock, or None.
        quick_target: relative error that the quick version reaches.
    """

    name: str
    sites: int
    model: str
    exact: float
    target: float
    features: int
    steps: int
    samples: int
    moves: int
    lr: float
    measure: int
    seconds: float | None = None
    quick_target: float = 1e-3

    def describe(self) -> dict[str, Any]:
        """Return what results depend on."""
        settings = dict(vars(self))
        for goal in ("seconds", "quick_target"):
            del settings[goal]
        return settings

    def hamiltonian(self) -> vmc.Hamiltonian:
        """The Hamiltonian on its ring."""
        lattice = vmc.Chain(self.sites)
        if self.model == "ising":
            return vmc.TransverseFieldIsing(lattice, field=1.0)
        return vmc.Heisenberg(lattice)


#: claims that did not hold in the full runs: one estimate was 1.2e-6 ± 0.6e-6, one run took 71 s
_MISSED = frozenset(
    {
        "ising-20-minute: every seed within 1e-06",
        "ising-20-minute: training and measurement within 60 s on two threads",
    }
)

CHAINS = (
    SpinChain(
        name="ising-20",
        sites=20,
        model="ising",
        exact=-2 / math.sin(math.pi / 40),
        target=1e-6,
        features=6,
        steps=400,
        samples=2000,
        moves=20,
        lr=0.08,
        measure=4_000_000,
    ),
    SpinChain(
        name="ising-20-minute",
        sites=20,
        model="ising",
        exact=-2 / math.sin(math.pi / 40),
        target=1e-6,
        features=9,
        steps=400,
        samples=2000,
        moves=8,
        lr=0.1,
        measure=1_200_000,
        seconds=60.0,
    ),
    SpinChain(
        name="heisenberg-22",
        sites=22,
        model="heisenberg",
        exact=-39.14752260706247,
        target=1e-5,
        features=10,
        steps=400,
        samples=1500,
        moves=11,
        lr=0.02,
        measure=600_000,
    ),
)


def compute_exact_energy(hamiltonian: vmc.Hamiltonian, network: torch.nn.Module) -> float:
    """⟨ψ|H|ψ⟩/⟨ψ|ψ⟩ of a positive state by summing over all configurations of its sector."""
    sector = 0 if hamiltonian.conserves_magnetization else None
    basis = vmc.enumerate_configurations(hamiltonian.sites, sector)
    powers = 2 ** torch.arange(hamiltonian.sites)
    log_psi = torch.full((2**hamiltonian.sites,), -math.inf, dtype=torch.float64)
    with torch.no_grad():
        for configurations in basis.split(2**14):
            codes = ((configurations > 0) * powers).sum(-1)
            log_psi[codes] = network(configurations.double())
    log_psi -= log_psi.max()
    norm = (2 * log_psi).exp().sum()
    energy = 0.0
    for configurations in basis.split(2**14):
        connections = hamiltonian.connections(configurations)
        log_values = log_psi[((configurations > 0) * powers).sum(-1)]
        log_connected = log_psi[((connections.configurations > 0) * powers).sum(-1)]
        terms = connections.elements * (log_values[:, None] + log_connected).exp()
        energy += float(torch.where(connections.elements != 0, terms, 0.0).sum())
    return energy / float(norm)


@dataclass(frozen=True, kw_only=True)
class QuantumSpins(Experiment):
    """Relative errors of both chains.

    Attributes:
        chains: to minimize.
    """

    name: str = "vmc-spins"
    paper: str = "Exact energies of spin chains"
    figure: str = "Ising N = 20 at the critical field, Heisenberg L = 22"
    claim: str = "vmc.minimize reaches relative errors of 1e-6 and 1e-5 on every seed"
    about: str = (
        "Restricted Boltzmann machines with translated filters and no biases, float64, whose "
        "amplitudes are evaluated in float32. The Ising "
        "energy is in closed form, the Heisenberg energy by exact diagonalization. The error of "
        "the estimate is that of `result.energy`, the error of the state that of its exact energy, "
        "by a sum over all configurations. Seconds are by the clock, on two threads: those of the "
        "steps, and those of the final measurement of the energy. About eighteen settings were "
        "tried before, nearly all on one seed."
    )
    seeds: Sequence[int] = tuple(range(6))
    threads: int | None = 2
    open_parts: frozenset[str] = frozenset({"chains"})
    chains: Sequence[SpinChain] = CHAINS

    def config(self, quick: bool) -> dict[str, Any]:
        chains = [self._reduce_if_quick(chain, quick) for chain in self.chains]
        return {"chains": {chain.name: chain.describe() for chain in chains}}

    def _reduce_if_quick(self, chain: SpinChain, quick: bool) -> SpinChain:
        if not quick:
            return chain
        return replace(chain, steps=60, samples=500, measure=20_000)

    def smoke(self) -> Self:
        tiny = replace(
            CHAINS[0], sites=6, exact=-2 / math.sin(math.pi / 12), steps=2, samples=20, measure=50
        )
        return replace(self, judged=False, chains=(tiny,))

    def items(self, quick: bool) -> list[Item]:
        return [Item((chain.name,), partial(self._minimize_energy, chain)) for chain in self.chains]

    def _minimize_energy(self, chain: SpinChain, context: Context) -> Record:
        sized = self._reduce_if_quick(chain, context.quick and self.judged)
        torch.manual_seed(context.seed)
        network = vmc.Rbm(vmc.Chain(sized.sites), sized.features, bias=False).double()
        hamiltonian = sized.hamiltonian()
        start = time.perf_counter()
        processor_start = time.process_time()
        outcome = vmc.minimize(
            hamiltonian,
            network,
            steps=sized.steps,
            samples=sized.samples,
            seed=context.seed,
            sampler=vmc.Metropolis(chains=sized.samples, moves=sized.moves),
            evaluation=vmc.EvaluationOptions(dtype=torch.float32, chunk=4096),
            lr=vmc.cosine_decay(sized.lr, sized.steps, 0.1),
            step=vmc.adaptive_step(1e-6),
            measure=sized.measure,
            progress=False,
            device=context.device,
        )
        seconds = time.perf_counter() - start
        processor_seconds = time.process_time() - processor_start
        training_seconds = outcome.history.spent
        scale = abs(sized.exact)
        return {
            "relative_error": (outcome.energy - sized.exact) / scale,
            "statistical_error": outcome.error / scale,
            "variance": outcome.variance,
            "verdict": outcome.verdict.name,
            "training_seconds": training_seconds,
            "measuring_seconds": seconds - training_seconds,
            "processor_seconds": processor_seconds,
            "state_error": (compute_exact_energy(hamiltonian, network) - sized.exact) / scale,
            "steps": len(outcome.history),
        }

    def line(self, record: Record) -> str:
        return (
            f"error {record['relative_error']:.1e} ± {record['statistical_error']:.0e}, "
            f"of the state {record['state_error']:.1e}, "
            f"{record['verdict']}, {record['training_seconds']:.0f} s of training"
        )

    def judge(self, results: Results) -> list[Check]:
        if not self.judged:
            return []
        checks = []
        for chain in self.chains:
            runs = results.of(chain.name)
            errors = [abs(run["relative_error"]) for run in runs]
            target = chain.quick_target if results.quick else chain.target
            reached = sum(error <= target for error in errors)
            claim = f"{chain.name}: every seed within {target:.0e}"
            numbers = f"{reached} of {len(errors)}, at most {max(errors):.1e}"
            was_recorded = claim not in _MISSED
            checks.append(Check(claim, reached == len(errors), numbers, recorded=was_recorded))
            state_errors = [run["state_error"] for run in runs]
            claim = f"{chain.name}: the exact energy of every state within {target:.0e}"
            numbers = f"at most {max(state_errors):.1e}"
            checks.append(Check(claim, max(state_errors) <= target, numbers))
            if chain.seconds is not None and not results.quick:
                checks.append(_judge_seconds(chain.name, chain.seconds, runs))
        return checks

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for chain in self.chains:
            for seed, run in enumerate(results.of(chain.name)):
                cells = (
                    run["relative_error"],
                    run["statistical_error"],
                    run["state_error"],
                    run["variance"],
                )
                numbers = [f"{cell:.1e}" for cell in cells]
                training = round(run["training_seconds"])
                measuring = round(run["measuring_seconds"])
                name = f"{chain.name}, seed {seed}"
                rows.append([name, *numbers, run["verdict"], training, measuring])
        columns = [
            "run",
            "relative error",
            "±",
            "of the state",
            "variance",
            "verdict",
            "training, s",
            "measurement, s",
        ]
        return [Table(columns, rows, "Ground energies")]


def _judge_seconds(name: str, goal: float, runs: Sequence[Record]) -> Check:
    """Return whether training and measurement together took at most so many seconds."""
    seconds = [run["training_seconds"] + run["measuring_seconds"] for run in runs]
    claim = f"{name}: training and measurement within {goal:g} s on two threads"
    numbers = f"at most {max(seconds):.0f} s"
    was_recorded = claim not in _MISSED
    return Check(claim, max(seconds) <= goal, numbers, recorded=was_recorded, of_paper=False)


EXPERIMENTS = (QuantumSpins(),)
