"""Local energies against H ψ / ψ by enumeration, and the sharing of evaluations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, vmc
from pullback.testing import assert_close
from pullback.vmc.amplitude import EvaluationOptions, Evaluator, LogAmplitude
from pullback.vmc.energies import find_distinct_rows, measure_frustration
from pullback.vmc.networks import log_cosh, sum_log_cosh
from tests.vmc.states import KINDS, amplitudes, make_network
from tests.vmc.test_hamiltonians import rotated_chain

HAMILTONIANS = [
    vmc.TransverseFieldIsing(vmc.Chain(6), field=0.8),
    vmc.Heisenberg(vmc.Chain(6), j2=0.4),
    vmc.Heisenberg(vmc.Square(2, 4), j2=0.5, sign_rule=False),
    vmc.FunctionHamiltonian(rotated_chain, 6, conserves_magnetization=True),
]


def make_evaluator(network: nn.Module, chunk: int = 1000) -> Evaluator:
    return Evaluator(LogAmplitude(network), EvaluationOptions(chunk=chunk))


@pytest.mark.parametrize("network_name", KINDS)
@pytest.mark.parametrize("hamiltonian", HAMILTONIANS, ids=repr)
@pytest.mark.parametrize("memory", [2**30, 5000], ids=["at once", "in parts"])
def test_local_energies(hamiltonian: vmc.Hamiltonian, network_name: str, memory: int) -> None:
    network = make_network(network_name, hamiltonian.sites)
    basis = vmc.enumerate_configurations(hamiltonian.sites)
    psi = amplitudes(network, basis)
    want = (hamiltonian.dense().to(psi.dtype) @ psi) / psi
    local_energies = vmc.compute_local_energies(
        hamiltonian, make_evaluator(network, 7), basis, memory
    )
    assert_close(torch.view_as_real(local_energies.values), torch.view_as_real(want), 1e-12, "E(s)")


def test_equal_configurations_are_evaluated_once() -> None:
    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(6))
    network = make_network("real", 6)
    basis = vmc.enumerate_configurations(6)
    samples = basis.repeat(5, 1)
    local_energies = vmc.compute_local_energies(hamiltonian, make_evaluator(network), samples)
    assert local_energies.evaluated == 64
    assert local_energies.connected == 5 * 64 * 7


def test_connections_whose_element_is_zero_are_not_evaluated() -> None:
    """Parallel spins are not exchanged: the ferromagnet is connected with itself alone."""
    hamiltonian = vmc.Heisenberg(vmc.Chain(6))
    ferromagnet = torch.ones(1, 6, dtype=torch.int8)
    local_energies = vmc.compute_local_energies(
        hamiltonian, make_evaluator(make_network("real", 6)), ferromagnet
    )
    assert local_energies.evaluated == 1
    assert local_energies.values.item() == 6


@pytest.mark.parametrize("sites", [5, 62])
def test_distinct_rows(sites: int) -> None:
    generator = torch.Generator().manual_seed(0)
    few = 2 * torch.randint(2, (20, sites), generator=generator) - 1
    rows = few[torch.randint(20, (300,), generator=generator)].to(torch.int8)
    distinct = find_distinct_rows(rows)
    assert torch.equal(distinct.rows[distinct.position], rows)
    assert len(distinct.rows) == len(rows.unique(dim=0))


def test_rows_of_many_sites_are_not_searched() -> None:
    rows = torch.ones(4, 63, dtype=torch.int8)
    distinct = find_distinct_rows(rows)
    assert torch.equal(distinct.rows[distinct.position], rows)


def test_an_amplitude_of_zero_beside_a_sample_counts_as_zero() -> None:
    class OnlyUp(nn.Module):
        def forward(self, s: Tensor) -> Tensor:
            return torch.where(s.sum(1) >= 2, 0.0, -torch.inf)

    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(4), field=1.0)
    sample = torch.tensor([[1, 1, 1, -1]], dtype=torch.int8)
    local_energies = vmc.compute_local_energies(hamiltonian, make_evaluator(OnlyUp()), sample)
    assert local_energies.values.item() == pytest.approx(0.0 - 1.0)


@pytest.mark.parametrize("chunk", [0, -3, 2.5])
def test_a_chunk_holds_at_least_one_configuration(chunk: float) -> None:
    with pytest.raises(PullbackError, match="at least one configuration"):
        EvaluationOptions(chunk=chunk)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "samples",
    [
        torch.zeros(2, 4, dtype=torch.int8),
        torch.ones(2, 5, dtype=torch.int8),
        torch.ones(2, 4, dtype=torch.uint8),
        torch.ones(0, 4, dtype=torch.int8),
    ],
    ids=["zeros", "five sites", "unsigned", "none"],
)
def test_samples_that_are_no_configurations_are_refused(samples: Tensor) -> None:
    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(4))
    with pytest.raises(PullbackError, match="not configurations"):
        vmc.compute_local_energies(hamiltonian, make_evaluator(make_network("real", 4)), samples)


@pytest.mark.parametrize("network_name", KINDS)
@pytest.mark.parametrize("hamiltonian", HAMILTONIANS, ids=repr)
def test_frustration(hamiltonian: vmc.Hamiltonian, network_name: str) -> None:
    """Σ |t| + Re t over t = H(s, s') ψ(s')/ψ(s) off the diagonal of the dense matrix."""
    network = make_network(network_name, hamiltonian.sites)
    basis = vmc.enumerate_configurations(hamiltonian.sites)
    psi = amplitudes(network, basis).detach()
    matrix = hamiltonian.dense().to(psi.dtype)
    terms = (matrix - matrix.diagonal().diag()) * psi / psi[:, None]
    want = float((terms.abs() + terms.real).sum()) / len(basis)
    measured = measure_frustration(hamiltonian, make_evaluator(network), basis)
    assert measured == pytest.approx(want, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.complex64])
def test_amplitudes_are_evaluated_in_single_or_double_precision(dtype: torch.dtype) -> None:
    with pytest.raises(PullbackError, match="dtype"):
        EvaluationOptions(dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_cosh_by_products_is_that_of_each(dtype: torch.dtype) -> None:
    """Also where |x| is large, and for more terms than one product holds."""
    x = torch.linspace(-300, 300, 500, dtype=dtype).view(2, 250)
    x[0] /= 100
    with torch.no_grad():
        total = sum_log_cosh(x)
    want = log_cosh(x.double()).sum(1).to(dtype)
    assert_close(total, want, 10 * torch.finfo(dtype).eps, "Σ log cosh")
