"""Hamiltonians against Kronecker products of Pauli matrices."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback import vmc
from pullback.testing import assert_close
from pullback.vmc.hamiltonians import refuse_non_hermitian
from tests.vmc.states import dense_heisenberg, dense_ising

LATTICES = [vmc.Chain(4), vmc.Chain(5), vmc.Chain(7), vmc.Square(2, 4), vmc.Square(3)]


@pytest.mark.parametrize("lattice", LATTICES, ids=repr)
def test_transverse_field_ising(lattice: vmc.Lattice) -> None:
    hamiltonian = vmc.TransverseFieldIsing(lattice, field=0.7)
    want = dense_ising(lattice, 0.7)
    assert_close(hamiltonian.dense(), want.real, 1e-14, "H")


@pytest.mark.parametrize("j2", [0.0, 0.5])
@pytest.mark.parametrize("lattice", LATTICES, ids=repr)
def test_heisenberg(lattice: vmc.Lattice, j2: float) -> None:
    hamiltonian = vmc.Heisenberg(lattice, j2=j2, sign_rule=False)
    want = dense_heisenberg(lattice, j2)
    assert_close(hamiltonian.dense(), want.real, 1e-14, "H")


@pytest.mark.parametrize("j2", [0.0, 0.5])
@pytest.mark.parametrize("lattice", [vmc.Chain(6), vmc.Square(2, 4)], ids=repr)
def test_the_sign_rule_rotates_one_sublattice(lattice: vmc.Lattice, j2: float) -> None:
    """H is rotated by diag((−1)^{spins up on one sublattice}): the spectrum stays."""
    sublattice = lattice.sublattice()
    assert sublattice is not None
    basis = vmc.enumerate_configurations(lattice.sites)
    spins_up = ((basis > 0) & (sublattice == 1)).sum(1)
    sign = 1.0 - 2.0 * (spins_up % 2).double()
    rotated = vmc.Heisenberg(lattice, j2=j2, sign_rule=True).dense()
    plain = vmc.Heisenberg(lattice, j2=j2, sign_rule=False).dense()
    assert_close(rotated, sign[:, None] * plain * sign, 1e-14, "the rotated H")
    assert vmc.Heisenberg(lattice).sign_rule


def test_the_rotated_ground_state_of_a_chain_is_positive() -> None:
    hamiltonian = vmc.Heisenberg(vmc.Chain(8))
    state = torch.linalg.eigh(hamiltonian.dense(magnetization=0)).eigenvectors[:, 0]
    state = state * state.sum().sign()
    assert float(state.min()) > 0


@pytest.mark.parametrize(
    ("hamiltonian", "energy"),
    [
        (vmc.TransverseFieldIsing(vmc.Chain(10), field=1.0), -2 / math.sin(math.pi / 20)),
        (vmc.Heisenberg(vmc.Chain(12)), -4 * 5.3873909174452),
    ],
    ids=repr,
)
def test_known_ground_energies(hamiltonian: vmc.Hamiltonian, energy: float) -> None:
    """The Ising chain in closed form, −2/sin(π/2N); the Heisenberg ring from the literature."""
    sector = 0 if hamiltonian.conserves_magnetization else None
    lowest = float(torch.linalg.eigvalsh(hamiltonian.dense(sector))[0])
    assert lowest == pytest.approx(energy, rel=1e-10)


def test_heisenberg_conserves_the_magnetization() -> None:
    hamiltonian = vmc.Heisenberg(vmc.Chain(6), j2=0.3)
    sizes = [len(vmc.enumerate_configurations(6, m)) for m in range(-6, 7, 2)]
    assert sum(sizes) == 64
    sector_energies = [torch.linalg.eigvalsh(hamiltonian.dense(m)) for m in range(-6, 7, 2)]
    whole = torch.linalg.eigvalsh(hamiltonian.dense())
    assert_close(torch.cat(sector_energies).sort().values, whole, 1e-12, "the spectrum by sectors")


def test_ising_has_no_sectors() -> None:
    with pytest.raises(pb.PullbackError, match="leaves the sector"):
        vmc.TransverseFieldIsing(vmc.Chain(4)).dense(magnetization=0)


def rotated_chain(s: Tensor) -> tuple[Tensor, Tensor]:
    """A chain with a complex hop: Σ (e^{iθ} σ⁺_i σ⁻_{i+1} + h.c.)."""
    sites = s.shape[1]
    site = torch.arange(sites)
    neighbour = (site + 1) % sites
    connected = s[:, None].repeat(1, sites, 1)
    connected[:, site, site] = s[:, neighbour]
    connected[:, site, neighbour] = s[:, site]
    phase = torch.exp(torch.tensor(0.4j, dtype=torch.complex128))
    raises = (s[:, site] < 0) & (s[:, neighbour] > 0)
    lowers = (s[:, site] > 0) & (s[:, neighbour] < 0)
    return connected, raises * phase + lowers * phase.conj()


def test_a_function_may_be_complex() -> None:
    hamiltonian = vmc.FunctionHamiltonian(rotated_chain, 5, conserves_magnetization=True)
    matrix = hamiltonian.dense()
    assert torch.equal(matrix, matrix.mH)
    refuse_non_hermitian(hamiltonian, vmc.enumerate_configurations(5)[3:6])


def one_way(s: Tensor) -> tuple[Tensor, Tensor]:
    """σ⁻ on the first site without σ⁺."""
    connected = s[:, None].clone()
    connected[:, 0, 0] = -1
    return connected, (s[:, :1] > 0).double()


def infinite(s: Tensor) -> tuple[Tensor, Tensor]:
    return s[:, None].clone(), torch.full((len(s), 1), float("nan"))


@pytest.mark.parametrize(
    ("function", "message"), [(one_way, "not Hermitian"), (infinite, "not finite")]
)
def test_operators_that_are_not_hermitian_are_refused(function: object, message: str) -> None:
    hamiltonian = vmc.FunctionHamiltonian(function, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(pb.PullbackError, match=message):
        refuse_non_hermitian(hamiltonian, vmc.enumerate_configurations(3)[-2:])


def test_functions_that_do_not_fit_are_refused() -> None:
    hamiltonian = vmc.FunctionHamiltonian(lambda s: (s, s), 3)
    with pytest.raises(pb.PullbackError, match="do not fit"):
        hamiltonian.dense()


@pytest.mark.parametrize(
    ("connected", "elements", "message"),
    [(lambda s: 1.5 * s, 1.0, "other numbers"), (lambda s: s, True, "truth values")],
)
def test_rows_of_other_numbers_are_refused(
    connected: Callable[[Tensor], Tensor], elements: float, message: str
) -> None:
    hamiltonian = vmc.FunctionHamiltonian(
        lambda s: (connected(s)[:, None], torch.full((len(s), 1), elements)), 3
    )
    with pytest.raises(pb.PullbackError, match=message):
        hamiltonian.dense()


@pytest.mark.parametrize("field", [math.nan, "strong"])
def test_couplings_are_finite_numbers(field: float) -> None:
    with pytest.raises(pb.PullbackError, match="field="):
        vmc.TransverseFieldIsing(vmc.Chain(4), field=field)


def test_an_odd_ring_has_no_sign_rule() -> None:
    assert not vmc.Heisenberg(vmc.Chain(5)).sign_rule
    with pytest.raises(pb.PullbackError, match="two sublattices"):
        vmc.Heisenberg(vmc.Chain(5), sign_rule=True)
