r"""How a sum of products, written with letters as for `einsum`, is a product with matrices.

A use z = Σ w·x names the axes of w, x and z by letters. An axis of the weight is

    a *row* axis      if z has it and x has not,
    a *column* axis   if x has it and z has not,
    a *stack* axis    if both have it: each of its matrices multiplies inputs of its own.

Where row axes, column axes and stack axes each lie in memory as one axis, the weight is a stack of
matrices (rows × columns), or of transposed ones. `read_product` finds it in four stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from torch import Tensor

from .entries import ParameterEntries
from .product import MatrixProduct


class Axis(NamedTuple):
    """Length and stride of an axis of the weight."""

    size: int
    stride: int


class Letters(NamedTuple):
    """The axes of weight, input and output by letters, as for `einsum`."""

    weight: str
    input: str
    output: str


@dataclass(frozen=True)
class MatrixStack:
    """Matrices that lie one after the other in a parameter."""

    #: how many there are, and the rows and columns of each
    form: tuple[int, int, int]
    #: the first one in use, and how many are
    first: int
    used: int
    is_transposed: bool


@dataclass(frozen=True)
class WeightAxes:
    """The letters of the weight's axes by what they count, those of larger stride first."""

    by_letter: dict[str, Axis]
    stack: list[str]
    rows: list[str]
    columns: list[str]

    def select(self, letters: Sequence[str]) -> list[Axis]:
        """Return the axes of these letters."""
        return [self.by_letter[letter] for letter in letters]


def read_product(
    entries: ParameterEntries, letters: Letters, index: Tensor | None
) -> MatrixProduct | None:
    """Return the product with matrices; None where the parameter is used in another way.

    Args:
        entries: the weight.
        letters: the axes of weight, input and output.
        index: which matrix of axis 0 each position of the input meets, where it is picked so.
    """
    if any(len({*axes}) < len(axes) for axes in letters):  # a diagonal is taken
        return None
    if index is None:
        index = entries.index
    axes = _classify_axes(entries, letters, index)
    if axes is None:
        return None
    located = _locate_matrices(entries, axes, may_sum=index is None)
    if located is None:
        return None
    axes, stack = located
    if index is not None and (stack.first or axes.stack):
        return None
    return _make_product(letters, axes, stack, index)


def _classify_axes(
    entries: ParameterEntries, letters: Letters, index: Tensor | None
) -> WeightAxes | None:
    """Sort the weight's axes into stack, rows and columns; None if one is summed by itself."""
    axes = _list_axes(entries, letters, index)
    if axes is None:
        return None
    stack = []
    rows = []
    columns = []
    for letter in sorted(axes, key=lambda letter: -axes[letter].stride):
        in_input = letter in letters.input
        in_output = letter in letters.output
        if in_input and in_output:
            stack.append(letter)
        elif in_output:
            rows.append(letter)
        elif in_input:
            columns.append(letter)
        else:
            return None
    return WeightAxes(axes, stack, rows, columns)


def _list_axes(
    entries: ParameterEntries, letters: Letters, index: Tensor | None
) -> dict[str, Axis] | None:
    """Return the weight's axes, without those that are indexed or expanded; None if unreadable."""
    axes = {}
    for letter, size, stride in zip(letters.weight, entries.size, entries.stride, strict=True):
        is_shared = letter in letters.input and letter in letters.output
        if not (is_shared and (size == 1 or stride == 0)):
            axes[letter] = Axis(size, stride)
    if index is not None:  # axis 0 is picked by position
        picked = letters.weight[0]
        if entries.index is not None and not letters.output.startswith(picked):
            return None
        axes.pop(picked, None)
    return axes


def _locate_matrices(
    entries: ParameterEntries, axes: WeightAxes, *, may_sum: bool
) -> tuple[WeightAxes, MatrixStack] | None:
    """Return the matrices in the parameter, and its axes by what they count in these matrices.

    If products may be added up (`may_sum`), column axes that lie apart may count matrices:
    Σ_k W_k x_k, where all of them have the same output. None if the axes do not form any.
    """
    most_summed_axes = 0
    if axes.columns and not axes.stack and may_sum:
        most_summed_axes = len(axes.columns) - 1
    for summed_axes in range(most_summed_axes + 1):
        stack = [*axes.stack, *axes.columns[:summed_axes]]
        columns = axes.columns[summed_axes:]
        matrices = _stack_matrices(entries, axes, stack, columns)
        if matrices is not None:
            return WeightAxes(axes.by_letter, stack, axes.rows, columns), matrices
    return None


