"""What stands for a tensor during a walk: labels of its entries, or the view of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .scales import FIXED, ZERO, collapse

#: an entry that is no linear layer's output any more
NONE = -1


@dataclass(frozen=True)
class Act:
    """An activation or a constant.

    Attributes:
        scale: the label of each entry (see `Scales`), of the tensor's shape.
        unit: which output of which linear layer an entry is, as long as it was only moved about.
    """

    scale: Tensor
    unit: Tensor

    @classmethod
    def of(cls, scale: Tensor, shape: Sequence[int], unit: Tensor | None = None) -> Act:
        """Labels broadcast to a shape."""
        unit = torch.tensor(NONE) if unit is None else unit
        return cls(scale.expand(tuple(shape)), unit.expand(tuple(shape)))

    @classmethod
    def constant(cls, shape: Sequence[int], *, zero: bool = False) -> Act:
        """A tensor that no parameter enters."""
        return cls.of(torch.tensor(ZERO if zero else FIXED), shape)

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.scale.shape

    def moved(self, move: Callable[[Tensor], Tensor]) -> Act:
        """The entries rearranged."""
        return Act(move(self.scale), move(self.unit))

    def plain(self) -> Act:
        """The same entries after something happened to them."""
        return Act.of(self.scale, self.shape)


@dataclass(frozen=True)
class Ref:
    """A view of a parameter: the coordinates of each entry in it.

    Attributes:
        name: the parameter.
        sizes: its shape.
        coords: one tensor of the view's shape for each axis of the parameter.
        view: the view's shape.
    """

    name: str
    sizes: tuple[int, ...]
    coords: tuple[Tensor, ...]
    view: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, sizes: Sequence[int]) -> Ref:
        """The parameter itself."""
        sizes = tuple(sizes)
        coords = []
        for d, n in enumerate(sizes):
            shape = [n if d == e else 1 for e in range(len(sizes))]
            coords.append(torch.arange(n).view(shape).expand(sizes))
        return cls(name, sizes, tuple(coords), sizes)

    @property
    def shape(self) -> torch.Size:
        """Of the view."""
        return torch.Size(self.view)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Ref:
        """The entries rearranged."""
        coords = tuple(move(c) for c in self.coords)
        view = coords[0].shape if coords else move(torch.zeros(self.view)).shape
        return replace(self, coords=coords, view=tuple(view))

    def placed(self, labels: Tensor) -> Tensor:
        """Labels of the view's entries as an array on the parameter, size 1 where unchanging.

        Entries outside the view get −1.
        """
        small = collapse(labels.expand(self.view))
        coords = [collapse(c) for c in self.coords]
        axes = {a for a in range(small.ndim) if small.shape[a] > 1}
        while True:
            dims = {d for d, c in enumerate(coords) if any(c.shape[a] > 1 for a in axes)}
            more = {a for d in dims for a in range(small.ndim) if coords[d].shape[a] > 1}
            if more <= axes:
                break
            axes |= more
        target = [self.view[a] if a in axes else 1 for a in range(small.ndim)]
        out = torch.full([n if d in dims else 1 for d, n in enumerate(self.sizes)], -1)
        zero = torch.zeros((), dtype=torch.long)
        index = tuple(
            coords[d].expand(target) if d in dims else zero for d in range(len(self.sizes))
        )
        if not self.sizes:
            return small.reshape(())
        out[index] = small.expand(target)
        return out

    def region(self) -> Tensor:
        """Which entries along the parameter's first axis the view has: (sizes[0],) of bool."""
        if not self.sizes:
            return torch.ones(1, dtype=torch.bool)
        mask = torch.zeros(self.sizes[0], dtype=torch.bool)
        mask[collapse(self.coords[0]).flatten()] = True
        return mask


Value = Act | Ref
