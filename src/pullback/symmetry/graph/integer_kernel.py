"""Kernels of matrices of whole numbers, exactly."""

from __future__ import annotations

from fractions import Fraction
from math import lcm

Row = list[Fraction]


def find_integer_kernel(rows: list[list[int]], size: int) -> list[list[int]]:
    """Return vectors (size,) of whole numbers that span the kernel of a matrix (·, size).

    >>> find_integer_kernel([[1, 2, 0]], 3)
    [[-2, 1, 0], [0, 0, 1]]
    """
    matrix = [[Fraction(x) for x in row] for row in rows]
    pivot_columns = _reduce_rows(matrix, size)
    kernel = []
    for free_column in range(size):
        if free_column in pivot_columns:
            continue
        vector = [Fraction(0)] * size
        vector[free_column] = Fraction(1)
        for i, pivot_column in enumerate(pivot_columns):
            vector[pivot_column] = -matrix[i][free_column]
        denominator = lcm(*(x.denominator for x in vector))
        kernel.append([int(x * denominator) for x in vector])
    return kernel


def _reduce_rows(matrix: list[Row], size: int) -> list[int]:
    """Bring a matrix to reduced row echelon form, in place; return the columns of the pivots."""
    pivot_columns: list[int] = []
    for column in range(size):
        pivot_row = len(pivot_columns)
        candidates = range(pivot_row, len(matrix))
        source = next((i for i in candidates if matrix[i][column]), None)
        if source is None:
            continue
        matrix[pivot_row], matrix[source] = matrix[source], matrix[pivot_row]
        pivot = matrix[pivot_row][column]
        matrix[pivot_row] = [x / pivot for x in matrix[pivot_row]]
        for i, row in enumerate(matrix):
            if i != pivot_row and row[column]:
                matrix[i] = _subtract_multiple(row, row[column], matrix[pivot_row])
        pivot_columns.append(column)
    return pivot_columns


def _subtract_multiple(row: Row, factor: Fraction, other: Row) -> Row:
    """Return row − factor·other."""
    return [x - factor * y for x, y in zip(row, other, strict=True)]
