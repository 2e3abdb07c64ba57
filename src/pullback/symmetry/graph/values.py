"""The values of a graph's tensors in a walk: labels of activations, coordinates in parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..actions.charts import ReshapedParameter
from .scales import FIXED, ZERO, collapse

#: the unit of an entry that is not, or no longer, the output of a linear layer
NO_UNIT = -1


def has_units(units: Tensor) -> bool:
    """Return True if an entry is the output of a linear layer."""
    return bool((units != NO_UNIT).any())


@dataclass(frozen=True)
class Activation:
    """An activation or a constant.

    Attributes:
        scale: the label of each entry (see `Scales`), of the tensor's shape.
        unit: which output of which linear layer an entry is, as long as it was only moved about
            (see `Ledger`); `NO_UNIT` otherwise.
    """

    scale: Tensor
    unit: Tensor

    @classmethod
    def expand(cls, scale: Tensor, shape: Sequence[int], unit: Tensor | None = None) -> Activation:
        """Return labels, and units where there are any, broadcast to a shape."""
        if unit is None:
            unit = torch.tensor(NO_UNIT)
        return cls(scale.expand(tuple(shape)), unit.expand(tuple(shape)))

    @classmethod
    def constant(cls, shape: Sequence[int], *, is_zero: bool = False) -> Activation:
        """Return the labels of a tensor that no parameter enters."""
        if is_zero:
            return cls.expand(torch.tensor(ZERO), shape)
        return cls.expand(torch.tensor(FIXED), shape)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.scale.shape

    def rearrange(self, operation: Callable[[Tensor], Tensor]) -> Activation:
        """Return the activation after an operation that moves entries, repeats or drops them."""
        return Activation(operation(self.scale), operation(self.unit))

    def without_units(self) -> Activation:
        """Return the same scales, of entries that are no layer's outputs any more."""
        return Activation.expand(self.scale, self.shape)


@dataclass(frozen=True)
class ParameterCoordinates:
    """A tensor whose entries are entries of one parameter: their coordinates in it.

    They follow any operation that moves entries. Comparing them takes 33 ms for a matrix of 4096
    rows and columns, too long for every forward pass: there `maps` keeps strides
    (`ParameterEntries`).

    Attributes:
        name: the parameter.
        sizes: the parameter's shape.
        coordinates: one tensor of the view's shape for each axis of the parameter.
        view: the view's shape.
        factor: the number by which the entries are multiplied.
    """

    name: str
    sizes: tuple[int, ...]
    coordinates: tuple[Tensor, ...]
    view: tuple[int, ...]
    factor: float = 1.0

    @classmethod
    def whole(cls, name: str, sizes: Sequence[int]) -> ParameterCoordinates:
        """Return the view that is the parameter itself."""
        sizes = tuple(sizes)
        coordinates: Sequence[Tensor] = ()
        if sizes:
            coordinates = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        return cls(name, sizes, tuple(coordinates), sizes)

    @property
    def shape(self) -> torch.Size:
        """The shape of the view."""
        return torch.Size(self.view)

    @property
    def is_whole(self) -> bool:
        """Whether the view is the parameter itself, entry by entry."""
        if self.view != self.sizes:
            return False
        whole = ParameterCoordinates.whole(self.name, self.sizes)
        return all(map(torch.equal, self.coordinates, whole.coordinates))

    def rearrange(self, operation: Callable[[Tensor], Tensor]) -> ParameterCoordinates:
        """Return the view after an operation that moves entries, repeats or drops them."""
        coordinates = tuple(operation(c) for c in self.coordinates)
        if coordinates:
            view = coordinates[0].shape
        else:
            view = operation(torch.zeros(self.view)).shape
        return replace(self, coordinates=coordinates, view=tuple(view))

    def times(self, number: float) -> ParameterCoordinates:
        """Return the view with entries multiplied by a number other than 0."""
        return replace(self, factor=self.factor * number)

    def positions(self) -> Tensor:
        """Return the position of each entry in the flattened parameter.

        The result has the view's axes, of size 1 where the position does not change.
        """
        positions = torch.zeros([1] * len(self.view), dtype=torch.long)
        for size, coordinate in zip(self.sizes, self.coordinates, strict=True):
            positions = positions * size + collapse(coordinate)
        return positions

    def scatter(self, labels: Tensor) -> Tensor:
        """Return labels of the view's entries as an array on the parameter.

        The array has size 1 along axes of the parameter on which the labels do not depend.
        Entries outside the view get −1.
        """
        labels = collapse(labels.expand(self.view))
        if not self.sizes:
            return labels.reshape(())
        coordinates = [collapse(c) for c in self.coordinates]
        view_axes = self._close_axes({a for a, n in enumerate(labels.shape) if n > 1}, coordinates)
        parameter_axes = _axes_that_vary(coordinates, view_axes)
        target = [1] * labels.ndim
        for axis in view_axes:
            target[axis] = self.view[axis]
        array_shape = [1] * len(self.sizes)
        index = [torch.zeros((), dtype=torch.long)] * len(self.sizes)
        for axis in parameter_axes:
            array_shape[axis] = self.sizes[axis]
            index[axis] = coordinates[axis].expand(target)
        array = torch.full(array_shape, -1)
        array[tuple(index)] = labels.expand(target)
        return array

    @staticmethod
    def _close_axes(view_axes: set[int], coordinates: Sequence[Tensor]) -> set[int]:
        """Return the smallest set of the view's axes that is closed and contains these.

        A set is closed if every coordinate that changes along one of its axes changes only along
        its axes: then the coordinates along it can be indexed without the other axes.
        """
        while True:
            closure = set(view_axes)
            for parameter_axis in _axes_that_vary(coordinates, view_axes):
                shape = coordinates[parameter_axis].shape
                closure.update(axis for axis, size in enumerate(shape) if size > 1)
            if closure <= view_axes:
                return view_axes
            view_axes = closure

    def make_first_axis_mask(self) -> Tensor:
        """Return which positions along the parameter's first axis the view has: (sizes[0],)."""
        if not self.sizes:
            return torch.ones(1, dtype=torch.bool)
        mask = torch.zeros(self.sizes[0], dtype=torch.bool)
        mask[collapse(self.coordinates[0]).flatten()] = True
        return mask


