"""The Gram of rows Σ_t δ_t ⊗ a_t, without the rows: a Hadamard product of two small Grams."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..._core.products import cross

Weights = Callable[[slice, slice], Tensor]


def hadamard(d1: Tensor, d2: Tensor, weights: Weights | None, budget: int) -> Tensor:
    """Σ_tt' w_tt' (δ_t·δ'_t') for cotangents (N, R, T, O): (N·R, N'·R').

    `weights` gives a_t·a'_t' as (n, T, n', T') for slices of samples. Panels of samples keep the
    largest temporary within the budget, and where d2 is d1 only half of the panels is formed.
    """
    (n, r, t, _), (n2, r2, t2, _) = d1.shape, d2.shape
    symmetric = d2 is d1
    panel = max(1, budget // (4 * r * t * n2 * r2 * t2 * d1.element_size()))
    if panel >= n:
        return _panel(d1, d2, weights, slice(0, n), slice(0, n2))
    out = d1.new_empty(n * r, n2 * r2)
    for a in range(0, n, panel):
        b = min(a + panel, n)
        stop = b if symmetric else n2
        tile = _panel(d1, d2, weights, slice(a, b), slice(0, stop))
        out[a * r : b * r, : stop * r2] = tile
        if symmetric:
            out[: a * r, a * r : b * r] = tile[:, : a * r].T
    return out


def _panel(d1: Tensor, d2: Tensor, weights: Weights | None, one: slice, two: slice) -> Tensor:
    left = d1[one].flatten(0, 2)
    right = left if d2 is d1 and one == two else d2[two].flatten(0, 2)
    rows, r, t, _ = d1[one].shape
    columns, r2, t2, _ = d2[two].shape
    out = cross(left, right).view(rows, r, t, columns, r2, t2)
    if weights is not None:
        out *= weights(one, two).view(rows, 1, t, columns, 1, t2)
    if t * t2 > 1:
        out = out.sum((2, 5))
    return out.view(rows * r, columns * r2)


def inner(x: Tensor, y: Tensor, heights: Tensor | None, one: slice, two: slice) -> Tensor:
    """ā_t·ā'_t' for slices of samples, (n, T, n', T')."""
    left = x[one].flatten(0, 1)
    same = x.data_ptr() == y.data_ptr() and one == two
    out = cross(left, left if same else y[two].flatten(0, 1))
    out = out.view(*x[one].shape[:2], *y[two].shape[:2])
    return out if heights is None else out.add_(heights)


def heights_only(delta: Tensor, heights: Tensor | None, one: slice, two: slice) -> Tensor:
    """The same for a bias alone."""
    assert heights is not None
    n, n2 = len(range(delta.shape[0])[one]), two.stop - two.start
    return heights.expand(n, heights.shape[0], n2, heights.shape[2])
