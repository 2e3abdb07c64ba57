"""Symmetric states: ψ averaged over permutations of the sites and over spin inversion."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from .amplitude import LogAmplitude
from .lattice import Lattice


class Symmetrized(nn.Module):
    r"""ψ(s) = Σ_g χ_g ψ₀(g s)/|G| for a network of ψ₀, over a group of the lattice.

    It returns log ψ as the network does: (N,) real, or (N, 2) for log-amplitude and phase. A
    forward pass evaluates the network |G| times.

    Args:
        network: log ψ₀ of configurations (N, sites).
        lattice: whose translations and point group are averaged over.
        translations, point_group: which of them.
        spin_inversion: 1 averages over s and −s, −1 takes the odd state, None leaves it out.
        characters: χ_g of every operation, real; 1 by default. Negative ones need a network with
            a phase.
    """

    permutations: Tensor
    signs: Tensor
    characters: Tensor

    def __init__(
        self,
        network: nn.Module,
        lattice: Lattice,
        *,
        translations: bool = True,
        point_group: bool = True,
        spin_inversion: int | None = None,
        characters: Tensor | None = None,
    ) -> None:
        super().__init__()
        if spin_inversion not in (None, 1, -1):
            raise PullbackError(
                "The parity under spin inversion is not usable",
                f"got {spin_inversion!r}",
                "Use 1, −1 or None",
            )
        self.model = LogAmplitude(network)
        permutations = _choose_permutations(lattice, translations, point_group)
        count = len(permutations)
        chosen = torch.ones(count) if characters is None else characters
        if chosen.shape != (count,):
            raise PullbackError(
                "The characters do not fit the group",
                f"got {tuple(chosen.shape)} for {count} operations",
                "Give one number per operation",
            )
        signs = torch.ones(count)
        if spin_inversion is not None:
            permutations = torch.cat([permutations, permutations])
            signs = torch.cat([signs, -signs])
            chosen = torch.cat([chosen, spin_inversion * chosen])
        self.register_buffer("permutations", permutations)
        self.register_buffer("signs", signs)
        self.register_buffer("characters", chosen)

    def forward(self, configurations: Tensor) -> Tensor:
        samples = len(configurations)
        images = configurations[:, self.permutations]
        images = images * self.signs.to(images.dtype)[:, None]
        log_psi = self.model(images.flatten(0, 1))
        log_psi = log_psi.unflatten(0, (samples, -1))
        characters = self.characters.to(log_psi.dtype)
        if log_psi.ndim == 2:
            return _average_positive(log_psi, characters)
        return _average_complex(log_psi, characters)


def _choose_permutations(lattice: Lattice, translations: bool, point_group: bool) -> Tensor:
    if translations and point_group:
        return lattice.space_group().unique(dim=0)
    if translations:
        return lattice.translations()
    if point_group:
        return lattice.point_group().unique(dim=0)
    return torch.arange(lattice.sites)[None]


def _average_positive(log_psi: Tensor, characters: Tensor) -> Tensor:
    """log of the mean of positive amplitudes, (N, G) -> (N,)."""
    if bool((characters < 0).any()):
        raise PullbackError(
            "A positive state has no odd part",
            "the characters are negative for some operations, and the network has no phase",
            "Use a network that returns (N, 2) or complex numbers",
        )
    return torch.logsumexp(log_psi + characters.log(), 1) - characters.sum().log()


def _average_complex(log_psi: Tensor, characters: Tensor) -> Tensor:
    """log-amplitude and phase of the mean of amplitudes, (N, G, 2) -> (N, 2)."""
    modulus = log_psi[..., 0]
    phase = log_psi[..., 1]
    largest = modulus.detach().amax(1, keepdim=True)
    weights = characters * (modulus - largest).exp()
    real = (weights * phase.cos()).mean(1)
    imaginary = (weights * phase.sin()).mean(1)
    log_modulus = 0.5 * (real.square() + imaginary.square()).log() + largest[:, 0]
    return torch.stack([log_modulus, torch.atan2(imaginary, real)], 1)
