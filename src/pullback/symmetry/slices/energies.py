r"""Norms along an orbit: Φ(t) = ½ Σ_e w_e² exp(2(Mt)_e) and its derivatives, from energies.

The factor of an entry is a product over its legs, so that sums over the entries of a matrix are
products with it: Σ_j s_ij f_i g_j = f ∘ (s g). No exponential of an entry is ever taken, and the
scales of whole parameters are kept as logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..actions.scaling import Leg
from .units import Part, Units, wide


class Energy:
    """w_e² of one parameter over their largest, reduced to the axes that tell units apart.

    Its logarithm is counted from that of `unit`², which all parameters share: logarithms that are
    compared with each other are small, whatever the scale of the network.
    """

    def __init__(self, part: Part, w: Tensor, top: Tensor, unit: Tensor) -> None:
        self.part = part
        top = torch.where(top > 0, top, unit)
        ratio = top / unit
        self.log = 2 * torch.where(ratio > 0, ratio.log(), top.log() - unit.log())
        self.squares = part.reduce((w.detach().to(top) / top).square()).expand(part.shape)
        #: which of two legs tells rows apart, where the other one tells columns
        self._rows = _rows(part.legs)

    def factors(self, t: Tensor) -> tuple[list[Tensor], Tensor]:
        """exp(2·power·t_unit) of each leg over its largest, and log of what was divided out."""
        rest = torch.cat([t, t.new_zeros(1)])  # for −1: not scaled
        out, shift = [], self.log
        for leg in self.part.legs:
            y = 2 * leg.power * rest[leg.unit]
            top = y.amax()
            out.append((y - top).exp())
            shift = shift + top
        return out, shift

    def contract(self, leg: int, others: Sequence[Tensor]) -> Tensor:
        """Σ of s_e Π_{b≠leg} x_b over the entries of each place of a leg's units: `unit.shape`."""
        unit = self.part.legs[leg].unit
        if self._rows is not None:
            matrix = self.squares.reshape(self.part.legs[self._rows].unit.numel(), -1)
            matrix = matrix if leg == self._rows else matrix.mT
            return (matrix @ others[1 - leg].reshape(-1)).reshape(unit.shape)
        values = self.squares
        for b, x in enumerate(others):
            values = values if b == leg else values * x
        axes = [d for d, size in enumerate(unit.shape) if size == 1 and values.shape[d] != 1]
        return values.sum(axes, keepdim=True) if axes else values


@dataclass
class Point:
    """The energies at t: factors of legs and logarithms of scale, by parameter."""

    factors: list[list[Tensor]]
    shifts: list[Tensor]


class Energies:
    """The energies of all parameters that some units scale.

    Attributes:
        units: that scale them.
        unit: the largest |w_e| of all; energies are counted in unit².
        dead: (U,) units without an incoming or without an outgoing weight that is not zero.
    """

    def __init__(self, units: Units, params: Mapping[str, Tensor]) -> None:
        self.units = units
        tops = [_top(part.name, params[part.name]) for part in units.parts]
        self.unit = torch.stack(tops).amax()
        self.unit = torch.where(self.unit > 0, self.unit, 1.0)
        self.parts = [
            Energy(part, params[part.name], top, self.unit)
            for part, top in zip(units.parts, tops, strict=True)
        ]
        self._like = self.parts[0].squares
        into, out = self.log_sums(self.zeros())
        self.dead = ~(torch.isfinite(into) & torch.isfinite(out))

    def zeros(self) -> Tensor:
        """t = 0."""
        return self._like.new_zeros(self.units.total)

    def at(self, t: Tensor) -> Point:
        """The factors of all legs."""
        found = [energy.factors(t) for energy in self.parts]
        return Point([f for f, _ in found], [s for _, s in found])

    def log_sums(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """log Σ w²/unit² over what leads into each of the units, and over what leads out: (U,)."""
        point = self.at(t)
        into, out = torch.full_like(t, -torch.inf), torch.full_like(t, -torch.inf)
        for energy, factors, shift in zip(self.parts, point.factors, point.shifts, strict=True):
            for a, leg in enumerate(energy.part.legs):
                values = factors[a] * energy.contract(a, factors)
                sums = abs(leg.power) * leg.sums(values, self.units.total)
                side = into if leg.power > 0 else out
                torch.logaddexp(side, sums.log() + shift, out=side)
        return into, out

    def imbalance(self, t: Tensor) -> Tensor:
        """log(out/in) of every unit, 0 for dead ones."""
        into, out = self.log_sums(t)
        return torch.where(self.dead, 0.0, out - into)

    def total(self, t: Tensor) -> Tensor:
        """log Σ_e w_e²/unit², what the balanced point minimizes."""
        point = self.at(t)
        logs = [
            (f[0] * energy.contract(0, f)).sum().log() + shift
            for energy, f, shift in zip(self.parts, point.factors, point.shifts, strict=True)
        ]
        return torch.stack(logs).logsumexp(0)


def _top(name: str, w: Tensor) -> Tensor:
    """max |w_e|; raises where that is not finite."""
    w = w.detach().to(wide(w))
    top = w.abs().amax() if w.numel() else w.new_zeros(())
    if not bool(torch.isfinite(top)):
        raise PullbackError(
            f"Parameter {name!r} is not finite",
            "it contains nan or inf, so that it has no norm",
            "Load a checkpoint, or lower the learning rate",
        )
    return top


def _rows(legs: Sequence[Leg]) -> int | None:
    """Which of two legs has the earlier one of two different axes; None where that is not so."""
    axes = [[d for d, size in enumerate(leg.unit.shape) if size != 1] for leg in legs]
    if len(legs) != 2 or any(len(each) != 1 for each in axes) or axes[0] == axes[1]:
        return None
    return 0 if axes[0] < axes[1] else 1
