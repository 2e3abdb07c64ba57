r"""Jets of functions of one coordinate each, and of their sums and products.

A function of coordinate i alone has no derivatives along the others. Its jet carries those along i
only, so that d such functions cost as much as one jet of d axes, not d of them. With factors f_i of
one coordinate each,

    ∂_i Σ_j f_j = f_i'       Δ Σ_j f_j = Σ_i f_i''
    ∂_i Π_j f_j = f_i' Π_{j≠i} f_j       Δ Π_j f_j = Σ_i f_i'' Π_{j≠i} f_j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .jet import Cell, Jet
from .scheme import Scheme


def has_separate_axes(x: Any) -> bool:
    """Return True for a jet of coordinates, each scaled and shifted, without mixed derivatives."""
    if not isinstance(x, Jet) or not x.affine or x.ndim != 2:
        return False
    if any(len(set(index)) > 1 for index in x.scheme.indices):
        return False
    if x.first.shape[1] != 1:  # it differs from point to point
        return False
    slopes = x.first[:, 0].clone()
    for position, (axis,) in enumerate(x.scheme.indices[x.scheme.first]):
        slopes[position, axis] = 0.0
    return not bool(slopes.any())


def split_axes(x: Jet) -> list[Jet]:
    """Return the jet (B, 1) of every coordinate, with the derivatives along it alone."""
    return [_select_axis(x, axis) for axis in range(x.shape[1])]


def _select_axis(x: Jet, axis: int) -> Jet:
    scheme = _restrict_scheme(x.scheme, axis)
    column = slice(axis, axis + 1)
    first = x.first.new_zeros(0, 1, 1)
    if (axis,) in x.scheme.position:
        position = x.scheme.position[axis,] - 1
        first = x.first[position : position + 1, :, column]
    zeros = [x.value.new_zeros(1, 1)] * (len(scheme) - 1 - len(first))
    return Jet(x.value[:, column], first, zeros, scheme, x.tape, affine=True)


def _restrict_scheme(scheme: Scheme, axis: int) -> Scheme:
    """Return the scheme of the derivatives along one axis."""
    indices = tuple(index for index in scheme.indices if set(index) <= {axis})
    laplacian = tuple(i for i in scheme.laplacian if i == axis)
    return Scheme(indices, laplacian)


def add_axes(jets: Sequence[Jet], scheme: Scheme) -> Jet:
    """Return Σ_i f_i with the derivatives of a scheme, from the jets of all f_i (B, m)."""
    value = torch.stack([jet.value for jet in jets]).sum(0)
    return _join_axes(jets, scheme, value, lambda axis, derivative: derivative)


def multiply_axes(jets: Sequence[Jet], scheme: Scheme) -> Jet:
    """Return Π_i f_i with the derivatives of a scheme, from the jets of all f_i (B, m)."""
    values = [jet.value for jet in jets]
    before = _accumulate_products(values)
    after = _accumulate_products(values[::-1])[::-1]
    value = before[-1] * values[-1]

    def multiply_others(axis: int, derivative: Tensor) -> Tensor:
        return derivative * (before[axis] * after[axis])

    return _join_axes(jets, scheme, value, multiply_others)


def _accumulate_products(values: Sequence[Tensor]) -> list[Tensor]:
    """Return for each tensor the product of those before it."""
    products = [torch.ones_like(values[0])]
    for value in values[:-1]:
        products.append(products[-1] * value)
    return products


def _join_axes(
    jets: Sequence[Jet], scheme: Scheme, value: Tensor, lift: Callable[[int, Tensor], Tensor]
) -> Jet:
    """Return the jet of a value whose derivative along an axis is `lift` of that function's."""

    def differentiate(axis: int, channel: int) -> Tensor:
        return lift(axis, jets[axis].channel(channel).expand(value.shape))

    def first() -> Tensor:
        derivatives = [differentiate(axis, 1) for (axis,) in scheme.indices[scheme.first]]
        if not derivatives:
            return value.new_zeros(0, *value.shape)
        return torch.stack(derivatives)

    def laplacian() -> Tensor:
        total = value.new_zeros(())
        for axis in scheme.laplacian:
            total = total + differentiate(axis, len(jets[axis].scheme) - 1)
        return total

    higher: list[Cell] = []
    for index in scheme.higher:
        axis = index[0]
        channel = jets[axis].scheme.position[index]
        higher.append(partial(differentiate, axis, channel))
    if scheme.laplacian:
        higher.append(laplacian)
    return Jet(value, first, higher, scheme, jets[0].tape)
