"""Actions on what is computed from parameters, in terms of the parameters.

A chart computes a value from parameters and puts a new one back: a matrix that a parameter holds in
another shape, the constant of a batch norm with fixed statistics. What acts on the values acts on
the parameters, w ← write(act(read(w))), and tangents follow by differentiation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.func import jvp

from .scaling import Action, Parameters


@dataclass(frozen=True)
class ParameterView:
    """Entries of a parameter as a matrix or vector, such as the transpose of w in x @ w.

    Attributes:
        name: the parameter.
        axes: those of the parameter that are merged to each axis of the value: for a matrix those
            of outputs and those of inputs.
        at: the place along its other axes, as of one expert in a stack.
        factor: what the entries are multiplied by.
    """

    name: str
    axes: tuple[tuple[int, ...], ...]
    at: tuple[int, ...] = ()
    factor: float = 1.0

    @property
    def own(self) -> tuple[str, ...]:
        """The parameters that are written."""
        return (self.name,)

    def _entries(self, w: Tensor) -> Tensor:
        used = [d for merged in self.axes for d in merged]
        rest = [d for d in range(w.ndim) if d not in used]
        sizes = [prod(w.shape[d] for d in merged) for merged in self.axes]
        return w.permute(*rest, *used)[self.at].reshape(sizes)

    def read(self, params: Parameters) -> Tensor:
        """Return its value at these parameters."""
        return self.factor * self._entries(params[self.name])

    def write(self, params: Parameters, value: Tensor) -> dict[str, Tensor]:
        """The parameters that have this value, from others nearby."""
        w = params[self.name]
        places = self._entries(torch.arange(w.numel(), device=w.device).view(w.shape))
        new = w.flatten().index_copy(0, places.flatten(), value.flatten() / self.factor)
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
        """The parameters that are written."""
        return self.gain, self.shift

    def _centre(self, params: Parameters) -> Tensor:
        g = params[self.gain]
        return g * (self.mean * self.inverse).to(g)

    def read(self, params: Parameters) -> Tensor:
        """The constant."""
        return params[self.shift] - self._centre(params)

    def write(self, params: Parameters, value: Tensor) -> dict[str, Tensor]:
        """The shift that makes it this one."""
        return {self.shift: value + self._centre(params)}


Chart = ParameterView | FixedNorm


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
    used = {n: c for n, c in charts.items() if action.reads or n in action.names}
    return ChartAction(action, used) if used else action
