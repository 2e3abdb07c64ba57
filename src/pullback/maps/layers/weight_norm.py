r"""Layers whose weight is W = g v/‖v‖, by weight normalization.

With c = g/‖v‖ and v̂ = v/‖v‖ on each slice that has a length of its own, moves of v rotate W,

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
from .registry import Block, Layer, Use, describe_layer, find_layer, register


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
    def description(self) -> str:
        """What users know it as: the module."""
        return describe_layer(self.inner)

    @property
    def direction(self) -> Tensor:
        """v."""
        parameters: Any = self._parameters
        return parameters["weight"].detach()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The axes of v: before `dim`, `dim`, and after it."""
        shape = self.direction.shape
        if self.dim < 0:
            return 1, 1, shape.numel()
        return prod(shape[: self.dim]), shape[self.dim], prod(shape[self.dim + 1 :])

    def compute_scale(self, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Return c, (slices,), and v̂ (before, slices, after), in the dtype of `reference`."""
        v = self.direction.to(reference).reshape(self.sizes)
        norm = torch.linalg.vector_norm(v, dim=(0, 2))
        return self.length.detach().to(reference).flatten() / norm, v / norm[:, None]

    def pull_back(self, rows: Tensor) -> Tensor:
        """Return rows (..., numel) for v from rows for W; the map is its own adjoint."""
        c, unit = self.compute_scale(rows)
        rows = rows.unflatten(-1, self.sizes)
        radial = (rows * unit).sum((-3, -1), keepdim=True)
        return (c[:, None] * (rows - radial * unit)).flatten(-3)


@register(WeightNormUse)
class WeightNormLayer(Layer):
    """As the layer of the inner module, with the side of the slices scaled by c."""

    use = "normalized"
    curvature = "kronecker"
    joint = False

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        return find_layer(module.inner).count_feature_axes(module.inner, ndim)

    def form(self, module: Any) -> tuple[int, int, int]:
        return find_layer(module.inner).form(module.inner)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        module = uses[0].module.inner
        inner = find_layer(module).block(names, [replace(u, module=module) for u in uses])
        return WeightNormBlock(names["weight"], uses[0].module, inner)

    def counted_positions(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        return find_layer(module.inner).counted_positions(module.inner, x, delta, keep)

    def input_moments(
        self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None
    ) -> Moments:
        moments = find_layer(module.inner).input_moments(module.inner, x, sharing, keep)
        if module.dim <= 0:
            return moments
        before, slices, after = module.sizes
        rows = len(module.direction)
        c = module.compute_scale(moments.first)[0]
        c = c[:, None].expand(before // rows, slices, after).flatten()
        first = moments.first
        if first.shape[-1] == len(c):
            first = first * c
        return replace(moments, second=_scale_moment(moments.second, c[None]), first=first)

    def output_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        moment = self.bias_moment(module, x, delta, sharing)
        if module.dim > 0:
            return moment
        c = module.compute_scale(moment)[0].expand(moment.shape[0] * moment.shape[1])
        return _scale_moment(moment, c.reshape(moment.shape[0], -1))

    def bias_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        return find_layer(module.inner).output_moment(module.inner, x, delta, sharing)


def _scale_moment(moment: Tensor, c: Tensor) -> Tensor:
    """Return the moment (G, n, n), or its diagonal (G, n), of vectors scaled by c (G, n)."""
    if moment.ndim == 3:
        return moment * (c[:, :, None] * c[:, None])
    return moment * c.square()


class WeightNormBlock(Block):
    """Rows for v and the bias, from those for W and the bias."""

    def __init__(self, weight: str | None, module: WeightNormUse, inner: Block) -> None:
        self._weight = weight
        self._module = module
        self._inner = inner
        self.names = inner.names
        self.structure_tests = {}

    def narrow(self, start: int, stop: int) -> Block:
        return WeightNormBlock(self._weight, self._module, self._inner.narrow(start, stop))

    def _pull_back_weight(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows with those for W replaced by those for v."""
        pulled = dict(rows)
        if self._weight is not None:
            pulled[self._weight] = self._module.pull_back(rows[self._weight])
        return pulled

    def rows(self) -> dict[str, Tensor]:
        return self._pull_back_weight(self._inner.rows())

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        return self._inner.project(self._pull_back_weight({n: v[n].flatten() for n in self.names}))

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        return self._pull_back_weight(self._inner.lift(c))
