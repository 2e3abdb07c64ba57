"""Metropolis chains that sample |ψ|², many side by side on the network's device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError, require
from .amplitude import Evaluator
from .hamiltonians import Hamiltonian


class Move(Enum):
    """What a chain proposes."""

    #: one spin is turned over: every configuration can be reached
    FLIP = "flip"
    #: two opposite spins change places: Σ s stays the same
    EXCHANGE = "exchange"


@dataclass(frozen=True)
class Metropolis:
    """How samples of |ψ|² are drawn.

    Attributes:
        chains: how many run side by side; by default one for every sample, at most 1,024 on a CPU
            and 8,192 on a GPU.
        moves: proposals between two samples of a chain; by default as many as there are sites.
        thermalization: proposals before the first sample; by default twenty times `moves`.
        proposal: "flip" or "exchange"; by default exchanges where H conserves the magnetization.
        magnetization: Σ s of all samples under exchanges; by default 0, or 1 for an odd number.
    """

    chains: int | None = None
    moves: int | None = None
    thermalization: int | None = None
    proposal: str | None = None
    magnetization: int | None = None

    def __post_init__(self) -> None:
        for name in ("chains", "moves", "thermalization"):
            value = getattr(self, name)
            usable = value is None or (isinstance(value, int) and value >= 1)
            require(usable, f"Metropolis({name}=)", value, "Use an integer ≥ 1, or None")
        known = (None, *(move.value for move in Move))
        require(self.proposal in known, "Metropolis(proposal=)", self.proposal, f"Use {known}")
        is_whole = isinstance(self.magnetization, int) and not isinstance(self.magnetization, bool)
        require(
            self.magnetization is None or is_whole,
            "Metropolis(magnetization=)",
            self.magnetization,
            "Use an integer, or None",
        )


@dataclass(frozen=True)
class ChainShape:
    """The numbers of a `Metropolis` once the problem is known.

    Attributes:
        chains: those of this process.
        per_chain: samples that each chain gives at a time.
        moves: proposals between two samples of a chain.
        thermalization: proposals before the first sample.
    """

    chains: int
    per_chain: int
    moves: int
    thermalization: int


@dataclass(frozen=True)
class Proposal:
    """Where the chains may go next.

    Attributes:
        configurations: one per chain, (chains, sites).
        log_correction: log of the probability of the way back over that of the way, (chains,).
    """

    configurations: Tensor
    log_correction: Tensor


class MarkovChains:
    """The state of all chains: configurations, log |ψ| there, and the random generator.

    Args:
        hamiltonian: which configurations belong together, and which spins may be exchanged.
        options: as given by the user.
        samples: how many are drawn at a time.
        seed: of the proposals.
        device: where the chains are.
    """

    def __init__(
        self,
        hamiltonian: Hamiltonian,
        options: Metropolis,
        samples: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.sites = hamiltonian.sites
        self.move = _choose_move(hamiltonian, options)
        self.magnetization = self._choose_magnetization(options.magnetization)
        self.shape = _choose_shape(options, samples, self.sites, device)
        self._generator = torch.Generator(device).manual_seed(seed)
        if self.move is Move.EXCHANGE:
            _refuse_single_site(self.sites)
        self._bonds = hamiltonian.exchange_bonds().to(device)
        self._device = device
        self.configurations = self._draw_configurations()
        self.is_thermalized = False
        #: share of the proposals of the last draw that were accepted
        self.acceptance = math.nan
        #: accepted proposals of every chain in the last draw
        self.accepted_by_chain = torch.zeros(self.shape.chains, device=device)

    def _choose_magnetization(self, magnetization: int | None) -> int | None:
        """Return Σ s of the chains, or None if moves change it; raise if nothing has this sum."""
        if self.move is Move.FLIP:
            if magnetization is not None:
                raise PullbackError(
                    "Flips do not keep the magnetization",
                    f"magnetization={magnetization} was asked for",
                    'Use proposal="exchange", with a Hamiltonian that conserves it',
                )
            return None
        if magnetization is None:
            return self.sites % 2
        possible = abs(magnetization) <= self.sites and (self.sites - magnetization) % 2 == 0
        if not possible:
            raise PullbackError(
                f"There is no configuration of magnetization {magnetization}",
                f"Σ s of {self.sites} spins has the parity of their number, and is at most that",
                "Use another magnetization=, or another number of sites",
            )
        return magnetization

    def _draw_configurations(self) -> Tensor:
        """Random configurations of the sector, (chains, sites), int8."""
        shape = (self.shape.chains, self.sites)
        noise = torch.rand(shape, generator=self._generator, device=self._device)
        if self.magnetization is None:
            return torch.where(noise < 0.5, -1, 1).to(torch.int8)
        spins_up = (self.sites + self.magnetization) // 2
        rank = noise.argsort(1).argsort(1)
        return torch.where(rank < spins_up, 1, -1).to(torch.int8)

    def continue_from(self, others: MarkovChains) -> None:
        """Start where the first of the other chains are, if those have reached |ψ|²."""
        if not others.is_thermalized:
            return
        self.configurations = others.configurations[: self.shape.chains].clone()
        self.is_thermalized = True

    def draw(self, evaluator: Evaluator) -> Tensor:
        """Samples of |ψ|², (chains, per_chain, sites); chains go on from where they were."""
        log_modulus = evaluator.log_modulus(self.configurations)
        self._refuse_undefined(log_modulus)
        if not self.is_thermalized:
            log_modulus = self._run(evaluator, log_modulus, self.shape.thermalization)
            self.is_thermalized = True
        self.accepted_by_chain.zero_()
        drawn = []
        for _ in range(self.shape.per_chain):
            log_modulus = self._run(evaluator, log_modulus, self.shape.moves)
            drawn.append(self.configurations.clone())
        self.acceptance = float(self.accepted_by_chain.mean()) / (
            self.shape.moves * self.shape.per_chain
        )
        self._refuse_zero_amplitude(log_modulus)
        return torch.stack(drawn, 1)

    def _run(self, evaluator: Evaluator, log_modulus: Tensor, moves: int) -> Tensor:
        """Make proposals and return log |ψ| where the chains are afterwards."""
        for _ in range(moves):
            proposal = self._propose()
            proposed_log_modulus = evaluator.log_modulus(proposal.configurations)
            gain = 2 * (proposed_log_modulus - log_modulus) + proposal.log_correction
            noise = torch.rand(len(gain), generator=self._generator, device=self._device)
            # a chain that is where ψ vanishes (−inf − −inf is NaN) may go anywhere
            accepted = (noise.log() < gain) | (log_modulus == -torch.inf)
            self.configurations = torch.where(
                accepted[:, None], proposal.configurations, self.configurations
            )
            log_modulus = torch.where(accepted, proposed_log_modulus, log_modulus)
            self.accepted_by_chain += accepted
        return log_modulus

    def _propose(self) -> Proposal:
        """One proposal per chain: a flip of any spin, or an exchange of two opposite spins."""
        if self.move is Move.EXCHANGE:
            return self._propose_exchange()
        proposed = self.configurations.clone()
        chain = torch.arange(self.shape.chains, device=self._device)
        proposed[chain, self._draw_integers(self.sites)] *= -1
        return Proposal(proposed, torch.zeros(self.shape.chains, device=self._device))

    def _propose_exchange(self) -> Proposal:
        """Exchange the spins of a bond that is drawn from those with opposite spins.

        The number n of such bonds may change, and with it the probability 1/n of a proposal. So
        |ψ(s')|²/|ψ(s)|² is multiplied by n(s)/n(s'). A configuration without such a bond stays.
        """
        is_opposite = self._find_opposite_bonds(self.configurations)
        noise = torch.rand(is_opposite.shape, generator=self._generator, device=self._device)
        first, second = self._bonds[torch.where(is_opposite, noise, -1.0).argmax(1)].T
        chain = torch.arange(self.shape.chains, device=self._device)
        proposed = self.configurations.clone()
        proposed[chain, first] = self.configurations[chain, second]
        proposed[chain, second] = self.configurations[chain, first]
        bonds_before = is_opposite.sum(1)
        bonds_after = self._find_opposite_bonds(proposed).sum(1)
        log_correction = bonds_before.clamp(min=1).log() - bonds_after.clamp(min=1).log()
        return Proposal(proposed, log_correction)

    def _find_opposite_bonds(self, configurations: Tensor) -> Tensor:
        """Where the spins of a bond differ, (chains, bonds)."""
        return configurations[:, self._bonds[:, 0]] != configurations[:, self._bonds[:, 1]]

    def _draw_integers(self, bound: int) -> Tensor:
        shape = (self.shape.chains,)
        return torch.randint(bound, shape, generator=self._generator, device=self._device)

    def _refuse_undefined(self, log_modulus: Tensor) -> None:
        if bool(torch.isnan(log_modulus).any() | (log_modulus == torch.inf).any()):
            raise UndefinedAmplitude(
                "The network gives no amplitude",
                "log ψ is NaN or +infinity at configurations of the chains",
                "Check the network's initialization, or lower lr=",
            )

    def _refuse_zero_amplitude(self, log_modulus: Tensor) -> None:
        share = float((log_modulus == -torch.inf).double().mean())
        if share > 0:
            raise UndefinedAmplitude(
                "The amplitude is zero where the chains are",
                f"log |ψ| is −infinity at {share:.0%} of the chains, and no proposal led away",
                "Use a network that is not zero on large parts of the sector",
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, to go on to the same bits."""
        return {
            "configurations": self.configurations.cpu(),
            "generator": self._generator.get_state(),
            "is_thermalized": self.is_thermalized,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.configurations = state["configurations"].to(self._device)
        self._generator.set_state(state["generator"])
        self.is_thermalized = state["is_thermalized"]


class UndefinedAmplitude(PullbackError):
    """log ψ is NaN, infinite, or −infinity at samples."""


def _choose_move(hamiltonian: Hamiltonian, options: Metropolis) -> Move:
    """Return the move of the options, or the one that suits the Hamiltonian."""
    if options.proposal is None:
        if hamiltonian.conserves_magnetization:
            return Move.EXCHANGE
        return Move.FLIP
    move = Move(options.proposal)
    if move is Move.EXCHANGE and not hamiltonian.conserves_magnetization:
        raise PullbackError(
            "Exchanges sample one sector only",
            f"{hamiltonian!r} connects configurations of different magnetization, which the "
            "chains would never see",
            'Use proposal="flip"',
        )
    return move


def _refuse_single_site(sites: int) -> None:
    """Raise where there is no pair of spins to exchange."""
    require(sites > 1, "A Hamiltonian of one site that conserves Σ s", sites, "Use more sites")


def _choose_shape(
    options: Metropolis, samples: int, sites: int, device: torch.device
) -> ChainShape:
    most = 1024 if device.type == "cpu" else 8192
    chains = options.chains or min(samples, most)
    moves = options.moves or sites
    thermalization = options.thermalization or 20 * moves
    return ChainShape(chains, -(-samples // chains), moves, thermalization)
