r"""The units of several scalings with one vector of log-scales.

All units have one vector t: w_e ← w_e exp(Σ_legs power·t_unit). The effect on norms needs only the
*energies* of a parameter, the squares w_e² added up over the axes along which units do not differ.
For a linear layer these are (out, in), for whole layers they are one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from .._core.checks import require_finite_tensor
from .._core.errors import PullbackError
from .actions.scaling import Leg, Scaling


@dataclass(frozen=True)
class ScaledParameter:
    """A parameter's legs, whose units are counted in the common vector."""

    name: str
    legs: tuple[Leg, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the energies: that of all legs' units together."""
        return tuple(torch.broadcast_shapes(*(leg.unit.shape for leg in self.legs)))

    def log_factor(self, t: Tensor) -> Tensor:
        """Σ power·t_unit, (*batch, *shape)."""
        return reduce(torch.add, [leg.log_multipliers(t) for leg in self.legs])


class ScalingUnits:
    """The units of some scalings, U in all, and the parameters that they scale.

    Attributes:
        scalings: the group.
        sizes: the number of units of each scaling.
        total: U.
        parameters: everything that is scaled.
    """

    def __init__(self, scalings: Sequence[Scaling], params: Mapping[str, Tensor]) -> None:
        self.scalings = tuple(scalings)
        self.sizes = tuple(scaling.units for scaling in self.scalings)
        self.total = sum(self.sizes)
        _refuse_unusable(self.scalings, params)
        legs: dict[str, list[Leg]] = {}
        start = 0
        for scaling in self.scalings:
            for leg in scaling.legs:
                unit = _align_unit(leg, scaling.units, params[leg.name])
                unit = torch.where(unit < 0, -1, unit + start)
                legs.setdefault(leg.name, []).append(Leg(leg.name, unit, leg.power))
            start += scaling.units
        self.parameters = tuple(ScaledParameter(name, tuple(ls)) for name, ls in legs.items())

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are scaled."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def powers(self) -> Tensor:
        """Σ_legs power of every parameter and unit, (parameters, U), where each is one block."""
        first_unit = self.parameters[0].legs[0].unit
        identity = torch.eye(self.total, dtype=decision_dtype(first_unit), device=first_unit.device)
        return torch.stack([p.log_factor(identity).reshape(-1) for p in self.parameters])

    @cached_property
    def colors(self) -> list[list[int]]:
        """Scalings that share no parameter, in as few classes as a greedy choice gives."""
        names = [set(scaling.names) for scaling in self.scalings]
        colors: list[list[int]] = []
        for i in range(len(self.scalings)):
            for color in colors:
                if all(names[i].isdisjoint(names[j]) for j in color):
                    color.append(i)
                    break
            else:
                colors.append([i])
        return colors

    def exponent(self, index: int) -> float:
        """x in α = (|out|/|in|)^x, which balances a unit of this scaling by itself.

        Half of it where two units share entries: both sides of one parameter, as on a skip.
        """
        legs = self.scalings[index].legs
        largest_power = max(abs(leg.power) for leg in legs)
        names = {leg.name for leg in legs}
        if len(names) == len(legs):
            return 0.5 / largest_power
        return 0.25 / largest_power

    def split(self, t: Tensor) -> tuple[Tensor, ...]:
        """(…, U) by scaling."""
        return t.split(self.sizes, dim=-1)

    def scale(self, params: Mapping[str, Tensor], t: Tensor) -> dict[str, Tensor]:
        """Return the scaled parameters; the product is taken in the precision of t."""
        scaled = {}
        for parameter in self.parameters:
            w = params[parameter.name].detach()
            product = multiply_by_exp(w.to(t.dtype), parameter.log_factor(t))
            scaled[parameter.name] = product.to(w.dtype)
        return scaled

    def pair(self, params: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
        """⟨Z_u, v⟩ for the generators Z_u = Σ_legs power·w_u: (U,)."""
        first = params[self.parameters[0].name]
        pairs = torch.zeros(self.total, dtype=decision_dtype(first), device=first.device)
        for parameter in self.parameters:
            if parameter.name in v:
                w = params[parameter.name].detach()
                pairs += self.collect(parameter, w.to(pairs) * v[parameter.name].to(pairs))
        return pairs

    def spread(self, params: Mapping[str, Tensor], coefficients: Tensor) -> dict[str, Tensor]:
        """Σ_u a_u Z_u for coefficients a (U,), by name."""
        combination = {}
        for parameter in self.parameters:
            w = params[parameter.name].detach()
            tangent = w.to(coefficients) * parameter.log_factor(coefficients)
            combination[parameter.name] = tangent.to(w.dtype)
        return combination

    def collect(self, parameter: ScaledParameter, values: Tensor) -> Tensor:
        """Σ_legs power·(sum of the unit's values): (U,)."""
        totals = values.new_zeros(self.total)
        for leg in parameter.legs:
            totals += leg.power * leg.sums(values, self.total)
        return totals

    def log_squares(self, params: Mapping[str, Tensor]) -> LogSquares:
        """Return log Σ (w_e/m)² of each parameter over its axes without units.

        m = max |w_e| of all parameters. Squares of w_e itself may vanish or overflow.
        """
        magnitudes = []
        for parameter in self.parameters:
            w = params[parameter.name]
            require_finite_tensor(f"Parameter {parameter.name!r}", w)
            magnitudes.append(w.detach().to(decision_dtype(w)).abs())
        largest = torch.stack([w.amax() for w in magnitudes]).amax()
        largest = torch.where(largest > 0, largest, 1.0)
        energies = []
        for parameter, magnitude in zip(self.parameters, magnitudes, strict=True):
            logs = 2 * _log_ratio(magnitude, largest)
            summed = sum_in_logs(logs, parameter.shape)
            energies.append(summed.expand(parameter.shape))
        return LogSquares(energies, largest)


@dataclass(frozen=True)
class LogSquares:
    """Logarithms of squared norms.

    Attributes:
        energies: log Σ (w_e/m)² by parameter, −inf for zeros.
        largest: m.
    """

    energies: list[Tensor]
    largest: Tensor


def _log_ratio(magnitude: Tensor, largest: Tensor) -> Tensor:
    """log(w/m), also where the ratio itself underflows."""
    ratio = magnitude / largest
    is_normal = ratio > torch.finfo(magnitude.dtype).tiny
    return torch.where(is_normal, ratio.log(), magnitude.log() - largest.log())


def sum_in_logs(logs: Tensor, shape: Sequence[int]) -> Tensor:
    """log Σ exp(logs) over the axes along which a shape has size 1; these are kept."""
    axes = [d for d, size in enumerate(shape) if size == 1 and logs.shape[d] != 1]
    if not axes:
        return logs
    return logs.logsumexp(axes, keepdim=True)


def _align_unit(leg: Leg, unit_count: int, w: Tensor) -> Tensor:
    """Return the unit of each entry with as many axes as w, one number if all entries share it."""
    if unit_count == 1 and leg.is_complete:
        return leg.on(w).unit.new_zeros([1] * w.ndim)
    return leg.on(w).unit


def multiply_by_exp(w: Tensor, log_factor: Tensor) -> Tensor:
    """w·e^log_factor, in two halves: the product may be finite where the factor is not."""
    half = (log_factor / 2).exp()
    return w * half * half


def decision_dtype(w: Tensor) -> torch.dtype:
    """The dtype of norms that decide: float64, where the device has it."""
    return torch.float32 if w.device.type == "mps" else torch.float64


# --- refusals -------------------------------------------------------------------------------


def _refuse_unusable(scalings: Sequence[Scaling], params: Mapping[str, Tensor]) -> None:
    """Raise where there are no scalings, or where they are not of these parameters."""
    if not scalings:
        raise PullbackError(
            "There is no slice",
            "the model has no positive-scaling symmetry that its optimized parameters take part in",
            "Use torch.optim.SGD, or name scalings by hand: find(model, x, actions=[Scaling(...)])",
        )
    incoming: dict[int, list[tuple[Scaling, Leg]]] = {}
    for scaling in scalings:
        for leg in scaling.legs:
            if leg.name not in params or not _can_broadcast(leg, params[leg.name]):
                raise PullbackError(
                    f"The symmetry scales {leg.name!r}",
                    "the model has no such parameter, or one of another shape",
                    "Find the symmetries of this very model",
                )
            if leg.power > 0:
                earlier = incoming.setdefault(id(params[leg.name]), [])
                _refuse_overlap(scaling, leg, earlier)
                earlier.append((scaling, leg))


def _can_broadcast(leg: Leg, w: Tensor) -> bool:
    """Return True if the leg's units broadcast to the parameter's shape."""
    shape = [1] * leg.unit.ndim + list(w.shape)
    pairs = zip(reversed(leg.unit.shape), reversed(shape), strict=False)
    return all(unit_size in (1, size) for unit_size, size in pairs)


def _refuse_overlap(scaling: Scaling, leg: Leg, earlier: Sequence[tuple[Scaling, Leg]]) -> None:
    """Raise where entries lead into units of two scalings."""
    for other, other_leg in earlier:
        if other is not scaling and bool(((leg.unit >= 0) & (other_leg.unit >= 0)).any()):
            raise PullbackError(
                f"Parameter {leg.name!r} is shared across two orbits",
                f"it leads into {other.about!r} and into {scaling.about!r}, which would scale it "
                "by different numbers",
                "Scale the tied units together, or leave both scalings out",
            )
