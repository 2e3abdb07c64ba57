"""Metropolis chains: their distribution by χ², their sectors, their refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback import vmc
from pullback.vmc.hamiltonians import _find_basis_positions
from pullback.vmc.statistics import gelman_rubin, summarize
from tests.pairs import each_once
from tests.vmc.states import amplitudes, make_network
from tests.vmc.test_energies import make_evaluator

SITES = 6


def make_chains(
    hamiltonian: vmc.Hamiltonian, samples: int, seed: int = 0, **options: object
) -> vmc.MarkovChains:
    sampler = vmc.Metropolis(**options)  # pyright: ignore[reportArgumentType]
    return vmc.MarkovChains(hamiltonian, sampler, samples, seed, torch.device("cpu"))


FLIP = vmc.TransverseFieldIsing(vmc.Chain(SITES))
EXCHANGE = vmc.Heisenberg(vmc.Chain(SITES))


@pytest.mark.parametrize(
    ("hamiltonian", "network_name"), each_once([FLIP, EXCHANGE], ["real", "phase"]), ids=str
)
def test_samples_follow_the_squared_amplitude(
    hamiltonian: vmc.Hamiltonian, network_name: str
) -> None:
    """χ² of the counts over all configurations of the sector, from independent chains."""
    network = make_network(network_name, SITES)
    sector = 0 if hamiltonian.conserves_magnetization else None
    basis = vmc.enumerate_configurations(SITES, sector)
    with torch.no_grad():
        probability = amplitudes(network, basis).abs().square()
    probability = probability / probability.sum()
    chains = make_chains(hamiltonian, 20_000, chains=20_000, moves=60, thermalization=1)
    samples = chains.draw(make_evaluator(network, 20_000))[:, 0]
    position = torch.full((2**SITES,), -1)
    position[_find_basis_positions(basis)] = torch.arange(len(basis))
    counts = torch.bincount(position[_find_basis_positions(samples)], minlength=len(basis))
    expected = 20_000 * probability
    chi_squared = float(((counts - expected).square() / expected).sum())
    freedom = len(basis) - 1
    deviation = (chi_squared - freedom) / math.sqrt(2 * freedom)
    assert abs(deviation) < 4, f"χ² = {chi_squared:.1f} for {freedom} degrees of freedom"


def test_exchanges_keep_the_magnetization() -> None:
    hamiltonian = vmc.Heisenberg(vmc.Chain(SITES))
    network = make_network("real", SITES)
    for magnetization in (0, 2, -4):
        chains = make_chains(hamiltonian, 50, magnetization=magnetization)
        samples = chains.draw(make_evaluator(network))
        assert bool((samples.sum(2) == magnetization).all())


def test_chains_give_several_samples_each() -> None:
    chains = make_chains(vmc.TransverseFieldIsing(vmc.Chain(SITES)), 100, chains=8)
    samples = chains.draw(make_evaluator(make_network("real", SITES)))
    assert samples.shape == (8, 13, SITES)
    assert 0 < chains.acceptance < 1


def test_a_saved_chain_goes_on_to_the_same_bits() -> None:
    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(SITES))
    evaluator = make_evaluator(make_network("real", SITES))
    chains = make_chains(hamiltonian, 20)
    chains.draw(evaluator)
    state = chains.state()
    want = chains.draw(evaluator)
    other = make_chains(hamiltonian, 20, seed=9)
    other.load(state)
    assert torch.equal(other.draw(evaluator), want)


class Constant(nn.Module):
    """log ψ of one value everywhere, or on configurations with few spins up only."""

    def __init__(self, value: float, most_up: int = SITES) -> None:
        super().__init__()
        self.value = value
        self.most_up = most_up

    def forward(self, s: Tensor) -> Tensor:
        allowed = (s > 0).sum(1) <= self.most_up
        return torch.where(allowed, self.value, -torch.inf)


@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "no amplitude"), (math.inf, "no amplitude"), (-math.inf, "zero")],
)
def test_amplitudes_that_make_no_sense_are_refused(value: float, message: str) -> None:
    chains = make_chains(vmc.TransverseFieldIsing(vmc.Chain(SITES)), 20)
    with pytest.raises(pb.PullbackError, match=message):
        chains.draw(make_evaluator(Constant(value)))


def test_chains_find_their_way_out_of_where_the_amplitude_is_zero() -> None:
    chains = make_chains(vmc.TransverseFieldIsing(vmc.Chain(SITES)), 200)
    samples = chains.draw(make_evaluator(Constant(0.0, most_up=1)))
    assert bool(((samples > 0).sum(2) <= 1).all())


@pytest.mark.parametrize(
    ("hamiltonian", "options", "message"),
    [
        (vmc.TransverseFieldIsing(vmc.Chain(6)), {"proposal": "exchange"}, "one sector only"),
        (vmc.TransverseFieldIsing(vmc.Chain(6)), {"magnetization": 0}, "do not keep"),
        (vmc.Heisenberg(vmc.Chain(6)), {"magnetization": 1}, "no configuration"),
        (vmc.Heisenberg(vmc.Chain(6)), {"magnetization": 8}, "no configuration"),
        (vmc.Heisenberg(vmc.Chain(6)), {"magnetization": "0"}, "magnetization="),
        (vmc.FunctionHamiltonian(lambda s: (s, s), 1, True), {}, "one site"),
        (vmc.Heisenberg(vmc.Chain(6)), {"chains": 0}, "integer"),
        (vmc.Heisenberg(vmc.Chain(6)), {"proposal": "jump"}, "not usable"),
    ],
)
def test_samplers_that_do_not_fit_are_refused(
    hamiltonian: vmc.Hamiltonian, options: dict[str, object], message: str
) -> None:
    with pytest.raises(pb.PullbackError, match=message):
        make_chains(hamiltonian, 10, 0, **options)


def test_rhat_of_mixed_stuck_and_constant_chains() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(200, 50, 1, generator=generator, dtype=torch.float64)
    stuck = mixed + 5 * torch.randn(200, 1, 1, generator=generator, dtype=torch.float64)
    assert float(gelman_rubin(mixed)) == pytest.approx(1.0, abs=0.01)
    assert float(gelman_rubin(stuck)) > 3
    constant = torch.ones(4, 3, 1, dtype=torch.float64)
    assert float(gelman_rubin(constant)) == 1.0
    frozen = constant * torch.tensor([1.0, 1.0, -1.0, -1.0]).view(4, 1, 1)
    assert float(gelman_rubin(frozen)) == math.inf


def test_error_bars_account_for_autocorrelation() -> None:
    """An AR(1) process with τ = ρ/(1 − ρ): the error is √(1 + 2τ) times that of free samples."""
    generator = torch.Generator().manual_seed(1)
    chains, length, rho = 400, 200, 0.8
    value = torch.randn(chains, generator=generator, dtype=torch.float64)
    series = []
    for _ in range(length):
        noise = torch.randn(chains, generator=generator, dtype=torch.float64)
        value = rho * value + math.sqrt(1 - rho**2) * noise
        series.append(value)
    energies = torch.stack(series, 1).to(torch.complex128)
    statistics = summarize(energies, torch.ones(chains, length, 1))
    assert statistics.autocorrelation == pytest.approx(4.0, rel=0.15)
    assert statistics.error == pytest.approx(math.sqrt(9 / (chains * length)), rel=0.1)
    one_chain = summarize(energies[:100].reshape(1, -1), torch.ones(1, 100 * length, 1))
    assert one_chain.samples == 100 * length
    assert one_chain.error == pytest.approx(math.sqrt(9 / (100 * length)), rel=0.5)