def _stack_matrices(
    entries: ParameterEntries, axes: WeightAxes, stack: Sequence[str], columns: Sequence[str]
) -> MatrixStack | None:
    """Return the stack that these axes form, None if they form none."""
    stacked = _merge_axes(axes.select(stack))
    row = _merge_axes(axes.select(axes.rows))
    column = _merge_axes(axes.select(columns))
    if stacked is None or row is None or column is None:
        return None
    is_row_major = _is_contiguous(row, column)
    if not is_row_major and not _is_contiguous(column, row):
        return None
    matrix_size = row.size * column.size
    if not matrix_size or not _has_stride(stacked, matrix_size):
        return None
    total = entries.parameter.numel()
    if entries.offset % matrix_size or total % matrix_size:
        return None
    form = (total // matrix_size, row.size, column.size)
    first = entries.offset // matrix_size
    return MatrixStack(form, first, stacked.size, is_transposed=not is_row_major)


def _merge_axes(axes: Sequence[Axis]) -> Axis | None:
    """Return several axes as one; None if they do not lie in memory as one."""
    longer = [axis for axis in axes if axis.size != 1]
    if not longer:
        return Axis(1, 1)
    if any(outer.stride != inner.size * inner.stride for outer, inner in pairwise(longer)):
        return None
    return Axis(prod(axis.size for axis in longer), longer[-1].stride)


def _is_contiguous(outer: Axis, inner: Axis) -> bool:
    """Return True if a matrix with these two axes lies in memory without gaps."""
    return _has_stride(inner, 1) and _has_stride(outer, inner.size)


def _has_stride(axis: Axis, stride: int) -> bool:
    """Return True if an axis has this stride; one of length 1 has any."""
    return axis.size == 1 or axis.stride == stride


def _make_product(
    letters: Letters, axes: WeightAxes, stack: MatrixStack, index: Tensor | None
) -> MatrixProduct | None:
    """Return the product with a stack whose axes are known; None if the weight was expanded."""
    output = letters.output
    lead = _count_lead(letters, axes)
    positions = [a for a in output[lead:] if a not in axes.by_letter]
    if not set(letters.input).issuperset(positions):
        return None
    output_stack = [a for a in axes.stack if a in output]
    order = _count_from_last([*positions, *output_stack, *axes.rows], output)
    input_letters = [*output[:lead], *positions, *axes.stack, *axes.columns]
    input_order = tuple(map(letters.input.index, input_letters))
    is_plain_matrix = not stack.is_transposed and stack.form[0] == 1 and index is None
    has_plain_input = "".join(input_letters) == letters.input
    index = _spread_index(index, len(positions) + lead)
    return MatrixProduct(
        form=stack.form,
        first=stack.first,
        used=stack.used,
        is_transposed=stack.is_transposed,
        output_order=order,
        output_stack_axes=len(output_stack),
        row_axes=len(axes.rows),
        index=index,
        summed_axes=_list_summed_axes(letters, axes),
        input_order=input_order,
        lead_axes=lead,
        position_axes=len(positions),
        input_stack_axes=len(axes.stack),
        is_linear=is_plain_matrix and has_plain_input and order == (-1,),
    )


def _count_from_last(selected: Sequence[str], letters: str) -> tuple[int, ...]:
    """Return the axes that the selected letters name, counted from the last one, -1, backwards."""
    return tuple(letters.index(letter) - len(letters) for letter in selected)


def _spread_index(index: Tensor | None, axes: int) -> Tensor | None:
    """Return the index of each position, if any, so that it broadcasts over all position axes."""
    if index is None or axes <= 1:
        return index
    return index.view(-1, *[1] * (axes - 1))


def _count_lead(letters: Letters, axes: WeightAxes) -> int:
    """Return how many axes the output begins with that it has from the input alone."""
    count = 0
    for letter in letters.output:
        if letter not in letters.input or letter in axes.by_letter:
            break
        count += 1
    return count


def _list_summed_axes(letters: Letters, axes: WeightAxes) -> tuple[int, ...]:
    """Return the input's axes that neither weight nor output has."""
    return tuple(
        position
        for position, letter in enumerate(letters.input)
        if letter not in letters.output and letter not in axes.by_letter
    )
