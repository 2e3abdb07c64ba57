"""Actions on values that are computed from parameters, in terms of the parameters.

A chart computes a value from parameters and writes a new value back: a matrix that a parameter
holds in another shape, or the constant of a batch norm with fixed statistics. An action on the
values becomes one on the parameters, w ← write(act(read(w))). Its tangents follow by
differentiation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.func import jvp

from .action import Action, Parameters


@dataclass(frozen=True)
class ReshapedParameter:
    """Entries of a parameter as a matrix or vector, such as the transpose of w in x @ w.

    Attributes:
        name: the parameter.
        axes: for each axis of the value, the axes of the parameter that are merged into it. A
            matrix has those of its outputs first, then those of its inputs.
        at: the position along the parameter's other axes, such as one expert in a stack.
        factor: the number that the entries are multiplied by.
    """

    name: str
    axes: tuple[tuple[int, ...], ...]
    at: tuple[int, ...] = ()
    factor: float = 1.0

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The parameters that the value is computed from and written to."""
        return (self.name,)

    def _select(self, w: Tensor) -> Tensor:
        """Entries of w, or of anything of its shape, in the shape of the value."""
        merged_axes = [axis for axes in self.axes for axis in axes]
        other_axes = [axis for axis in range(w.ndim) if axis not in merged_axes]
        sizes = [_count_entries(w, axes) for axes in self.axes]
        return w.permute(*other_axes, *merged_axes)[self.at].reshape(sizes)

    def read(self, params: Parameters) -> Tensor:
        """Return the value at these parameters."""
        return self.factor * self._select(params[self.name])

    def write(self, params: Parameters, value: Tensor) -> dict[str, Tensor]:
        """Return parameters that have this value; entries that it does not contain stay."""
        w = params[self.name]
        positions = self._select(torch.arange(w.numel(), device=w.device).view(w.shape))
        new = w.flatten().index_copy(0, positions.flatten(), value.flatten() / self.factor)
        return {self.name: new.view(w.shape)}


def _count_entries(w: Tensor, axes: tuple[int, ...]) -> int:
    return prod(w.shape[axis] for axis in axes)


@dataclass(frozen=True)
class FixedNorm:
    """y = g (x − μ)/σ + β with numbers μ and 1/σ, (C,): its constant is β − g μ/σ.

    Attributes:
        gain: the name of g.
        shift: the name of β.
        mean: μ.
        inverse: 1/σ.
    """

    gain: str
    shift: str
    mean: Tensor
    inverse: Tensor

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The parameters that the constant is computed from."""
        return self.gain, self.shift

    def _offset(self, params: Parameters) -> Tensor:
        """g μ/σ."""
        gain = params[self.gain]
        return gain * (self.mean * self.inverse).to(gain)

    def read(self, params: Parameters) -> Tensor:
        """Return the constant at these parameters."""
        return params[self.shift] - self._offset(params)

    def write(self, params: Parameters, value: Tensor) -> dict[str, Tensor]:
        """Return the shift that gives the constant this value."""
        return {self.shift: value + self._offset(params)}


Chart = ReshapedParameter | FixedNorm


class ChartAction(Action):
    """An action on the values of charts, in terms of the parameters.

    Args:
        inner: acts on values, by the names that stand for them.
        charts: by those names. A chart under the name of one of its own parameters keeps its value
            (the constant of a norm whose gain is scaled).
    """

    def __init__(self, inner: Action, charts: Mapping[str, Chart]) -> None:
        self.inner = inner
        self.charts = charts
        self.about = inner.about
        self.reads = inner.reads
        self._written_charts = {
            name: chart
            for name, chart in charts.items()
            if name in inner.names or name in chart.parameter_names
        }
        for name, chart in charts.items():
            self.about = self.about.replace(name, chart.parameter_names[-1])

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    @property
    def names(self) -> tuple[str, ...]:
        names = [name for name in self.inner.names if name not in self.charts]
        for chart in self._written_charts.values():
            names.extend(chart.parameter_names)
        return tuple(dict.fromkeys(names))

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        values = self.inner.act(with_values(params, self.charts), element)
        return self._write(params, values)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        values = with_values(params, self.charts)
        value_tangents = self.inner.tangent(values, element)
        moved_values = {name: values[name].detach() for name in value_tangents}
        result = jvp(lambda moved: self._write(params, moved), (moved_values,), (value_tangents,))
        tangents = result[1]
        return tangents

    def _write(self, params: Parameters, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that have these values."""
        written = {name: params[name].detach() for name in self.names}
        written.update({n: value for n, value in values.items() if n not in self.charts})
        for name, chart in self._written_charts.items():
            if name in values:
                value = values[name]
            else:
                value = chart.read(params)
            written.update(chart.write(written, value))
        return written


def with_values(params: Parameters, charts: Mapping[str, Chart]) -> dict[str, Tensor]:
    """Return the parameters together with the values of charts, by name."""
    return {**params, **{name: chart.read(params) for name, chart in charts.items()}}


def in_parameters(action: Action, charts: Mapping[str, Chart]) -> Action:
    """Return the action with names of charts replaced by the parameters behind them."""
    needed = {n: chart for n, chart in charts.items() if action.reads or n in action.names}
    if not needed:
        return action
    return ChartAction(action, needed)
