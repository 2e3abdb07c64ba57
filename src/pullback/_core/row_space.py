r"""A basis of the row space of a matrix whose singular values mostly vanish.

Rows of a Jacobian of a smooth network are nearly dependent: of 987 singular values, 290 exceed
5e-14 of the largest. A few random combinations of all rows then span all rows, up to noise, and a
decomposition of A V with an orthonormal basis V of their span costs a fraction of one of A (Halko,
Martinsson and Tropp, 2011). The basis is checked with other random combinations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSpaceLimits:
    """When a basis is looked for, and when it is accepted."""

    #: the smaller side from which on it pays; below, a decomposition takes milliseconds
    smallest_side: int = 256
    #: combinations of rows, as shares of the smaller side, until one is enough; a larger basis
    #: would not pay, and a smaller one is looked for at a tenth of the cost
    shares: tuple[float, ...] = (0.25, 0.75)
    #: combinations that each row enters: with one, two unusual rows may be mixed for good
    uses_of_row: int = 2
    #: part of a combination outside the basis, as a share of the cut-off, that ends the basis
    outside_basis: float = 0.1
    #: directions beyond that end, since single combinations may have small parts by chance
    extra_directions: int = 10
    #: combinations that check the basis; none misses a direction but with probability zero
    checks: int = 8
    #: part of a check outside the basis, as a share of the cut-off, up to which it is accepted
    outside_check: float = 0.5


_LIMITS = RowSpaceLimits()


def find_row_space(a: Tensor, cutoff: float) -> Tensor | None:
    """Return an orthonormal basis V of the rows, (p, k); None if k would be nearly p.

    What A has outside, A (1 − V Vᵀ), is at most about half of cutoff times ‖A‖. The random
    combinations are the same in every call.

    Args:
        a: (n, p) with n ≥ p, on a CPU: sums on a GPU are not repeatable.
        cutoff: singular values below this share of the largest one are noise.
    """
    side = a.shape[1]
    if side < _LIMITS.smallest_side:
        return None
    generator = torch.Generator(a.device).manual_seed(0)
    for share in _LIMITS.shares:
        basis = _span_rows(a, int(share * side), cutoff, generator)
        if basis is not None and _has_all_rows(a, basis, cutoff, generator):
            return basis
    return None


def _span_rows(
    a: Tensor, most_directions: int, cutoff: float, generator: torch.Generator
) -> Tensor | None:
    """Return a basis of the span of so many combinations of rows; None if more are needed."""
    combinations = _combine_rows(a, most_directions, generator)
    reflections, scales = torch.geqrf(combinations.T)
    # the part of each combination that is outside the span of those before it
    outside = reflections.diagonal().abs()
    is_new = outside > _LIMITS.outside_basis * cutoff * outside.max()
    if not bool(is_new.any()):  # the matrix is zero
        return None
    count = int(is_new.nonzero()[-1]) + 1 + _LIMITS.extra_directions
    if count > len(outside):
        return None
    return torch.linalg.householder_product(reflections[:, :count], scales[:count])


def _has_all_rows(a: Tensor, basis: Tensor, cutoff: float, generator: torch.Generator) -> bool:
    """Return True if other combinations of rows lie in the span of the basis, too."""
    weights = torch.randn(_LIMITS.checks, len(a), dtype=a.dtype, generator=generator)
    checks = weights @ a
    missed = (checks - (checks @ basis) @ basis.T).norm(dim=1)
    return bool((missed <= _LIMITS.outside_check * cutoff * checks.norm(dim=1)).all())


def _combine_rows(a: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return sums of rows with random signs, (count, p); each row enters a few of them."""
    sums = a.new_zeros(2 * count, a.shape[1])  # those with a plus, and those with a minus
    for _ in range(_LIMITS.uses_of_row):
        sums.index_add_(0, torch.randint(2 * count, (len(a),), generator=generator), a)
    return sums[:count] - sums[count:]
