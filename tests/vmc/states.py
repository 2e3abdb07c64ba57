"""Small states for the tests: one network per kind of output, and ψ by enumeration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pullback import vmc


class WithPhase(nn.Module):
    """(N, sites) -> (N, 2): log-amplitude and phase."""

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(sites, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, s: Tensor) -> Tensor:
        return self.body(s)


class Complex(WithPhase):
    """(N, sites) -> (N,) complex."""

    def forward(self, s: Tensor) -> Tensor:
        return torch.view_as_complex(self.body(s))


class Real(nn.Module):
    """(N, sites) -> (N,) real."""

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(sites, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, s: Tensor) -> Tensor:
        return self.body(s).squeeze(-1)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "real": Real,
    "phase": WithPhase,
    "complex": Complex,
}


def make_network(name: str, sites: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[name](sites).double()


def as_complex(output: Tensor) -> Tensor:
    """log ψ, (N,) complex, from any of the three outputs."""
    if output.is_complex():
        return output
    if output.ndim == 2:
        return torch.complex(output[:, 0], output[:, 1])
    return torch.complex(output, torch.zeros_like(output))


def amplitudes(network: nn.Module, configurations: Tensor) -> Tensor:
    """ψ, (N,) complex, not normalized."""
    return as_complex(network(configurations.double())).exp()


PAULI = {
    "x": torch.tensor([[0, 1], [1, 0]], dtype=torch.complex128),
    "y": torch.tensor([[0, -1j], [1j, 0]], dtype=torch.complex128),
    "z": torch.tensor([[1, 0], [0, -1]], dtype=torch.complex128),
}


def pauli_product(sites: int, factors: dict[int, str]) -> Tensor:
    """A product of Pauli matrices over 2^sites states, the first site outermost.

    Spin −1 comes first in `enumerate_configurations`, so that every factor is written in the order
    (down, up).
    """
    matrix = torch.ones(1, 1, dtype=torch.complex128)
    for site in range(sites):
        factor = torch.eye(2, dtype=torch.complex128)
        if site in factors:
            factor = PAULI[factors[site]].flip(0, 1)
        matrix = torch.kron(matrix, factor)
    return matrix


def dense_heisenberg(lattice: vmc.Lattice, j2: float) -> Tensor:
    """Σ σ·σ over nearest plus j2 Σ σ·σ over next-nearest neighbours, by Kronecker products."""
    total = torch.zeros(2**lattice.sites, 2**lattice.sites, dtype=torch.complex128)
    for order, coupling in ((1, 1.0), (2, j2)):
        if coupling:
            for i, j in lattice.bonds(order).tolist():
                for axis in "xyz":
                    total += coupling * pauli_product(lattice.sites, {i: axis, j: axis})
    return total


def dense_ising(lattice: vmc.Lattice, field: float) -> Tensor:
    """−Σ σᶻσᶻ − field Σ σˣ by Kronecker products."""
    total = torch.zeros(2**lattice.sites, 2**lattice.sites, dtype=torch.complex128)
    for i, j in lattice.bonds().tolist():
        total -= pauli_product(lattice.sites, {i: "z", j: "z"})
    for site in range(lattice.sites):
        total -= field * pauli_product(lattice.sites, {site: "x"})
    return total
