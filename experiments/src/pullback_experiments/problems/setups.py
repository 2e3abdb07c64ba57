"""Networks and options that solve these problems, by the names of `pullback solve`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from pullback.pde import (
    Interval,
    PeriodicEmbedding,
    Ready,
    Rescaled,
    Setup,
    SpaceTime,
    Symmetric,
    mlp,
)
from pullback.pde.catalog.setup import fully_connected

from .cavity import Cavity
from .periodic import AllenCahn, GrayScott, KdV, KuramotoSivashinsky


def _harmonic(
    problem: Ready, center: float, parity: int, harmonics: int, *widths: int, **options: Any
) -> Setup:
    """A network with many harmonics in x, even (1) or odd (−1) about the center."""
    low = problem.domain.low.tolist()
    high = problem.domain.high.tolist()
    half = (high[0] - low[0]) / 2
    centered = SpaceTime(Interval(center - half, center + half), (low[1], high[1]))

    def network(seed: int) -> nn.Module:
        waves = PeriodicEmbedding(2, 0, 2.0, harmonics)
        plain = mlp(2 * harmonics + 1, *widths, len(problem.fields), seed=seed)
        return Rescaled(Symmetric(nn.Sequential(waves, *plain), 0, parity), centered)

    return Setup(problem, network, options)


OURS: dict[str, Callable[[], Setup]] = {
    "allen-cahn": lambda: fully_connected(
        AllenCahn(hard=True), 3, 24, 24, 24, 24, 1, parity=1,
        points=12_000, sampler="sobol", steps=600,
    ),
    # slabs of time: in one piece the beginning is learned first, and the rest slowly; short ones
    # where the wave breaks up
    "kdv": lambda: Setup(
        KdV(initial_weight=100),
        lambda seed: nn.Sequential(
            PeriodicEmbedding(2, 0, 2.0, harmonics=3), *mlp(7, 24, 24, 24, 1, seed=seed)
        ),
        {
            "points": {"equation": 4000, "initial": 400, "periodic": 16},
            "sampler": "sobol", "slabs": [0.25, 0.35, 0.45, 0.6, 0.8],
            "steps": 220, "patience": 30,
        },
    ),
    # chaotic: errors of a slab grow until the end, those of the first a thousandfold
    "kuramoto-sivashinsky": lambda: _harmonic(
        KuramotoSivashinsky(initial_weight=1e4), math.pi / 2, -1, 8, 16, 16,
        points={"equation": 1500, "initial": 200, "periodic": 8},
        sampler="sobol", refine=None, slabs=20, steps=250, patience=30,
    ),
    # short slabs first, where the bump reacts within a hundredth of the time
    "gray-scott": lambda: _harmonic(
        GrayScott(initial_weight=1e4), 0.0, 1, 8, 16, 16,
        points={
            "equation": 1000, "initial u": 150, "initial v": 150, "periodic u": 8, "periodic v": 8,
        },
        sampler="sobol", refine=None, steps=250, patience=30,
        slabs=[0.01, 0.02, 0.035, *(i / 40 for i in range(2, 20))],
    ),
    "cavity": lambda: fully_connected(
        Cavity(hard=True), 2, 30, 30, 3, points=3600, steps=600
    ),
    "cavity-400": lambda: fully_connected(
        Cavity(400.0, hard=True), 2, 30, 30, 30, 3,
        points=6000, sampler="sobol", steps=600,
    ),
    "cavity-1000": lambda: fully_connected(
        Cavity(1000.0, hard=True), 2, 30, 30, 30, 3,
        points=6000, sampler="sobol", steps=600,
    ),
}  # fmt: skip
