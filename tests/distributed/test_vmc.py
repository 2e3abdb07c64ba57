"""vmc.minimize on several processes: chains by rank, the steps of one process with all chains."""

from __future__ import annotations

import sys
import warnings
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from pullback import vmc
from pullback.solvers import Cholesky
from pullback.steps import Spring
from pullback.vmc.amplitude import Evaluator
from pullback.vmc.run import Minimization
from pullback.vmc.sampler import ChainShape, MarkovChains, Metropolis

from .checks import Checks, only, same_everywhere, told_everywhere
from .world import World

CHECKS = Checks(__name__)


class JoinedChains:
    """The chains of all processes in one process, with the random numbers of each."""

    def __init__(self, by_rank: list[MarkovChains]) -> None:
        self.by_rank = by_rank
        self.magnetization = by_rank[0].magnetization

    @property
    def configurations(self) -> Tensor:
        return torch.cat([chains.configurations for chains in self.by_rank])

    @property
    def accepted_by_chain(self) -> Tensor:
        return torch.cat([chains.accepted_by_chain for chains in self.by_rank])

    @property
    def acceptance(self) -> float:
        return self.by_rank[0].acceptance

    @property
    def shape(self) -> ChainShape:
        return self.by_rank[0].shape

    def continue_from(self, others: JoinedChains) -> None:
        for chains, other_chains in zip(self.by_rank, others.by_rank, strict=True):
            chains.continue_from(other_chains)

    def draw(self, evaluator: Evaluator) -> Tensor:
        return torch.cat([chains.draw(evaluator) for chains in self.by_rank])


def join_chains_of(size: int) -> type[Minimization]:
    """Return a minimization by one process that draws what `size` processes would."""

    class Joined(Minimization):
        def _start_chains(self, seed: int, sampler: Metropolis, samples: int) -> MarkovChains:
            by_rank = []
            for rank in range(size):
                own_seed = seed * 1_000_003 + rank
                share = -(-samples // size)
                by_rank.append(
                    MarkovChains(self.hamiltonian, sampler, share, own_seed, self._device)
                )
            return JoinedChains(by_rank)  # pyright: ignore[reportReturnType]

    return Joined


def minimize(
    hamiltonian: vmc.Hamiltonian, network: nn.Module, size: int, group: object
) -> vmc.Result:
    chains = 12
    return vmc.minimize(
        hamiltonian,
        network,
        steps=4,
        samples=2 * chains * size,
        seed=3,
        sampler=Metropolis(chains=chains, thermalization=20),
        solver=Cholesky(1e-2),
        step=Spring(0.8),
        measure=4 * chains * size,
        progress=False,
        group=group,
    )


def compare(rank: int, size: int, hamiltonian: vmc.Hamiltonian) -> None:
    torch.manual_seed(rank)  # the first process's network counts
    network = vmc.Rbm(hamiltonian.sites, 2).double()
    groups = len(distributed_c10d._world.pg_map)
    result = minimize(hamiltonian, network, size, None)
    assert len(distributed_c10d._world.pg_map) == groups, "a run gives its group back"
    parameters = torch.cat([p.detach().flatten() for p in network.parameters()])
    same_everywhere(parameters)
    told_everywhere((result.history.energy, result.energy, result.verdict.name))
    if rank > 0:
        return
    torch.manual_seed(0)
    other_network = vmc.Rbm(hamiltonian.sites, 2).double()
    with patch.object(sys.modules["pullback.vmc.minimize"], "Minimization", join_chains_of(size)):
        expected = minimize(hamiltonian, other_network, size, only(0))
    torch.testing.assert_close(
        parameters, torch.cat([p.detach().flatten() for p in other_network.parameters()])
    )
    assert result.history.energy == pytest.approx(expected.history.energy, rel=1e-10)
    assert result.energy == pytest.approx(expected.energy, rel=1e-10)
    assert result.error == pytest.approx(expected.error, rel=1e-8)


@CHECKS.add
def flips(rank: int, size: int) -> None:
    compare(rank, size, vmc.TransverseFieldIsing(vmc.Chain(6), field=1.0))


@CHECKS.add
def exchanges(rank: int, size: int) -> None:
    compare(rank, size, vmc.Heisenberg(vmc.Chain(6)))


class UndefinedLater(vmc.Rbm):
    """A network whose amplitude can be made NaN."""

    is_undefined = False

    def forward(self, configurations: Tensor) -> Tensor:
        value = super().forward(configurations)
        return value * torch.nan if self.is_undefined else value


@CHECKS.add
def undefined_on_one_process(rank: int, size: int) -> None:
    """All processes end where the amplitude of one is undefined; none waits for its samples."""
    torch.manual_seed(0)
    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(4), field=1.0)
    network = UndefinedLater(4, 1).double()

    def lose_amplitude(run: Minimization) -> None:
        network.is_undefined = rank == size - 1 and len(run.history) == 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = vmc.minimize(
            hamiltonian,
            network,
            steps=5,
            samples=20 * size,
            callbacks=[lose_amplitude],
            progress=False,
        )
    assert result.verdict.stop_reason is vmc.StopReason.NOT_FINITE
    assert len(result.history) == 2


@pytest.mark.parametrize("name", CHECKS.functions)
def test_all_processes(world: World, name: str) -> None:
    CHECKS.run(world, name)
