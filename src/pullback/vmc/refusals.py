"""Refusals of Hamiltonians and networks that no sample would make sense with."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .amplitude import Evaluator
from .energies import refuse_other_sectors
from .hamiltonians import Hamiltonian, refuse_non_hermitian

#: entries of the comparison of all connected configurations with each other
_MOST_COMPARISONS = 2**26


def refuse_unusable_hamiltonian(hamiltonian: Hamiltonian, configurations: Tensor) -> None:
    """Raise if H is not Hermitian or leaves its sector at the first of the configurations."""
    connections = hamiltonian.connections(configurations[:1]).elements.shape[1]
    comparisons = connections**2 * hamiltonian.sites
    few = configurations[: max(1, min(32, _MOST_COMPARISONS // comparisons))]
    refuse_non_hermitian(hamiltonian, few)
    if hamiltonian.conserves_magnetization:
        refuse_other_sectors(hamiltonian.connections(few), few)


def refuse_unusable_network(evaluator: Evaluator, configurations: Tensor) -> None:
    """Raise for a network that is not a function of single configurations."""
    try:
        log_psi = evaluator.log_psi(configurations)
    except PullbackError:
        raise
    except RuntimeError as error:
        raise PullbackError(
            "The network cannot be evaluated",
            f"for configurations {tuple(configurations.shape)} it raised {error!r:.200}",
            "Use a network for as many sites as the Hamiltonian has",
        ) from error
    _refuse_low_precision(evaluator, log_psi)
    if bool(torch.isnan(log_psi).any()):
        raise PullbackError(
            "The network returned NaN",
            "log ψ is not a number at random configurations",
            "Check its initialization and its inputs of ±1",
        )
    half = -(-len(configurations) // 2)
    repeated = evaluator.log_psi(configurations[:half])
    if not _are_same_amplitudes(repeated, log_psi[:half]):
        raise PullbackError(
            "The network is not a function of the configuration",
            "log ψ of the same configurations differs between two calls",
            "Call network.eval(), and leave out dropout and batch normalization",
        )


def _refuse_low_precision(evaluator: Evaluator, log_psi: Tensor) -> None:
    dtypes = {evaluator.dtype, log_psi.real.dtype}
    if not dtypes <= {torch.float32, torch.float64}:
        raise PullbackError(
            "The network is not precise enough",
            f"its parameters are {evaluator.dtype} and log ψ is {log_psi.dtype}, but amplitudes "
            "are exponentials of log ψ",
            "Use a network in float32 or float64",
        )


def _are_same_amplitudes(log_psi: Tensor, other: Tensor) -> bool:
    """Return True if log ψ is the same up to round-off, phases modulo 2π."""
    if log_psi.is_complex() != other.is_complex():
        return False
    tolerance = max(1e-2, 1e3 * torch.finfo(log_psi.dtype).eps)
    modulus = log_psi.real
    is_same = torch.isclose(modulus, other.real, rtol=tolerance, atol=tolerance)
    if log_psi.is_complex():
        is_same &= (log_psi.imag - other.imag).cos() > 1 - tolerance
    return bool(is_same.all())
