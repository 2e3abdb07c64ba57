r"""The way along an orbit to its point on a slice, from norms alone.

On a slice pairs of squared norms are equal: in = out, one pair per scale. Points of an orbit have
log-scales t, and `imbalance` is log(out/in) at t. Two kinds of norms offer `imbalance`,
`newton_step` and `dead`:

    UnitNorms     in_u and out_u of every unit           balanced slices
    BlockNorms    norms of neighboring blocks of layers  slices of equal norms

`solve_log_scales` solves imbalance(t) = 0 for both. Far away each t_u moves by a share of its
imbalance that balances the unit by itself (¼ where its powers are ±1), for units that share no
parameter at once; this never overshoots. Near by, Newton's method ends at round-off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .scaling_units import ScalingUnits


@dataclass(frozen=True)
class RetractionThresholds:
    """Numbers that steer the solution of imbalance(t) = 0.

    Attributes:
        iterations: at most. Sweeps converge linearly, and more slowly in longer chains. A
            bound on time alone: Newton's method ends nearly all runs before.
        balanced: an imbalance of this many times the parameters' round-off is none: norms are sums
            of rounded squares.
        enough: share of the parameters' round-off below which half and single precision keep
            nothing: a result is rounded to half a unit, and four bits are to spare.
        near_round_off: an imbalance below which a Newton step that gains nothing is the last. It
            is quadratic there: from 1e-6 one step would reach 1e-12.
        newton_residual: the largest relative residual with which a Newton step is solved for: one
            digit per step is enough far away, and nearer the imbalance itself is the bound.
    """

    iterations: int = 400
    balanced: float = 16.0
    enough: float = 1 / 16
    near_round_off: float = 1e-6
    newton_residual: float = 0.1


THRESHOLDS = RetractionThresholds()


class Norms(Protocol):
    """What a slice compares, along an orbit.

    Attributes:
        units: that scale the parameters.
        zeros: t = 0, (U,).
        newton_radius: Newton's method is tried where no imbalance is larger.
        dead: (U,) units that no scale can bring to the slice.
    """

    units: ScalingUnits
    newton_radius: float
    zeros: Tensor
    dead: Tensor

    def imbalance(self, t: Tensor) -> Tensor:
        """Return log(out/in) of every unit, 0 for dead ones: (U,)."""
        ...

    def newton_step(self, t: Tensor, tolerance: float) -> Tensor:
        """Return Newton's step for imbalance(t) = 0, with a relative error of about this size."""
        ...


@dataclass(frozen=True)
class OrbitPoint:
    """A point of the orbit; both comparisons are False where an imbalance is NaN.

    Attributes:
        t: its log-scales, (U,).
        imbalance: the largest |log(out/in)| of its units.
    """

    t: Tensor
    imbalance: float

    @classmethod
    def at(cls, norms: Norms, t: Tensor) -> OrbitPoint:
        """Return the point at t with its imbalance."""
        return cls(t, _largest_imbalance(norms, t))

    def halves(self, earlier: OrbitPoint) -> bool:
        """Return True if the imbalance is at most half of the earlier one."""
        return self.imbalance <= earlier.imbalance / 2

    def improves(self, earlier: OrbitPoint) -> bool:
        """Return True if the imbalance is below the earlier one."""
        return self.imbalance < earlier.imbalance


def solve_log_scales(norms: Norms, t: Tensor, eps: float) -> Tensor:
    """Return log-scales (U,) of the orbit's point on the slice, from t on.

    Where the norms agree to the parameters' own round-off eps, t stays as it is.
    """
    point = OrbitPoint.at(norms, t)
    if point.imbalance <= THRESHOLDS.balanced * eps:
        return t
    target = 0.0
    if eps > torch.finfo(torch.float64).eps:
        target = THRESHOLDS.enough * eps
    for _ in range(THRESHOLDS.iterations):
        trial = None
        if point.imbalance <= norms.newton_radius:
            tolerance = min(THRESHOLDS.newton_residual, point.imbalance)
            trial = OrbitPoint.at(norms, point.t + norms.newton_step(point.t, tolerance))
            if point.imbalance < THRESHOLDS.near_round_off and not trial.halves(point):
                return trial.t if trial.improves(point) else point.t
        if trial is None or not trial.improves(point):
            trial = OrbitPoint.at(norms, sweep(norms, point.t))
        point = trial
        if point.imbalance <= target:
            break
    return point.t


def sweep(norms: Norms, t: Tensor) -> Tensor:
    """Return t after each unit was balanced by itself, class after class of `units.colors`."""
    sizes = torch.tensor(norms.units.sizes, device=t.device)
    for color in norms.units.colors:
        rates = torch.zeros(len(sizes), dtype=t.dtype)
        for i in color:
            rates[i] = norms.units.exponent(i) / 2
        t = t + rates.to(t.device).repeat_interleave(sizes) * norms.imbalance(t)
    return t


def _largest_imbalance(norms: Norms, t: Tensor) -> float:
    return float(norms.imbalance(t).abs().amax())
