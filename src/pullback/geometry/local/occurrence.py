"""How much of the model the points are at which φ loses rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._core.errors import PullbackError
from .ambient import MetricLike
from .coordinates import Phi, Vector
from .point import Point


@dataclass(frozen=True)
class Occurrence:
    """How much of a parameter set, and of its image, lies where dφ is close to losing rank.

    Attributes:
        thresholds: τ, relative to the largest σ_1 drawn.
        parameters: the share of the drawn parameters with σ_d ≤ τ·σ_1.
        model: the share of the image they cover, by volume with multiplicity: each parameter
            weighs σ_1⋯σ_d, the factor by which dφ stretches the volume transverse to its kernel.
        dimension: d, the largest rank drawn.
        count: how many parameters were drawn.
    """

    thresholds: tuple[float, ...]
    parameters: tuple[float, ...]
    model: tuple[float, ...]
    dimension: int
    count: int


def occurrence(
    phi: Phi,
    draw: Callable[[torch.Generator], Vector],
    metric: MetricLike = None,
    *,
    inputs: Any = None,
    count: int = 1000,
    thresholds: Sequence[float] = (1e-1, 1e-2, 1e-3, 0.0),
    seed: int = 0,
    rcond: float | None = None,
) -> Occurrence:
    r"""A numerical look at Sard's theorem: non-proper points have measure zero *in the model*.

    Parameters are drawn at random. By the coarea formula ∫ σ_1⋯σ_d dξ over a set of parameters is
    the volume of its image, each point counted with the volume of parameters that stand for it;
    where σ_d = 0 the integrand is, so the share of the model falls to zero with τ, even where the
    share of the parameters does not.

    Args:
        phi: as in `Point`, like metric, inputs and rcond.
        draw: one random parameter from a generator.
        metric: g.
        inputs: a module's inputs.
        count: how many parameters to draw.
        thresholds: τ.
        seed: of the generator.
        rcond: what counts as zero where ranks are counted; σ's below it are zeros.
    """
    if count < 1:
        raise PullbackError("Nothing is drawn", f"got count={count}", "Draw at least one")
    generator = torch.Generator().manual_seed(seed)
    spectra = []
    for _ in range(count):
        rank = Point(phi, draw(generator), metric, inputs=inputs, rcond=rcond, check=False).rank
        kept = torch.where(rank.spectrum > rank.tolerance, rank.spectrum, 0.0)
        spectra.append(kept.double().cpu())
    sigma = torch.stack(spectra)
    dimension = int((sigma > 0).sum(1).max())
    ratio = torch.zeros(count, dtype=torch.float64)
    weight = torch.zeros(count, dtype=torch.float64)
    if dimension:
        ratio = sigma[:, dimension - 1] / sigma.max()
        weight = sigma[:, :dimension].log().sum(1)
        weight = (weight - weight.max()).exp()
    low = [ratio <= tau for tau in thresholds]
    return Occurrence(
        tuple(float(t) for t in thresholds),
        tuple(float(mask.double().mean()) for mask in low),
        tuple(float(weight[mask].sum() / weight.sum()) if dimension else 0.0 for mask in low),
        dimension,
        count,
    )
