"""Means over Markov chains with their errors, and the signs that chains do not mix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EnergyStatistics:
    """The energy from samples of several chains.

    Attributes:
        energy: the mean of the local energies' real part.
        error: its standard error, from the scatter of the chains' own means, or of segments of one.
        variance: of the local energies; it is zero for an eigenstate.
        rhat: Gelman and Rubin's R̂ of the local energies: the scatter of all samples over that
            within chains. Near 1 for chains that have mixed; NaN where each gave one sample.
        spin_rhat: the largest R̂ of a single spin. It grows with the autocorrelation of spins, and
            is infinite for chains that never leave one of several sectors.
        autocorrelation: the integrated time, in samples of a chain; NaN where they have one each.
        samples: how many there were.
    """

    energy: float
    error: float
    variance: float
    rhat: float
    spin_rhat: float
    autocorrelation: float
    samples: int


def summarize(local_energies: Tensor, configurations: Tensor) -> EnergyStatistics:
    """Return statistics of complex energies (chains, per_chain) at configurations (…, sites)."""
    energies = local_energies.real.double()
    samples = energies.numel()
    energy = float(energies.mean())
    variance = float(local_energies.sub(local_energies.mean()).abs().square().mean())
    if len(energies) == 1:
        energies = _divide_chain(energies)
        configurations = _divide_chain(configurations)
    chains, per_chain = energies.shape
    chain_means = energies.mean(1)
    scatter = float(chain_means.var()) if chains > 1 else math.nan
    rhat = math.nan
    spin_rhat = math.nan
    autocorrelation = math.nan
    if per_chain > 1 and chains > 1:
        rhat = float(gelman_rubin(energies[..., None]))
        spin_rhat = float(gelman_rubin(configurations.double()).max())
        autocorrelation = _estimate_autocorrelation_time(scatter, variance, per_chain)
    if chains == 1:
        scatter = variance
        chains = per_chain
    return EnergyStatistics(
        energy=energy,
        error=math.sqrt(scatter / chains) if chains > 1 else math.nan,
        variance=variance,
        rhat=rhat,
        spin_rhat=spin_rhat,
        autocorrelation=autocorrelation,
        samples=samples,
    )


def _divide_chain(values: Tensor) -> Tensor:
    """Return a single chain (1, n, ...) as up to 16 chains, its segments of equal length."""
    length = values.shape[1]
    segments = max(1, min(16, length // 2))
    per_segment = length // segments
    return values[0, : segments * per_segment].unflatten(0, (segments, per_segment))


def gelman_rubin(values: Tensor) -> Tensor:
    """Return R̂ of observables (chains, per_chain, k): (k,).

    R̂² = (n − 1)/n + Var(chain means)/W, with the mean variance W within chains of n samples. An
    observable that is the same everywhere has R̂ = 1; one that differs between chains and never
    within them has R̂ = ∞.
    """
    per_chain = values.shape[1]
    within = values.var(1).mean(0)
    between = values.mean(1).var(0)
    ratio = torch.where(between > 0, between / within, 1 / per_chain)
    return ((per_chain - 1) / per_chain + ratio).sqrt()


def _estimate_autocorrelation_time(scatter: float, variance: float, per_chain: int) -> float:
    """Return τ ≥ 0 from Var(chain mean) = (1 + 2τ) variance/n; `scatter` is the left side."""
    if variance == 0:
        return 0.0
    return max(0.0, (per_chain * scatter / variance - 1) / 2)
