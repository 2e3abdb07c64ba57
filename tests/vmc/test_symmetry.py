"""Symmetrized states against projections by enumeration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pullback as pb
from pullback import vmc
from pullback.testing import assert_close
from tests.vmc.states import KINDS, amplitudes, make_network

LATTICES = [vmc.Chain(6), vmc.Square(2, 4)]


@pytest.mark.parametrize("network_name", KINDS)
@pytest.mark.parametrize("inversion", [None, 1])
@pytest.mark.parametrize("lattice", LATTICES, ids=repr)
def test_the_state_is_the_mean_over_the_group(
    lattice: vmc.Lattice, network_name: str, inversion: int | None
) -> None:
    network = make_network(network_name, lattice.sites)
    symmetric = vmc.Symmetrized(network, lattice, spin_inversion=inversion)
    basis = vmc.enumerate_configurations(lattice.sites)
    group = lattice.space_group().unique(dim=0)
    images = [amplitudes(network, basis[:, g]) for g in group]
    if inversion is not None:
        images += [amplitudes(network, -basis[:, g]) for g in group]
    want = torch.stack(images).mean(0)
    values = amplitudes(symmetric, basis)
    assert_close(torch.view_as_real(values), torch.view_as_real(want), 1e-12, "ψ")
    for g in group:
        moved = torch.view_as_real(amplitudes(symmetric, basis[:, g]))
        assert_close(moved, torch.view_as_real(values), 1e-12, "invariance")


@pytest.mark.parametrize("network_name", ["phase", "complex"])
def test_the_odd_state_changes_sign_under_inversion(network_name: str) -> None:
    lattice = vmc.Chain(5)
    odd = vmc.Symmetrized(
        make_network(network_name, 5), lattice, point_group=False, spin_inversion=-1
    )
    basis = vmc.enumerate_configurations(5)
    psi = torch.view_as_real(amplitudes(odd, basis))
    assert_close(torch.view_as_real(amplitudes(odd, -basis)), -psi, 1e-9, "ψ(−s) = −ψ(s)")


def test_sectors_of_momentum_by_characters() -> None:
    """Momentum π of a chain: characters (−1)^shift."""
    lattice = vmc.Chain(6)
    characters = 1.0 - 2.0 * (torch.arange(6) % 2)
    network = make_network("phase", 6)
    state = vmc.Symmetrized(network, lattice, point_group=False, characters=characters)
    basis = vmc.enumerate_configurations(6, 0)
    psi = torch.view_as_real(amplitudes(state, basis))
    shifted = torch.view_as_real(amplitudes(state, basis[:, lattice.translations()[1]]))
    assert_close(shifted, -psi, 1e-9, "T ψ = −ψ")


def test_gradients_pass_through() -> None:
    lattice = vmc.Chain(4)
    network = make_network("phase", 4)
    state = vmc.Symmetrized(network, lattice, spin_inversion=1)
    basis = vmc.enumerate_configurations(4)
    amplitudes(state, basis).abs().sum().backward()
    assert all(
        p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in network.parameters()
    )


@pytest.mark.slow
def test_symmetric_states_have_lower_energy_after_the_same_steps() -> None:
    """A symmetrized network goes through minimize as any other."""
    lattice = vmc.Chain(6)
    hamiltonian = vmc.Heisenberg(lattice)
    exact = float(torch.linalg.eigvalsh(hamiltonian.dense(0))[0])
    state = vmc.Symmetrized(make_network("real", 6), lattice, spin_inversion=1)
    result = vmc.minimize(hamiltonian, state, steps=60, samples=200, progress=False)
    assert result.energy == pytest.approx(exact, rel=1e-3)


def test_refusals() -> None:
    lattice = vmc.Chain(4)
    network: nn.Module = make_network("real", 4)
    with pytest.raises(pb.PullbackError, match="inversion"):
        vmc.Symmetrized(network, lattice, spin_inversion=2)
    with pytest.raises(pb.PullbackError, match="characters"):
        vmc.Symmetrized(network, lattice, characters=torch.ones(3))
    odd = vmc.Symmetrized(network, lattice, spin_inversion=-1)
    with pytest.raises(pb.PullbackError, match="no odd part"):
        odd(torch.ones(2, 4).double())


def test_attention_is_the_same_with_and_without_derivatives() -> None:
    """A convolution where derivatives are taken, and else a product with circulant matrices."""
    torch.manual_seed(0)
    network = vmc.FactoredTransformer(vmc.Square(4, 6), patch=2, width=6, heads=3, blocks=2)
    network = network.double()
    spins = 2.0 * torch.randint(0, 2, (5, 24)).double() - 1
    with torch.no_grad():
        product = network(spins)
    torch.testing.assert_close(network(spins).detach(), product, rtol=1e-12, atol=1e-12)
