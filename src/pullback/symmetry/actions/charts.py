"""Actions on what is computed from parameters, in terms of the parameters.

A chart computes a value from parameters and puts a new one back: a normalized weight, a matrix that
a parameter holds in another shape, the constant of a batch norm with fixed statistics. What acts on
the values acts on the parameters, w ← write(act(read(w))), and tangents follow by differentiation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.func import jvp

from .scaling import Action, Leg, Parameters, Scaling


class Chart(Protocol):
    """A value of some parameters."""

    @property
    def own(self) -> tuple[str, ...]:
        """The parameters that are written."""
        ...

    def read(self, params: Parameters) -> Tensor:
        """The value."""
        ...

    def write(self, params: Parameters, value: Tensor) -> dict[str, Tensor]:
        """The parameters that have this value, from others nearby."""
        ...


@dataclass(frozen=True)
class NormalizedWeight:
    """W = g v/‖v‖, with norms over all axes but `dim`; g has size 1 along those."""

    gain: str
    vector: str
    dim: int

    @property
    def own(self) -> tuple[str, ...]:
        return self.gain, self.vector

    def _length(self, v: Tensor) -> Tensor:
        """‖v‖, of the shape of g."""
        axes = [d for d in range(v.ndim) if d != self.dim]
        return torch.linalg.vector_norm(v, 2, axes, keepdim=True)

    def read(self, params: Parameters) -> Tensor:
        g, v = params[self.gain].detach(), params[self.vector].detach()
        return v * (g.view(self._length(v).shape) / self._length(v))

    def write(self, params: Parameters, value: Tensor) -> dict[str, Tensor]:
        """v ← W'‖v‖/g and g ← g‖W'‖/‖W‖, which keeps g's sign; where g is zero both stay."""
        g, v = params[self.gain].detach(), params[self.vector].detach()
        size = self._length(v)
        wide = g.view(size.shape)
        safe = torch.where(wide != 0, wide, 1.0)
        length = torch.where(wide != 0, self._length(value), 0.0)
        return {
            self.vector: torch.where(wide != 0, value * (size / safe), v),
            self.gain: (wide.sign() * length).view(g.shape),
        }

    def radial(self, params: Parameters) -> Scaling:
        """The length of v, which does nothing: a number for each place of `dim`."""
        n = params[self.vector].shape[self.dim]
        shape = [n if d == self.dim else 1 for d in range(params[self.vector].ndim)]
        about = f"length of {self.vector}, which a weight normalization takes away"
        return Scaling(n, [Leg(self.vector, torch.arange(n).view(shape), 1)], about)


@dataclass(frozen=True)
class MatrixView:
    """Entries of a parameter as a matrix (outputs, inputs), such as the transpose of w in x @ w.

    Attributes:
        name: the parameter.
        outputs, inputs: its axes that are merged to the matrix's rows and to its columns.
        at: the place along its other axes, as of one expert in a stack.
    """

    name: str
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    at: tuple[int, ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        return (self.name,)

    def _matrix(self, w: Tensor) -> Tensor:
        rest = [d for d in range(w.ndim) if d not in (*self.outputs, *self.inputs)]
        chosen = w.permute(*rest, *self.outputs, *self.inputs)[self.at]
        return chosen.reshape(prod(chosen.shape[: len(self.outputs)]), -1)

    def read(self, params: Parameters) -> Tensor:
        return self._matrix(params[self.name])

    def write(self, params: Parameters, value: Tensor) -> dict[str, Tensor]:
        w = params[self.name]
        places = self._matrix(torch.arange(w.numel(), device=w.device).view(w.shape))
        new = w.flatten().index_copy(0, places.flatten(), value.flatten())
        return {self.name: new.view(w.shape)}


@dataclass(frozen=True)
class FixedNorm:
    """y = g (x − μ)/σ + β with numbers μ and 1/σ, (C,): its constant is β − g μ/σ."""

    gain: str
    shift: str
    mean: Tensor
    inverse: Tensor

    @property
    def own(self) -> tuple[str, ...]:
        return self.gain, self.shift

    def _centre(self, params: Parameters) -> Tensor:
        g = params[self.gain]
        return g * (self.mean * self.inverse).to(g)

    def read(self, params: Parameters) -> Tensor:
        return params[self.shift] - self._centre(params)

    def write(self, params: Parameters, value: Tensor) -> dict[str, Tensor]:
        return {self.shift: value + self._centre(params)}


class ChartAction(Action):
    """An action on the values of charts, in terms of the parameters.

    Args:
        inner: what acts, on values by the names that stand for them.
        charts: by those names. Those that stand under the name of a parameter keep their value.
    """

    def __init__(self, inner: Action, charts: Mapping[str, Chart]) -> None:
        self.inner, self.charts = inner, charts
        self.about, self.reads = inner.about, inner.reads
        self._written = {n: c for n, c in charts.items() if n in inner.names or n in c.own}
        for name, chart in charts.items():
            self.about = self.about.replace(name, chart.own[-1])

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    @property
    def names(self) -> tuple[str, ...]:
        direct = [n for n in self.inner.names if n not in self.charts]
        return tuple(dict.fromkeys([*direct, *(n for c in self._written.values() for n in c.own)]))

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        return self._write(params, self.inner.act(with_values(params, self.charts), element))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        seen = with_values(params, self.charts)
        moved = self.inner.tangent(seen, element)
        at = {n: seen[n].detach() for n in moved}
        return jvp(lambda values: self._write(params, values), (at,), (moved,))[1]

    def _write(self, params: Parameters, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = {n: params[n].detach() for n in self.names}
        out.update({n: v for n, v in values.items() if n not in self.charts})
        for name, chart in self._written.items():
            value = values[name] if name in values else chart.read(params)
            out.update(chart.write(out, value))
        return out


def with_values(params: Parameters, charts: Mapping[str, Chart]) -> dict[str, Tensor]:
    """The parameters, and the values of charts."""
    return {**params, **{name: chart.read(params) for name, chart in charts.items()}}


def in_parameters(action: Action, charts: Mapping[str, Chart]) -> Action:
    """The action without names that stand for values of charts."""
    if isinstance(action, Scaling):
        action = _on_gains(action, charts)
    used = {n: c for n, c in charts.items() if action.reads or n in action.names}
    return ChartAction(action, used) if used else action


def _on_gains(action: Scaling, charts: Mapping[str, Chart]) -> Scaling:
    """The scaling with g in place of each normalized W whose vectors it leaves in directions.

    A scaling that multiplies whole vectors of W multiplies g; else v has to turn.
    """
    known = {n: c for n, c in charts.items() if isinstance(c, NormalizedWeight)}
    turned = {leg.name for leg in action.legs if leg.name in known and _turns(leg, known[leg.name])}
    legs = [
        Leg(known[leg.name].gain, leg.unit, leg.power)
        if leg.name in known and leg.name not in turned
        else leg
        for leg in action.legs
    ]
    return Scaling(action.units, legs, action.about)


def _turns(leg: Leg, weight: NormalizedWeight) -> bool:
    return any(n != 1 for d, n in enumerate(leg.unit.shape) if d != weight.dim)
