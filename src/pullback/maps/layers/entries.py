"""Which entries of a parameter a tensor holds: a parameter, a view of it, or a copy of a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class ParameterEntries:
    """Entry i of a tensor is entry `offset` + Σ stride·i of the flattened parameter.

    Strides cost nothing at every forward pass, and products need them. They describe views only;
    a walk through a graph, once per model, also follows flips, repetitions and selections, and
    keeps the coordinates of every entry (`symmetry.graph.values.ParameterCoordinates`).
    """

    parameter: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    #: of a gathered tensor, the slice of the parameter at each position of axis 0
    index: Tensor | None = None

    @classmethod
    def of_all(cls, parameter: Tensor) -> ParameterEntries:
        """Return all entries of a parameter, in their order."""
        size = tuple(parameter.shape)
        return cls(parameter, size, contiguous_stride(size))

    @property
    def is_whole(self) -> bool:
        """Whether it is the parameter, perhaps with other axes of length 1 or axes merged."""
        has_all = self.offset == 0 and prod(self.size) == self.parameter.numel()
        return has_all and self.index is None and self.is_dense

    @property
    def is_dense(self) -> bool:
        """Whether the entries lie one after the other."""
        axes = zip(self.size, self.stride, contiguous_stride(self.size), strict=True)
        return all(size == 1 or stride == dense for size, stride, dense in axes)


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor of this size."""
    return tuple(prod(size[axis + 1 :]) for axis in range(len(size)))
