"""Local energies E(s) = Σ_s' H(s, s') ψ(s')/ψ(s), with every configuration evaluated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.products import add_at
from .amplitude import Evaluator
from .hamiltonians import Connections, Hamiltonian


@dataclass(frozen=True)
class LocalEnergies:
    """E(s) of N samples, (N,), complex; and how many forward evaluations they took.

    Attributes:
        values: E(s); the imaginary part is zero where ψ and H are real.
        evaluated: configurations that the network was evaluated at.
        connected: non-zero elements of H, which would be as many evaluations without sharing.
    """

    values: Tensor
    evaluated: int
    connected: int


def compute_local_energies(
    hamiltonian: Hamiltonian, evaluator: Evaluator, samples: Tensor, memory: int = 2**30
) -> LocalEnergies:
    """Local energies of samples (N, sites).

    Samples are taken a chunk at a time such that the connected configurations of a chunk fit
    `memory` bytes. Within a chunk equal configurations share one evaluation.
    """
    _refuse_other_samples(hamiltonian, samples)
    row_bytes = _count_connections(hamiltonian, samples) * (samples.shape[1] + 32)
    chunk_size = max(1, memory // row_bytes)
    energies = []
    for chunk in samples.split(chunk_size):
        energies.append(_compute_chunk_energies(hamiltonian, evaluator, chunk))
    return LocalEnergies(
        torch.cat([chunk.values for chunk in energies]),
        sum(chunk.evaluated for chunk in energies),
        sum(chunk.connected for chunk in energies),
    )


def _refuse_other_samples(hamiltonian: Hamiltonian, samples: Tensor) -> None:
    """Raise unless these are configurations of ±1, (N, sites), at least one."""
    has_shape = samples.ndim == 2 and samples.shape[1] == hamiltonian.sites and len(samples) > 0
    has_sign = samples.dtype.is_signed
    if not has_shape or not has_sign or not bool((samples.abs() == 1).all()):
        raise PullbackError(
            "The samples are not configurations",
            f"got {samples.dtype} of shape {tuple(samples.shape)} for {hamiltonian.sites} sites",
            "Pass rows of ±1, such as those of enumerate_configurations(sites)",
        )


def _count_connections(hamiltonian: Hamiltonian, samples: Tensor) -> int:
    """K, from one configuration."""
    return max(1, hamiltonian.connections(samples[:1]).elements.shape[1])


def _compute_chunk_energies(
    hamiltonian: Hamiltonian, evaluator: Evaluator, samples: Tensor
) -> LocalEnergies:
    """Return Σ H_ss' ψ(s')/ψ(s) of each sample s, with ψ evaluated once at each configuration."""
    connections = hamiltonian.connections(samples)
    nonzero = connections.elements != 0
    row = nonzero.nonzero()[:, 0]
    connected = connections.configurations[nonzero]
    elements = connections.elements[nonzero]
    distinct = find_distinct_rows(torch.cat([samples, connected]))
    log_psi = evaluator.log_psi(distinct.rows)
    # log ψ in double precision: a ratio of amplitudes is the exponential of a difference
    double_dtype = torch.promote_types(log_psi.dtype, torch.float64)
    log_psi = log_psi.to(double_dtype)[distinct.position]
    log_ratio = log_psi[len(samples) :] - log_psi[: len(samples)][row]
    terms = (elements * log_ratio.exp()).to(torch.complex128)
    values = add_at(terms.new_zeros(len(samples)), row, terms)
    return LocalEnergies(values, len(distinct.rows), len(connected))


def measure_frustration(hamiltonian: Hamiltonian, evaluator: Evaluator, samples: Tensor) -> float:
    """The mean of Σ |t| + Re t over the terms t = H(s, s') ψ(s')/ψ(s) with s' ≠ s.

    It is zero where all terms are negative. Then |ψ| has the same energy under the Hamiltonian
    whose off-diagonal elements are −|H(s, s')|, of which no state is lower than the lowest of H.
    """
    connections = hamiltonian.connections(samples)
    is_other = (connections.configurations != samples[:, None]).any(-1)
    is_other &= connections.elements != 0
    row = is_other.nonzero()[:, 0]
    log_psi = evaluator.log_psi(torch.cat([samples, connections.configurations[is_other]]))
    log_psi = log_psi.to(torch.complex128)
    log_ratio = log_psi[len(samples) :] - log_psi[: len(samples)][row]
    terms = connections.elements[is_other] * log_ratio.exp()
    return float((terms.abs() + terms.real).sum()) / len(samples)


@dataclass(frozen=True)
class DistinctRows:
    """The distinct rows of a matrix of ±1, and where each row of the matrix is among them."""

    rows: Tensor
    position: Tensor


#: spins whose configuration fits one signed 64-bit number. Of more spins a step's samples are too
#: small a part of all configurations to share any that is worth the search.
_MOST_SHARED_SITES = 62


def find_distinct_rows(configurations: Tensor) -> DistinctRows:
    """The distinct rows by sorting their bits as numbers; all rows beyond 62 sites."""
    every_row = torch.arange(len(configurations), device=configurations.device)
    if configurations.shape[1] > _MOST_SHARED_SITES:
        return DistinctRows(configurations, every_row)
    _, position = torch.unique(_encode(configurations), return_inverse=True)
    count = int(position.max()) + 1
    representative = torch.empty(count, dtype=torch.long, device=configurations.device)
    representative[position] = every_row
    return DistinctRows(configurations[representative], position)


def _encode(configurations: Tensor) -> Tensor:
    """The bits of each row as one integer."""
    codes = torch.zeros(len(configurations), dtype=torch.int64, device=configurations.device)
    for spins in configurations.T:
        codes = 2 * codes + (spins > 0)
    return codes


def refuse_other_sectors(connections: Connections, samples: Tensor) -> None:
    """Raise if H leads from the samples to configurations of another magnetization."""
    nonzero = connections.elements != 0
    magnetization = samples.sum(1, dtype=torch.long)[:, None]
    changes = connections.configurations.sum(2, dtype=torch.long) != magnetization
    if bool((changes & nonzero).any()):
        raise PullbackError(
            "The Hamiltonian leaves the sector of the samples",
            "it was declared to conserve the magnetization, and connects configurations of "
            "different Σ s",
            "Use conserves_magnetization=False",
        )
