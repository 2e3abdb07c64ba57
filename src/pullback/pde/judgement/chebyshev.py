"""Products of Chebyshev polynomials on a box, with their derivatives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ...maps.jets import Index
from ..domains.sampling import Sampler, Sobol


class ChebyshevBasis:
    """All products T_i(x₁) T_j(x₂) … of degrees below given ones, on a box mapped to [−1, 1]^d.

    Args:
        low, high: corners of the box, (d,).
        degrees: how many polynomials there are along each axis.

    >>> basis = ChebyshevBasis(torch.zeros(1), torch.ones(1), [3])
    >>> basis.derivative(torch.tensor([[0.75]], dtype=torch.float64), (0,)).tolist()
    [[0.0, 2.0, 4.0]]
    """

    def __init__(self, low: Tensor, high: Tensor, degrees: Sequence[int]) -> None:
        self._low = low.double()
        self._high = high.double()
        self.degrees = tuple(degrees)

    @property
    def size(self) -> int:
        """How many products there are."""
        return math.prod(self.degrees)

    def derivative(self, x: Tensor, index: Index) -> Tensor:
        """Return a derivative of every product at points (N, d): (N, size)."""
        orders = Counter(index)
        scale = 2 / (self._high - self._low)
        s = (x.double() - self._low) * scale - 1
        products = torch.ones(len(x), 1, dtype=torch.float64)
        for axis, degree in enumerate(self.degrees):
            order = orders[axis]
            factor = differentiate_chebyshev(s[:, axis], degree, order) * scale[axis] ** order
            products = (products[:, :, None] * factor[:, None, :]).flatten(1)
        return products


def differentiate_chebyshev(s: Tensor, degree: int, order: int) -> Tensor:
    """Return the derivatives T_n⁽ᵏ⁾ of order k at s (N,), for n below a degree: (N, degree).

    The recurrence T_{n+1} = 2sT_n − T_{n−1} is differentiated:
    T⁽ᵏ⁾_{n+1} = 2k T⁽ᵏ⁻¹⁾_n + 2s T⁽ᵏ⁾_n − T⁽ᵏ⁾_{n−1}.
    """
    lower = torch.zeros(len(s), degree, dtype=s.dtype)
    for k in range(order + 1):
        columns = _first_columns(s, k)
        for n in range(1, degree - 1):
            column = 2 * k * lower[:, n] + 2 * s * columns[n] - columns[n - 1]
            columns.append(column)
        lower = torch.stack(columns[:degree], 1)
    return lower


def _first_columns(s: Tensor, order: int) -> list[Tensor]:
    """Return the derivatives of 1 and s."""
    ones = torch.ones_like(s)
    zeros = torch.zeros_like(s)
    if order == 0:
        return [ones, s]
    if order == 1:
        return [zeros, ones]
    return [zeros, zeros]


class ClusteredSobol(Sampler):
    """Sobol points with the density of Chebyshev nodes, (1 − cos πu)/2 along every axis.

    Least squares for polynomials are well conditioned there; at uniform points they are not near
    the boundary. The weights are equal: they are not those of an integral.
    """

    def unit(self, n: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        points, weights = Sobol().unit(n, dim, generator)
        return (1 - torch.cos(math.pi * points)) / 2, weights
