"""Sums at repeated indices, in an order that repeats: a run must resume to the same bits."""

from __future__ import annotations

from torch import Tensor


def add_at(out: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """out[index] += values along axis 0, in place.

    On a GPU `index_add_` and `scatter_add_` add in a random order; `index_put_` sorts first, and
    is the faster one. On the CPU it is the other way round.
    """
    if out.is_cuda:
        return out.index_put_((index,), values, accumulate=True)
    return out.index_add_(0, index, values)