def _axes_that_vary(coordinates: Sequence[Tensor], view_axes: set[int]) -> set[int]:
    """Return the axes of the parameter whose coordinate changes along one of the view's axes."""
    varying: set[int] = set()
    for parameter_axis, coordinate in enumerate(coordinates):
        if any(coordinate.shape[axis] > 1 for axis in view_axes):
            varying.add(parameter_axis)
    return varying


Value = Activation | ParameterCoordinates


@dataclass(frozen=True)
class MatrixEntries:
    """A block of a matrix (out, in) that a parameter holds.

    Attributes:
        matrix: the whole matrix.
        rows: of the block's outputs in it.
        columns: of the block's inputs in it.
    """

    matrix: ReshapedParameter
    rows: Tensor
    columns: Tensor


def find_matrix(entries: ParameterCoordinates) -> MatrixEntries | None:
    """Return the matrix (out, in) that a view (in, out) lies in, and where it lies.

    None where an axis of the parameter counts both inputs and outputs, as in a diagonal.
    """
    coordinates = [collapse(c) for c in entries.coordinates]
    input_axes = tuple(sorted(_axes_that_vary(coordinates, {0})))
    output_axes = tuple(sorted(_axes_that_vary(coordinates, {1})))
    if {*input_axes} & {*output_axes}:
        return None
    if len(coordinates) == 2:
        # An axis of size 1 does not vary. The other axis decides.
        is_input_first = 1 in output_axes or 0 in input_axes
        input_axes = (0,) if is_input_first else (1,)
        output_axes = (1,) if is_input_first else (0,)
    axes = (output_axes, input_axes)
    other_axes = sorted({*range(len(coordinates))} - {*input_axes, *output_axes})
    at = tuple(int(coordinates[axis].flatten()[0]) for axis in other_axes)
    return MatrixEntries(
        ReshapedParameter(entries.name, axes, at, entries.factor),
        rows=_merge_coordinates(entries, coordinates, output_axes).expand(entries.view[1]),
        columns=_merge_coordinates(entries, coordinates, input_axes).expand(entries.view[0]),
    )


def _merge_coordinates(
    entries: ParameterCoordinates, coordinates: Sequence[Tensor], axes: Sequence[int]
) -> Tensor:
    """Return coordinates along several axes of the parameter, counted as one axis: (n,) or (1,)."""
    merged = torch.zeros(1, dtype=torch.long)
    for axis in axes:
        merged = merged * entries.sizes[axis] + coordinates[axis].flatten()
    return merged
