"""Spin Hamiltonians as functions: configurations ↦ connected configurations and matrix elements.

Configurations are rows of ±1, the eigenvalues of σᶻ. All Hamiltonians are written in Pauli
matrices; energies in spins S = σ/2 are a quarter of those of products σ·σ.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from .._core.errors import PullbackError, require
from .lattice import Lattice


@dataclass(frozen=True)
class Connections:
    """The non-zero elements H(s, s') in the rows of N configurations s, padded to K each.

    Attributes:
        configurations: s', (N, K, sites), in the dtype of s. What stands in a row whose element is
            zero does not matter.
        elements: H(s, s'), (N, K), real or complex. The diagonal is one of the connections.
    """

    configurations: Tensor
    elements: Tensor


class Hamiltonian(ABC):
    """A Hermitian operator on spins.

    Attributes:
        sites: how many spins there are.
        conserves_magnetization: whether Σ s is the same for all connected configurations.
    """

    sites: int
    conserves_magnetization: bool = False

    @abstractmethod
    def connections(self, configurations: Tensor) -> Connections:
        """The rows of H that belong to configurations (N, sites)."""

    def exchange_bonds(self) -> Tensor:
        """The pairs of sites that a sampler may exchange, (bonds, 2): all pairs by default."""
        return torch.combinations(torch.arange(self.sites), 2)

    def dense(self, magnetization: int | None = None) -> Tensor:
        """H as a matrix over `enumerate_configurations(sites, magnetization)`, for few sites."""
        basis = enumerate_configurations(self.sites, magnetization)
        connections = self.connections(basis)
        count = len(basis)
        position = torch.full((2**self.sites,), -1)
        position[_find_basis_positions(basis)] = torch.arange(count)
        rows = torch.arange(count)[:, None].expand(connections.elements.shape)
        nonzero = connections.elements != 0
        columns = position[_find_basis_positions(connections.configurations[nonzero])]
        if bool((columns < 0).any()):
            raise PullbackError(
                "The Hamiltonian leaves the sector",
                f"it connects configurations of magnetization {magnetization} with others",
                "Leave magnetization= out",
            )
        elements = connections.elements[nonzero]
        matrix = elements.new_zeros(count, count)
        return matrix.index_put_((rows[nonzero], columns), elements, accumulate=True)


class TransverseFieldIsing(Hamiltonian):
    r"""H = −J Σ_⟨ij⟩ σᶻ_i σᶻ_j − h Σ_i σˣ_i.

    Args:
        lattice: whose nearest neighbours are coupled.
        field: h; the chain is critical at h = J.
        coupling: J.
    """

    def __init__(self, lattice: Lattice, field: float = 1.0, coupling: float = 1.0) -> None:
        _require_lattice(lattice)
        _require_finite("field=", field)
        _require_finite("coupling=", coupling)
        self.lattice = lattice
        self.sites = lattice.sites
        self.field = float(field)
        self.coupling = float(coupling)
        self._bonds = lattice.bonds()

    def connections(self, configurations: Tensor) -> Connections:
        samples, sites = configurations.shape
        elements = torch.empty(
            samples, 1 + sites, dtype=torch.float64, device=configurations.device
        )
        elements[:, 0] = -self.coupling * _multiply_bond_spins(configurations, self._bonds).sum(1)
        elements[:, 1:] = -self.field
        connected = configurations[:, None].repeat(1, 1 + sites, 1)
        every_site = torch.arange(sites, device=configurations.device)
        connected[:, 1 + every_site, every_site] *= -1
        return Connections(connected, elements)

    def __repr__(self) -> str:
        options = f"field={self.field}, coupling={self.coupling}"
        return f"TransverseFieldIsing({self.lattice!r}, {options})"


class Heisenberg(Hamiltonian):
    r"""H = Σ_⟨ij⟩ σ_i·σ_j + J₂ Σ_⟨⟨ij⟩⟩ σ_i·σ_j over nearest and next-nearest neighbours.

    σ·σ = 4 S·S: energies in spins S = σ/2 are a quarter of these. The magnetization is conserved.

    Args:
        lattice: where the spins are.
        j2: the coupling of next-nearest neighbours.
        sign_rule: whether to rotate one sublattice by π about z (Marshall's rule), after which the
            nearest-neighbour exchange is negative. Without frustration (j2 ≤ 0) the ground state
            then has no signs. By default the rotation is made where the lattice has two
            sublattices. The spectrum is the same either way.
    """

    conserves_magnetization = True

    def __init__(self, lattice: Lattice, j2: float = 0.0, sign_rule: bool | None = None) -> None:
        _require_lattice(lattice)
        _require_finite("j2=", j2)
        is_bipartite = lattice.sublattice() is not None
        if sign_rule and not is_bipartite:
            raise PullbackError(
                "Marshall's sign rule needs two sublattices",
                f"{lattice!r} has an odd length, so that neighbours cannot alternate",
                "Use sign_rule=False, or even lengths",
            )
        self.lattice = lattice
        self.sites = lattice.sites
        self.j2 = float(j2)
        self.sign_rule = is_bipartite if sign_rule is None else sign_rule
        self._bonds = lattice.bonds()
        couplings = torch.ones(len(self._bonds), dtype=torch.float64)
        exchanges = self._compute_exchange_signs(self._bonds) * couplings
        if self.j2:
            diagonal_bonds = lattice.bonds(2)
            further = torch.full((len(diagonal_bonds),), self.j2, dtype=torch.float64)
            self._bonds = torch.cat([self._bonds, diagonal_bonds])
            couplings = torch.cat([couplings, further])
            exchanges = torch.cat(
                [exchanges, self._compute_exchange_signs(diagonal_bonds) * further]
            )
        #: J of every bond, and the sign that its exchange has after the rotation, times J
        self._couplings = couplings
        self._exchanges = exchanges

    def _compute_exchange_signs(self, bonds: Tensor) -> Tensor:
        """−1 for bonds between rotated and other sites, 1 within a sublattice."""
        sublattice = self.lattice.sublattice()
        if not self.sign_rule or sublattice is None:
            return torch.ones(len(bonds), dtype=torch.float64)
        differs = sublattice[bonds[:, 0]] != sublattice[bonds[:, 1]]
        return 1.0 - 2.0 * differs.double()

    def exchange_bonds(self) -> Tensor:
        """Nearest and next-nearest neighbours, whether or not the latter are coupled."""
        return torch.cat([self.lattice.bonds(), self.lattice.bonds(2)]).unique(dim=0)

    def connections(self, configurations: Tensor) -> Connections:
        device = configurations.device
        bonds = self._bonds.to(device)
        products = _multiply_bond_spins(configurations, bonds).double()
        diagonal = products @ self._couplings.to(device)
        # σ⁺σ⁻ + σ⁻σ⁺ has the element 2 between configurations that differ by an exchange
        exchanges = (1 - products) * self._exchanges.to(device)
        connected = configurations[:, None].repeat(1, 1 + len(bonds), 1)
        every_bond = 1 + torch.arange(len(bonds), device=device)
        connected[:, every_bond, bonds[:, 0]] *= -1
        connected[:, every_bond, bonds[:, 1]] *= -1
        return Connections(connected, torch.cat([diagonal[:, None], exchanges], 1))

    def __repr__(self) -> str:
        return f"Heisenberg({self.lattice!r}, j2={self.j2}, sign_rule={self.sign_rule})"


RowFunction = Callable[[Tensor], tuple[Tensor, Tensor]]


class FunctionHamiltonian(Hamiltonian):
    """Any Hermitian operator whose rows a function computes.

    Args:
        function: configurations (N, sites) of ±1 ↦ connected configurations (N, K, sites) and
            elements (N, K), zero where a row has fewer than K; the diagonal is one of them.
        sites: how many spins there are.
        conserves_magnetization: whether Σ s is the same for all connected configurations; then
            samples stay at one magnetization.
    """

    def __init__(
        self, function: RowFunction, sites: int, conserves_magnetization: bool = False
    ) -> None:
        require(callable(function), "The Hamiltonian", function, "Pass a function")
        require(isinstance(sites, int) and sites > 0, "sites=", sites, "Use an integer > 0")
        self.function = function
        self.sites = sites
        self.conserves_magnetization = conserves_magnetization

    def connections(self, configurations: Tensor) -> Connections:
        connected, elements = self._call(configurations)
        samples, sites = configurations.shape
        fits = elements.ndim == 2 and connected.shape == (*elements.shape, sites)
        if not fits or len(elements) != samples or not elements.shape[1]:
            raise PullbackError(
                "The Hamiltonian's function returned tensors that do not fit",
                f"connected configurations {tuple(connected.shape)} and elements "
                f"{tuple(elements.shape)} for configurations {tuple(configurations.shape)}",
                "Return (N, K, sites) and (N, K)",
            )
        configurations_of_ones = connected.to(configurations.dtype)
        if connected.is_floating_point() and bool((configurations_of_ones != connected).any()):
            _refuse_other_numbers()
        return Connections(configurations_of_ones, elements)

    def _call(self, configurations: Tensor) -> tuple[Tensor, Tensor]:
        """What the function returns, if it is two tensors."""
        returned = self.function(configurations)
        is_pair = isinstance(returned, (tuple, list)) and len(returned) == 2
        if not is_pair or not all(isinstance(part, Tensor) for part in returned):
            raise PullbackError(
                "The Hamiltonian's function did not return two tensors",
                f"it returned {type(returned).__name__}",
                "Return connected configurations (N, K, sites) and elements (N, K)",
            )
        connected, elements = returned
        if connected.dtype == torch.bool or elements.dtype == torch.bool:
            raise PullbackError(
                "The Hamiltonian's function returned truth values",
                f"connected configurations are {connected.dtype}, elements {elements.dtype}",
                "Return configurations of ±1, and elements as numbers",
            )
        return connected, elements

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"FunctionHamiltonian({name}, sites={self.sites})"


def enumerate_configurations(sites: int, magnetization: int | None = None) -> Tensor:
    """All configurations of ±1, (2^sites, sites), or those with Σ s = magnetization.

    >>> enumerate_configurations(2)
    tensor([[-1, -1],
            [-1,  1],
            [ 1, -1],
            [ 1,  1]], dtype=torch.int8)
    """
    require(isinstance(sites, int) and 0 < sites <= 24, "sites=", sites, "Use at most 24 sites")
    numbers = torch.arange(2**sites)[:, None]
    bits = (numbers >> torch.arange(sites - 1, -1, -1)) & 1
    configurations = (2 * bits - 1).to(torch.int8)
    if magnetization is None:
        return configurations
    return configurations[configurations.sum(1) == magnetization]


def _find_basis_positions(configurations: Tensor) -> Tensor:
    """The position of each configuration (..., sites) in `enumerate_configurations(sites)`."""
    sites = configurations.shape[-1]
    powers = 2 ** torch.arange(sites - 1, -1, -1, device=configurations.device)
    return ((configurations > 0).long() * powers).sum(-1)


def _multiply_bond_spins(configurations: Tensor, bonds: Tensor) -> Tensor:
    """s_i s_j on every bond, (N, bonds)."""
    bonds = bonds.to(configurations.device)
    return configurations[:, bonds[:, 0]] * configurations[:, bonds[:, 1]]


def _require_finite(name: str, value: object) -> None:
    is_finite = isinstance(value, (int, float)) and math.isfinite(value)
    require(is_finite, name, value, "Use a finite number")


def _require_lattice(lattice: object) -> None:
    remedy = "Pass Chain(n), Square(n, m) or a Lattice of your own"
    require(isinstance(lattice, Lattice), "The lattice", lattice, remedy)


def refuse_non_hermitian(hamiltonian: Hamiltonian, configurations: Tensor) -> None:
    """Raise if H(s, s') is not the conjugate of H(s', s) in the rows of these configurations."""
    rows = hamiltonian.connections(configurations)
    _refuse_undefined_rows(rows)
    sites = configurations.shape[1]
    mirrored = hamiltonian.connections(rows.configurations.reshape(-1, sites))
    source = configurations[:, None].expand(rows.configurations.shape).reshape(-1, 1, sites)
    leads_back = (mirrored.configurations == source).all(-1)
    returned = torch.where(leads_back, mirrored.elements, 0).sum(1).reshape(rows.elements.shape)
    # several connections may lead to one configuration: their elements add up
    is_repeated = (rows.configurations[:, :, None] == rows.configurations[:, None]).all(-1)
    elements = (is_repeated.to(rows.elements.dtype) @ rows.elements[..., None])[..., 0]
    gap = torch.where(rows.elements != 0, (elements - returned.conj()).abs(), 0)
    largest = rows.elements.abs().max()
    if bool(gap.max() > 1e-6 * largest):
        raise PullbackError(
            "The Hamiltonian is not Hermitian",
            f"H(s, s') and the conjugate of H(s', s) differ by {float(gap.max()):.3g}",
            "Return both elements of every pair of configurations that H connects",
        )


def estimate_mean_energy(hamiltonian: Hamiltonian, configurations: Tensor) -> float:
    """The mean of H(s, s) at random configurations: tr H over the number of states."""
    rows = hamiltonian.connections(configurations)
    is_diagonal = (rows.configurations == configurations[:, None]).all(-1)
    diagonal = torch.where(is_diagonal, rows.elements, 0).sum(1)
    return float(diagonal.real.double().mean())


def _refuse_undefined_rows(rows: Connections) -> None:
    """Raise for elements that are not finite, and for configurations of other numbers than ±1."""
    if not bool(torch.isfinite(rows.elements).all()):
        raise PullbackError(
            "The Hamiltonian has elements that are not finite",
            "its rows contain NaN or infinity",
            "Check the function that computes its rows",
        )
    is_configuration = (rows.configurations.abs() == 1).all(-1)
    if not bool((is_configuration | (rows.elements == 0)).all()):
        _refuse_other_numbers()


def _refuse_other_numbers() -> NoReturn:
    raise PullbackError(
        "The Hamiltonian leads out of the configurations",
        "connected configurations contain other numbers than ±1",
        "Return rows of ±1, the eigenvalues of σᶻ",
    )
