r"""Layers whose weight is W = g v/‖v‖, by weight normalization.

With c = g/‖v‖ and v̂ = v/‖v‖ on each slice that has a length of its own, moves of v turn W,

    dW = c (dv − v̂ ⟨v̂, dv⟩),        so a row for v is  c (V − v̂ ⟨v̂, V⟩)  of the row V for W.

For K-FAC the radial part, along which nothing changes, is left out: the sides are those of W, with
that of the slices scaled by c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .moments import Moments, Sharing
from .registry import Block, Layer, Use, find, register


class WeightNormUse(nn.Module):
    """A use of a module `inner` whose weight was made of v and g, in the place of that module.

    `inner` holds v as its weight. Slices along the axis `dim` have a length each; all of v has one
    where it is -1.
    """

    inner: nn.Module
    length: Tensor
    dim: int

    def __init__(self, inner: nn.Module, length: Tensor, dim: int) -> None:
        super().__init__()
        self.__dict__.update(_parameters=inner._parameters, inner=inner, length=length, dim=dim)

    @property
    def direction(self) -> Tensor:
        """v."""
        held: Any = self._parameters
        return held["weight"].detach()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The axes of v: before `dim`, `dim`, and after it."""
        shape = self.direction.shape
        if self.dim < 0:
            return 1, 1, shape.numel()
        return prod(shape[: self.dim]), shape[self.dim], prod(shape[self.dim + 1 :])

    def scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """c, (slices,), and v̂ (before, slices, after)."""
        v = self.direction.to(like).reshape(self.sizes)
        norm = torch.linalg.vector_norm(v, dim=(0, 2))
        return self.length.detach().to(like).flatten() / norm, v / norm[:, None]

    def through(self, rows: Tensor) -> Tensor:
        """Rows (..., numel) for W as rows for v; this is its own adjoint."""
        c, unit = self.scale(rows)
        rows = rows.unflatten(-1, self.sizes)
        along = (rows * unit).sum((-3, -1), keepdim=True)
        return (c[:, None] * (rows - along * unit)).flatten(-3)


@register(WeightNormUse)
class WeightNormLayer(Layer):
    """As the layer of the inner module, with the side of the slices scaled by c."""

    use = "normalized"
    curvature = "kronecker"
    joint = False

    def features(self, module: Any, ndim: int) -> int:
        return find(module.inner).features(module.inner, ndim)

    def form(self, module: Any) -> tuple[int, int, int]:
        return find(module.inner).form(module.inner)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        module = uses[0].module.inner
        inner = find(module).block(names, [replace(u, module=module) for u in uses])
        return WeightNormBlock(names["weight"], uses[0].module, inner)

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        return find(module.inner).counted(module.inner, x, delta, keep)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        found = find(module.inner).inputs(module.inner, x, sharing, keep)
        if module.dim <= 0:
            return found
        before, slices, after = module.sizes
        rows = len(module.direction)
        c = module.scale(found.first)[0]
        c = c[:, None].expand(before // rows, slices, after).flatten()
        dense = len(found.second.shape) == 3
        return replace(
            found, second=found.second * (c[:, None] * c if dense else c.square()),
            first=found.first * c if found.first.shape[-1] == len(c) else found.first,
        )  # fmt: skip

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        found = self.shifts(module, x, delta, sharing)
        if module.dim > 0:
            return found
        c = module.scale(found)[0].expand(found.shape[0] * found.shape[1])
        c = c.reshape(found.shape[0], -1)
        return found * (c[:, :, None] * c[:, None] if found.ndim == 3 else c.square())

    def shifts(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        return find(module.inner).outputs(module.inner, x, delta, sharing)


class WeightNormBlock(Block):
    """Rows for v and the bias, from those for W and the bias."""

    def __init__(self, weight: str | None, module: WeightNormUse, inner: Block) -> None:
        self._weight = weight
        self._module = module
        self._inner = inner
        self.names = inner.names
        self.looks = {}

    def narrow(self, start: int, stop: int) -> Block:
        return WeightNormBlock(self._weight, self._module, self._inner.narrow(start, stop))

    def _of(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        turn = self._module.through
        return {n: turn(t) if n == self._weight else t for n, t in found.items()}

    def rows(self) -> dict[str, Tensor]:
        return self._of(self._inner.rows())

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        return self._inner.project(self._of({n: v[n].flatten() for n in self.names}))

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        return self._of(self._inner.lift(c))
