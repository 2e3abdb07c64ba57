r"""All units of several scalings in one vector t of log-scales: w_e ← w_e exp(Σ_legs power·t_unit).

What a scaling does to the norms of a parameter needs only its *energies*: the squares w_e², added
up over the axes along which units do not differ. For a linear layer these are (out, in), for whole
layers they are one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..actions.scaling import Leg, Scaling


@dataclass(frozen=True)
class ScaledParameter:
    """A parameter's legs, counted in the common vector of units."""

    name: str
    legs: tuple[Leg, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the energies: that of all legs' units together."""
        return tuple(torch.broadcast_shapes(*(leg.unit.shape for leg in self.legs)))

    def log_factor(self, t: Tensor) -> Tensor:
        """Σ power·t_unit, (*batch, *shape)."""
        return reduce(torch.add, [leg.rates(t) for leg in self.legs])


class ScalingUnits:
    """The units of some scalings, U in all, and the parameters that they scale."""

    def __init__(self, scalings: Sequence[Scaling], params: Mapping[str, Tensor]) -> None:
        self.scalings = tuple(scalings)
        self.sizes = tuple(s.units for s in self.scalings)
        self.total = sum(self.sizes)
        _refuse(self.scalings, params)
        legs: dict[str, list[Leg]] = {}
        start = 0
        for scaling in self.scalings:
            for leg in scaling.legs:
                w = params[leg.name]
                shape = [1] * (w.ndim - leg.unit.ndim) + list(leg.unit.shape)
                unit = leg.unit.to(w.device).reshape(shape)
                if scaling.units == 1 and leg.complete:
                    unit = unit.new_zeros([1] * w.ndim)
                unit = torch.where(unit < 0, -1, unit + start)
                legs.setdefault(leg.name, []).append(Leg(leg.name, unit, leg.power))
            start += scaling.units
        self.parts = tuple(ScaledParameter(name, tuple(found)) for name, found in legs.items())

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are scaled."""
        return tuple(part.name for part in self.parts)

    @property
    def powers(self) -> Tensor:
        """Σ_legs power of every parameter and unit, (parameters, U), where each is one block."""
        first = self.parts[0].legs[0].unit
        eye = torch.eye(self.total, dtype=wide(first), device=first.device)
        return torch.stack([part.log_factor(eye).reshape(-1) for part in self.parts])

    @cached_property
    def colors(self) -> list[list[int]]:
        """Scalings that share no parameter, in as few classes as a greedy choice finds."""
        names = [set(s.names) for s in self.scalings]
        out: list[list[int]] = []
        for i, mine in enumerate(names):
            for color in out:
                if all(mine.isdisjoint(names[j]) for j in color):
                    color.append(i)
                    break
            else:
                out.append([i])
        return out

    def exponent(self, index: int) -> float:
        """x in α = (|out|/|in|)^x, which balances a unit of this scaling by itself.

        Half of it where two units share entries: both sides of one parameter, as on a skip.
        """
        legs = self.scalings[index].legs
        apart = len({leg.name for leg in legs}) == len(legs)
        return (0.5 if apart else 0.25) / max(abs(leg.power) for leg in legs)

    def split(self, t: Tensor) -> tuple[Tensor, ...]:
        """(…, U) by scaling."""
        return t.split(self.sizes, dim=-1)

    def scaled(self, params: Mapping[str, Tensor], t: Tensor) -> dict[str, Tensor]:
        """The scaled parameters; the product is taken in the precision of t."""
        out = {}
        for part in self.parts:
            w = params[part.name].detach()
            out[part.name] = times_exp(w.to(t.dtype), part.log_factor(t)).to(w.dtype)
        return out

    def pair(self, params: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
        """⟨Z_u, v⟩ for the generators Z_u = Σ_legs power·w_u: (U,)."""
        first = params[self.parts[0].name]
        out = torch.zeros(self.total, dtype=wide(first), device=first.device)
        for part in self.parts:
            w = params[part.name].detach()
            if part.name in v:
                out += self.collect(part, w.to(out) * v[part.name].to(out))
        return out

    def spread(self, params: Mapping[str, Tensor], a: Tensor) -> dict[str, Tensor]:
        """Σ_u a_u Z_u, by name."""
        out = {}
        for part in self.parts:
            w = params[part.name].detach()
            out[part.name] = (w.to(a) * part.log_factor(a)).to(w.dtype)
        return out

    def collect(self, part: ScaledParameter, values: Tensor) -> Tensor:
        """Σ_legs power·(sum of the unit's values): (U,)."""
        out = values.new_zeros(self.total)
        for leg in part.legs:
            out += leg.power * leg.sums(values, self.total)
        return out


def times_exp(w: Tensor, log: Tensor) -> Tensor:
    """w·e^log, in two halves: the product may be finite where the factor is not."""
    half = (log / 2).exp()
    return w * half * half


def wide(w: Tensor) -> torch.dtype:
    """The dtype of norms that decide: float64, where the device has it."""
    return torch.float32 if w.device.type == "mps" else torch.float64


def _refuse(scalings: Sequence[Scaling], params: Mapping[str, Tensor]) -> None:
    """Raise where there are no scalings, or where they are not of these parameters."""
    if not scalings:
        raise PullbackError(
            "There is no slice",
            "the model has no positive-scaling symmetry that its optimized parameters take part in",
            "Use torch.optim.SGD, or name scalings by hand: find(model, x, actions=[Scaling(...)])",
        )
    into: dict[int, list[tuple[Scaling, Leg]]] = {}
    for scaling in scalings:
        for leg in scaling.legs:
            if leg.name not in params or not _fits(leg, params[leg.name]):
                raise PullbackError(
                    f"The symmetry scales {leg.name!r}",
                    "the model has no such parameter, or one of another shape",
                    "Find the symmetries of this very model",
                )
            if leg.power > 0:
                earlier = into.setdefault(id(params[leg.name]), [])
                _refuse_overlap(scaling, leg, earlier)
                earlier.append((scaling, leg))


def _fits(leg: Leg, w: Tensor) -> bool:
    """Whether the leg's units broadcast to the parameter's shape."""
    have, told = [1] * leg.unit.ndim + list(w.shape), leg.unit.shape
    return all(n in (1, size) for n, size in zip(told[::-1], have[::-1], strict=False))


def _refuse_overlap(scaling: Scaling, leg: Leg, earlier: Sequence[tuple[Scaling, Leg]]) -> None:
    """Raise where entries lead into units of two scalings."""
    for other, theirs in earlier:
        if other is not scaling and bool(((leg.unit >= 0) & (theirs.unit >= 0)).any()):
            raise PullbackError(
                f"Parameter {leg.name!r} is shared across two orbits",
                f"it leads into {other.about!r} and into {scaling.about!r}, which would scale it "
                "by different numbers",
                "Scale the tied units together, or leave both scalings out",
            )
