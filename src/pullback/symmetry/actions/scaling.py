r"""Scalings: positive numbers, one per unit, that multiply some weights and divide others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def log_multipliers(self, log_scales: Tensor) -> Tensor:
        """power·t_unit for log-scales t (*batch, units): (*batch, *unit.shape)."""
        # Index −1 reads the appended zero: such entries are not moved.
        zero = log_scales.new_zeros(*log_scales.shape[:-1], 1)
        padded = torch.cat([log_scales, zero], -1)
        return self.power * padded[..., self.unit.to(log_scales.device)]

    def on(self, w: Tensor) -> Leg:
        """The leg with a unit index that has as many axes as w, on its device."""
        shape = [1] * (w.ndim - self.unit.ndim) + list(self.unit.shape)
        return Leg(self.name, self.unit.to(w.device).reshape(shape), self.power)

    @property
    def is_complete(self) -> bool:
        """Whether every entry belongs to a unit."""
        return not bool((self.unit < 0).any())

    def sums(self, values: Tensor, units: int) -> Tensor:
        """Σ of the entries (*batch, *shape) that belong to each unit: (*batch, units)."""
        # Sum first over the axes along which the unit does not change.
        axes = [d - self.unit.ndim for d, size in enumerate(self.unit.shape) if size == 1]
        if axes:
            values = values.sum(axes, keepdim=True)
        if self.unit.ndim:
            flat = values.flatten(-self.unit.ndim)
        else:
            flat = values.unsqueeze(-1)
        # The last place collects the entries of no unit.
        totals = flat.new_zeros(*flat.shape[:-1], units + 1)
        index = self.unit.flatten().to(flat.device) % (units + 1)
        return totals.index_add_(-1, index, flat)[..., :-1]


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
            rate = leg.log_multipliers(element.to(params[leg.name]))
            if leg.name in rates:
                rate = rates[leg.name] + rate
            rates[leg.name] = rate
        return {name: rate * params[name].detach() for name, rate in rates.items()}

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        scaled: dict[str, Tensor] = {}
        for leg in self.legs:
            w = scaled.get(leg.name, params[leg.name])
            scaled[leg.name] = w * leg.log_multipliers(element.to(w)).exp()
        return scaled

    @property
    def is_two_sided(self) -> bool:
        """Whether some legs are multiplied and others divided."""
        signs = {leg.power > 0 for leg in self.legs}
        return len(signs) == 2

    def merged(self) -> Scaling:
        """Return the scaling of all units by one common factor."""
        legs = [Leg(leg.name, leg.unit.clamp(max=0), leg.power) for leg in self.legs]
        return Scaling(1, legs, f"{self.about}, all units alike")

    def only(self, keep: Tensor) -> Scaling:
        """Return the scaling of the units where the mask (units,) is true, numbered anew."""
        new_number = torch.where(keep, keep.cumsum(0) - 1, -1)
        new_number = torch.cat([new_number, torch.tensor([-1])])  # for entries of no unit
        legs = [Leg(leg.name, new_number[leg.unit], leg.power) for leg in self.legs]
        moving_legs = [leg for leg in legs if bool((leg.unit >= 0).any())]
        return Scaling(int(keep.sum()), moving_legs, self.about)


def two_sided(actions: Iterable[object]) -> list[Scaling]:
    """Return the scalings that multiply some weights and divide others.

    A scaling with one side only (of weights before a norm) has nothing to balance.
    """
    return [a for a in actions if isinstance(a, Scaling) and a.is_two_sided]
