"""The Gram of rows Σ_t δ_t ⊗ a_t, without the rows: a Hadamard product of two small Grams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from ..._core.products import add_cross, cross

Weights = Callable[[slice, slice], Tensor]

_WIDTH = 512  # rows and columns of a tile that stays in a CPU's cache
_PANELS, _LONG = 6, 4096  # elsewhere, panels of a symmetric product, and rows from which they pay


def add_hadamard(out: Tensor, d1: Tensor, d2: Tensor, weights: Weights | None, budget: int) -> None:
    """out += Σ_tt' w_tt' (δ_t·δ'_t') for cotangents (N, R, T, O) and `out` (N·R, N'·R').

    `weights` gives a_t·a'_t' as (n, T, n', T') for slices of samples. Panels of samples keep the
    largest temporary within the budget, and where d2 is d1 only the lower half is formed.
    """
    (n, r, t, _), (n2, r2, t2, _) = d1.shape, d2.shape
    if t * t2 == 1:
        one = d1.flatten(1, 2)
        _add_one_place(out, one, one if d2 is d1 else d2.flatten(1, 2), weights, budget)
        return
    panel = max(1, budget // (4 * r * t * n2 * r2 * t2 * d1.element_size()))
    for a in range(0, n, panel):
        b = min(a + panel, n)
        stop = b if d2 is d1 else n2
        tile = _panel(d1, d2, weights, slice(a, b), slice(0, stop))
        out[a * r : b * r, : stop * r2] += tile


def _add_one_place(
    out: Tensor, d1: Tensor, d2: Tensor, weights: Weights | None, budget: int
) -> None:
    """out += w (δ·δ') for (N, R, O): each tile is multiplied, weighted and added while in cache."""
    (n, r, _), (n2, r2, _) = d1.shape, d2.shape
    left = d1.flatten(0, 1)
    right = left if d2 is d1 else d2.flatten(0, 1)
    if weights is None:
        add_cross(out, left, right)
        return
    w = weights(slice(0, n), slice(0, n2)).view(n, n2)
    for rows, some in _tiles(d1, d2, budget):
        tile = cross(left[rows.start * r : rows.stop * r], right[some.start * r2 : some.stop * r2])
        target = out[rows.start * r : rows.stop * r, some.start * r2 : some.stop * r2]
        along = w[rows, some].repeat_interleave(r2, 1)[:, None]  # long lines are fast lines
        target.unflatten(0, (-1, r)).addcmul_(tile.unflatten(0, (-1, r)), along)


def _tiles(d1: Tensor, d2: Tensor, budget: int) -> Iterator[tuple[slice, slice]]:
    """Slices of samples; where d2 is d1, those on and below the diagonal."""
    (n, r, _), (n2, r2, _) = d1.shape, d2.shape
    if d1.device.type == "cpu":
        high, wide = 2 * _WIDTH // r, min(_WIDTH, max(_WIDTH // 8, n2 * r2 // 8)) // r2
    else:
        high, wide = n, budget // (4 * n * r * r2 * d1.element_size())
        if d2 is d1:  # what stands above the diagonal is left out by whole panels
            wide = min(wide, -(-n // max(1, min(_PANELS, n * r // _LONG))))
    high, wide = max(1, high), max(1, wide)
    for a in range(0, n2, wide):
        for b in range(a if d2 is d1 else 0, n, high):
            yield slice(b, min(b + high, n)), slice(a, min(a + wide, n2))


def _panel(d1: Tensor, d2: Tensor, weights: Weights | None, one: slice, two: slice) -> Tensor:
    left = d1[one].flatten(0, 2)
    right = left if d2 is d1 and one == two else d2[two].flatten(0, 2)
    rows, r, t, _ = d1[one].shape
    columns, r2, t2, _ = d2[two].shape
    out = cross(left, right).view(rows, r, t, columns, r2, t2)
    if weights is not None:
        out *= weights(one, two).view(rows, 1, t, columns, 1, t2)
    return out.sum((2, 5)).view(rows * r, columns * r2)


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
