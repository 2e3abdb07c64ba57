"""What a minimization found, and how to save it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import FORMAT
from .history import History
from .statistics import EnergyStatistics
from .verdict import ChainProblem, Outcome, StopReason, VMCVerdict


@dataclass
class Result:
    """The ground state that `minimize` found.

    Attributes:
        network: log ψ at the end.
        statistics: the energy, from chains that go on from those of the steps.
        fresh: the energy from a few samples of chains that start at random configurations; None
            where the amplitude was not finite.
        history: energies and times along the way.
        verdict: how it ended.
        samples: the configurations that the energy is from, (N, sites), int8.
        acceptance: share of the proposals for them that were accepted.
    """

    network: nn.Module
    statistics: EnergyStatistics
    fresh: EnergyStatistics | None
    history: History
    verdict: VMCVerdict
    samples: Tensor
    acceptance: float

    @property
    def energy(self) -> float:
        """⟨H⟩ from `samples`."""
        return self.statistics.energy

    @property
    def error(self) -> float:
        """The standard error of `energy`, from the scatter of the chains' means."""
        return self.statistics.error

    @property
    def variance(self) -> float:
        """⟨H²⟩ − ⟨H⟩², zero for an eigenstate."""
        return self.statistics.variance

    @property
    def stopped(self) -> str:
        """Why the run ended, and a remedy where the result is not good enough."""
        return self.verdict.text

    def save(self, path: str | Path) -> None:
        """Write the network's parameters, the numbers and the history to a file."""
        verdict = asdict(self.verdict)
        problem = self.verdict.chain_problem
        verdict["stop_reason"] = self.verdict.stop_reason.name
        verdict["outcome"] = self.verdict.outcome.name
        verdict["chain_problem"] = None if problem is None else problem.name
        state = {
            "network": self.network.state_dict(),
            "statistics": asdict(self.statistics),
            "fresh": None if self.fresh is None else asdict(self.fresh),
            "history": self.history.as_dict(),
            "verdict": verdict,
            "samples": self.samples.cpu(),
            "acceptance": self.acceptance,
        }
        FORMAT.write(Path(path), {"result": state})

    @classmethod
    def load(cls, path: str | Path, network: nn.Module) -> Result:
        """Return the result that `save` wrote, and load its parameters into a network."""
        state: dict[str, Any] = FORMAT.read(Path(path))["result"]
        network.load_state_dict(state["network"])
        saved = state["verdict"]
        problem = saved["chain_problem"]
        verdict = VMCVerdict(
            stop_reason=StopReason[saved["stop_reason"]],
            outcome=Outcome[saved["outcome"]],
            chain_problem=None if problem is None else ChainProblem[problem],
            v_score=saved["v_score"],
            falling=saved["falling"],
            sector=saved["sector"],
            frustration=saved.get("frustration", math.nan),
        )
        fresh = None
        if state.get("fresh") is not None:
            fresh = EnergyStatistics(**state["fresh"])
        return cls(
            network,
            EnergyStatistics(**state["statistics"]),
            fresh,
            History.from_dict(state["history"]),
            verdict,
            state["samples"],
            state["acceptance"],
        )

    def __repr__(self) -> str:
        return f"Result(energy={self.energy:.8g} ± {self.error:.1g}, {self.verdict.name})"


def correlate_spins(samples: Tensor, permutations: Tensor) -> Tensor:
    """Return ⟨s_i s_g(i)⟩ of spins ±1, averaged over samples and sites i, one number for each g.

    With `lattice.translations()` it is the correlation against the distance.
    """
    spins = samples.double()
    correlations = [(spins * spins[:, g]).mean() for g in permutations.to(samples.device)]
    return torch.stack(correlations)
