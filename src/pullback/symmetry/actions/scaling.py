"""Positive numbers that multiply the entries of parameters, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .action import Action, Parameters


@dataclass(frozen=True)
class Leg:
    """How one parameter takes part in a scaling.

    Attributes:
        name: of the parameter.
        unit: which unit an entry belongs to, broadcastable to the parameter's shape: (out, 1) for
            the rows of a weight, (1, in) for its columns. −1: the entry is not moved.
        power: entries are multiplied by α_unit^power.
    """

    name: str
    unit: Tensor
    power: int

    def factors(self, scales: Tensor) -> Tensor:
        """α_unit^power, of the shape of `unit`."""
        rest = scales if self.complete else torch.cat([scales, scales.new_ones(1)])
        chosen = rest[self.unit.to(scales.device)]
        return chosen if self.power == 1 else chosen**self.power

    def rates(self, element: Tensor) -> Tensor:
        """power·t_unit for log-scales t (units,): the derivative of `factors`."""
        rest = element if self.complete else torch.cat([element, element.new_zeros(1)])
        return self.power * rest[self.unit.to(element.device)]

    @property
    def complete(self) -> bool:
        """Whether every entry belongs to a unit."""
        return not bool((self.unit < 0).any())

    def sums(self, values: Tensor, units: int) -> Tensor:
        """Σ of the entries (*batch, *shape) that belong to each unit: (*batch, units)."""
        axes = [d - self.unit.ndim for d, size in enumerate(self.unit.shape) if size == 1]
        # sum first over the axes that do not tell units apart
        summed = values.sum(axes, keepdim=True) if axes else values
        flat = summed.flatten(-self.unit.ndim) if self.unit.ndim else summed.unsqueeze(-1)
        out = flat.new_zeros(*flat.shape[:-1], units + 1)  # the last one is nobody's
        return out.index_add_(-1, self.unit.flatten().to(flat.device) % (units + 1), flat)[..., :-1]


@dataclass(frozen=True)
class Scaling(Action):
    r"""w_e ← w_e α_{unit(e)}^{power}: positive numbers, one per unit.

    A unit is a neuron or channel before and after a positively homogeneous activation (incoming
    weights and bias with power 1, outgoing weights with power −1), or a whole layer.

    Attributes:
        units: how many there are.
        legs: the parameters that are scaled. One parameter may have several legs.
        about: what it is, for people.
    """

    units: int
    legs: Sequence[Leg]
    about: str = "scaling"

    @property
    def dimension(self) -> int:
        return self.units

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are scaled."""
        return tuple(dict.fromkeys(leg.name for leg in self.legs))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        rates: dict[str, Tensor] = {}
        for leg in self.legs:
            w = params[leg.name]
            rate = leg.rates(element.to(w))
            rates[leg.name] = rates[leg.name] + rate if leg.name in rates else rate
        return {name: rate * params[name].detach() for name, rate in rates.items()}

    def generators(self, params: Parameters) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for leg in self.legs:
            w = params[leg.name].detach()
            unit = leg.unit.to(w.device)
            chosen = torch.arange(self.units, device=w.device).view(-1, *[1] * unit.ndim) == unit
            moved = leg.power * chosen * w
            out[leg.name] = out[leg.name] + moved if leg.name in out else moved
        return out

    def pairing(self, params: Parameters, covector: Parameters) -> Tensor:
        one = params[self.names[0]]
        out = torch.zeros(self.units, dtype=one.dtype, device=one.device)
        for leg in self.legs:
            products = params[leg.name].detach() * covector[leg.name]
            lined = products if products.ndim else products.view([1] * leg.unit.ndim)
            out += leg.power * leg.sums(lined, self.units)
        return out

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        return self.scale(params, element.exp())

    def scale(self, params: Parameters, scales: Tensor) -> dict[str, Tensor]:
        """The scaled parameters, for α (units,)."""
        out: dict[str, Tensor] = {}
        for leg in self.legs:
            w = out.get(leg.name, params[leg.name])
            out[leg.name] = w * leg.factors(scales.to(w))
        return out

    def merged(self) -> Scaling:
        """All units scaled alike: one number for the layer."""
        legs = [Leg(leg.name, leg.unit.clamp(max=0), leg.power) for leg in self.legs]
        return Scaling(1, legs, f"{self.about}, all units alike")

    def only(self, keep: Tensor) -> Scaling:
        """The units that a mask (units,) names."""
        place = torch.cat([torch.where(keep, keep.cumsum(0) - 1, -1), torch.tensor([-1])])
        legs = [Leg(leg.name, place[leg.unit], leg.power) for leg in self.legs]
        legs = [leg for leg in legs if bool((leg.unit >= 0).any())]
        return Scaling(int(keep.sum()), legs, self.about)
