"""Batch norms with fixed statistics: an affine layer that rescaling must respect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .action import Action, Parameters
from .scaling import Leg, Scaling
from .shifts import Shift


@dataclass(frozen=True)
class Norm:
    """y = g (x − μ)/σ + β with numbers μ and 1/σ, (C,)."""

    gain: str
    shift: str
    mean: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class Folding(Action):
    r"""A scaling of inputs of batch norms whose statistics are fixed.

    x ← αx, g ← g/α leaves g x/σ alone; the constant β − g μ/σ stays if β changes with g. In the
    coordinates (g, β − g μ/σ) it is a plain scaling.

    Attributes:
        scaling: of all parameters, the norms' gains included.
        norms: whose constants are kept.
    """

    scaling: Scaling
    norms: Sequence[Norm]

    @property
    def about(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scaling.about

    @property
    def dimension(self) -> int:
        return self.scaling.units

    @property
    def names(self) -> tuple[str, ...]:
        norms = [name for n in self.norms for name in (n.gain, n.shift)]
        return tuple(dict.fromkeys([*self.scaling.names, *norms]))

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        constants = self._changed({n: params[n] for n in self.names}, -1)
        return self._changed({**constants, **self.scaling.act(constants, element)}, 1)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        constants = self._changed({n: params[n] for n in self.names}, -1)
        still = {n: torch.zeros_like(params[n]) for n in self.names}
        return self._changed({**still, **self.scaling.tangent(constants, element)}, 1)

    def _changed(self, params: dict[str, Tensor], sign: int) -> dict[str, Tensor]:
        """Shifts β + sign·g μ/σ for all norms; linear in the parameters."""
        out = dict(params)
        for norm in self.norms:
            g = out[norm.gain]
            out[norm.shift] = out[norm.shift] + sign * g * (norm.mean * norm.inverse).to(g)
        return out


@dataclass(frozen=True)
class FoldedShift(Shift):
    r"""b ← b + c before a batch norm with fixed statistics, β ← β − c g/σ.

    Attributes:
        units: how many numbers c there are.
        source: the bias of the layer before.
        norm: which takes it away, output by output.
        places: of the outputs in the norm.
    """

    units: int
    source: Leg
    norm: Norm
    places: Tensor
    about: str = "shift"

    @property
    def dimension(self) -> int:
        return self.units

    @property
    def names(self) -> tuple[str, ...]:
        return (self.source.name, self.norm.shift)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        b, shift = params[self.source.name].detach(), params[self.norm.shift].detach()
        c, at = element.to(b), self.places.to(b.device)
        rate = (params[self.norm.gain].detach() * self.norm.inverse.to(b))[at]
        return {
            self.source.name: self.source.rates(c).expand(b.shape),
            self.norm.shift: torch.zeros_like(shift).index_add(0, at, -c * rate),
        }
