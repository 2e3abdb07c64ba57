"""Ways to the Gram K of rows Σ_t δ_t ⊗ a_t, for N samples with R covectors each.

*Hadamard*: K = Σ_tt' (a_t·a'_t') (δ_t·δ'_t'), a product of two small Grams, without the rows.

*Contracted*, when few positions meet many covectors. A pair of samples shares its weights
w_tt' = a_t·a'_t' among all R·R' pairs of covectors: they multiply one side's cotangents first,

    p_r't = Σ_t' w_tt' δ'_r't',        K_rr' = Σ_t δ_rt · p_r't,

T²·O·R' + T·O·R·R' operations a pair, where the Hadamard product of Grams takes T²·O·R·R' and
*materialized* rows, formed a panel at a time, O·I·R·R'.

*Separated*, where δ_rto = v_ro g_to. So it is before an activation whose outputs are added up over
positions and read out linearly: v is the read-out, g the activation's derivative. The row is v_ro
M_oi with M_oi = Σ_t g_to a_ti, and K_rr' = Σ_o v_ro v'_r'o (M_o · M'_o): one product of length I
for all pairs of covectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..._core.products import add_cross_gram, cross_gram

Weights = Callable[[slice, slice], Tensor]

_WIDTH = 512  # rows and columns of a tile that stays in a CPU's cache
# elsewhere, panels of a symmetric product, and rows from which they pay
_PANELS = 6
_LONG = 4096


def add_hadamard(out: Tensor, d1: Tensor, d2: Tensor, weights: Weights, budget: int) -> None:
    """out += Σ_tt' w_tt' (δ_t·δ'_t') for cotangents (N, R, T, O) and `out` (N·R, N'·R').

    `weights` gives a_t·a'_t' as (n, T, n', T') for slices of samples. Panels of samples keep the
    largest temporary within the budget, and where d2 is d1 only the lower half is formed.
    """
    n, r, t, _ = d1.shape
    n2, r2, t2, _ = d2.shape
    if t * t2 == 1:
        one = d1.flatten(1, 2)
        _add_one_place(out, one, one if d2 is d1 else d2.flatten(1, 2), weights, budget)
        return
    panel = max(1, budget // (4 * r * t * n2 * r2 * t2 * d1.element_size()))
    for a in range(0, n, panel):
        b = min(a + panel, n)
        if d2 is d1:
            stop = b
        else:
            stop = n2
        tile = _panel(d1, d2, weights, slice(a, b), slice(0, stop))
        out[a * r : b * r, : stop * r2] += tile


def _add_one_place(out: Tensor, d1: Tensor, d2: Tensor, weights: Weights, budget: int) -> None:
    """out += w (δ·δ') for (N, R, O): each tile is multiplied, weighted and added while in cache."""
    n, r, _ = d1.shape
    n2, r2, _ = d2.shape
    left = d1.flatten(0, 1)
    if d2 is d1:
        right = left
    else:
        right = d2.flatten(0, 1)
    w = weights(slice(0, n), slice(0, n2)).view(n, n2)
    for rows, some in _tiles(d1, d2, budget):
        tile = cross_gram(
            left[rows.start * r : rows.stop * r], right[some.start * r2 : some.stop * r2]
        )
        target = out[rows.start * r : rows.stop * r, some.start * r2 : some.stop * r2]
        along = w[rows, some].repeat_interleave(r2, 1)[:, None]  # long lines are fast lines
        target.unflatten(0, (-1, r)).addcmul_(tile.unflatten(0, (-1, r)), along)


def _tiles(d1: Tensor, d2: Tensor, budget: int) -> Iterator[tuple[slice, slice]]:
    """Slices of samples; where d2 is d1, those on and below the diagonal."""
    n, r, _ = d1.shape
    n2, r2, _ = d2.shape
    if d1.device.type == "cpu":
        high = 2 * _WIDTH // r
        wide = min(_WIDTH, max(_WIDTH // 8, n2 * r2 // 8)) // r2
    else:
        high = n
        wide = budget // (4 * n * r * r2 * d1.element_size())
        if d2 is d1:  # what stands above the diagonal is left out by whole panels
            wide = min(wide, -(-n // max(1, min(_PANELS, n * r // _LONG))))
    high = max(1, high)
    wide = max(1, wide)
    for a in range(0, n2, wide):
        for b in range(a if d2 is d1 else 0, n, high):
            yield slice(b, min(b + high, n)), slice(a, min(a + wide, n2))


def _panel(d1: Tensor, d2: Tensor, weights: Weights, one: slice, two: slice) -> Tensor:
    left = d1[one].flatten(0, 2)
    if d2 is d1 and one == two:
        right = left
    else:
        right = d2[two].flatten(0, 2)
    rows, r, t, _ = d1[one].shape
    columns, r2, t2, _ = d2[two].shape
    out = cross_gram(left, right).view(rows, r, t, columns, r2, t2)
    out *= weights(one, two).view(rows, 1, t, columns, 1, t2)
    return out.sum((2, 5)).view(rows * r, columns * r2)


def inner(x: Tensor, y: Tensor, heights: Tensor | None, one: slice, two: slice) -> Tensor:
    """ā_t·ā'_t' for slices of samples, (n, T, n', T')."""
    left = x[one].flatten(0, 1)
    same = x.data_ptr() == y.data_ptr() and one == two
    out = cross_gram(left, left if same else y[two].flatten(0, 1))
    out = out.view(*x[one].shape[:2], *y[two].shape[:2])
    if heights is None:
        return out
    return out.add_(heights)


_CACHED_WEIGHTS = 2**20  # entries of p held at once on a CPU


def add_contracted(out: Tensor, d1: Tensor, d2: Tensor, weights: Weights, budget: int) -> None:
    """out += Σ_tt' w_tt' (δ_t·δ'_t') for cotangents (N, R, T, O) and `out` (N·R, N'·R').

    `weights` gives a_t·a'_t' as (n, T, n', T') for slices of samples. Where d2 is d1 each pair of
    samples is met once.
    """
    n, r, t, o = d1.shape
    n2, r2, t2, _ = d2.shape
    left = d1.reshape(n, r, t * o)
    right = d2.permute(0, 2, 3, 1).reshape(n2, t2, o * r2)
    target = out.view(n, r, n2, r2)
    size = budget // (4 * d1.element_size())
    size = (min(size, _CACHED_WEIGHTS) if d1.device.type == "cpu" else size) // (t * o * r2)
    high = min(n, max(1, size))
    wide = max(1, size // high)
    for j in range(0, n2, wide):
        k = min(j + wide, n2)
        for a in range(j if d2 is d1 else 0, n, high):
            b = min(a + high, n)
            w = weights(slice(a, b), slice(j, k)).permute(2, 0, 1, 3).reshape(k - j, -1, t2)
            p = torch.bmm(w, right[j:k]).view(k - j, b - a, t * o, r2)
            target[a:b, :, j:k] += (left[a:b] @ p).permute(1, 2, 0, 3)


_CACHED_ROWS = 2**22  # entries of rows held at once on a CPU


def add_materialized(
    out: Tensor, d1: Tensor, d2: Tensor, x: Tensor, y: Tensor, budget: int
) -> None:
    """out += Σ_gtt' (a_t·a'_t') (δ_t·δ'_t') for cotangents (N, R, G, T, O), inputs (N, G, T, I).

    `out` is (N·R, N'·R'). Panels of groups or of output features keep the rows within the budget.
    Where d2 is d1 so is y x, and half of the products is formed.
    """
    n, r, g, _, o = d1.shape
    n2, r2 = d2.shape[:2]
    i = x.shape[-1]
    size = budget // (4 * x.element_size())
    height = n * r + n2 * r2
    if x.device.type == "cpu":
        size = min(size, _CACHED_ROWS)
    elif d2 is d1:
        height = n * r
    panel = max(1, size // (height * i))
    many = max(1, panel // o)  # groups at a time
    for b in range(0, g, many):
        groups = slice(b, b + many)
        for a in range(0, o, panel):
            some = (slice(None), slice(None), groups, slice(None), slice(a, a + panel))
            one = _rows(d1[some], x[:, groups])
            add_cross_gram(out, one, one if d2 is d1 else _rows(d2[some], y[:, groups]))


def _rows(delta: Tensor, inputs: Tensor) -> Tensor:
    """Σ_t δ_t ⊗ a_t as a matrix: (N, R, G, T, O), (N, G, T, I) -> (N·R, G·O·I)."""
    n, r, g, t, o = delta.shape
    left = delta.permute(0, 2, 1, 4, 3).reshape(n * g, r * o, t)
    rows = torch.bmm(left, inputs.reshape(n * g, t, -1)).view(n, g, r, -1)
    return rows.transpose(1, 2).reshape(n * r, -1)


_CACHED_PRODUCTS = 2**21  # products M_o·M'_o held at once on a CPU
_PASS = 2**19  # cotangents looked at once there


@dataclass(frozen=True)
class SeparatedCotangents:
    """v (R, O) and g (N, T, O)."""

    v: Tensor
    g: Tensor

    @classmethod
    def of(cls, delta: Tensor, *, hopeful: bool = False) -> SeparatedCotangents | None:
        """The factors of cotangents (N, R, T, O), where they have them up to rounding.

        Unless there is hope, a few are looked at first, which show it already if they have none.
        """
        few = delta[:2, :, :2]
        if not hopeful and few.shape != delta.shape and _factors(few) is None:
            return None
        return _factors(delta)

    def moments(self, inputs: Tensor, heights: Tensor | None) -> Tensor:
        """M (O, N, I), with the bias (O, N, I + 1), for inputs (N, T, I)."""
        m = torch.bmm(self.g.mT, inputs)
        if heights is not None:
            m = torch.cat([m, torch.einsum("nto,t->no", self.g, heights)[..., None]], 2)
        return m.transpose(0, 1).contiguous()


def _factors(delta: Tensor) -> SeparatedCotangents | None:
    """v from each feature's largest cotangents, g by least squares, and the proof."""
    n, r, t, o = delta.shape
    if delta.device.type == "cpu":
        some = max(1, _PASS // (n * t * o))
    else:
        some = r
    parts = delta.split(some, 1)
    sizes = reduce(torch.maximum, (p.abs().amax(1) for p in parts))
    largest, place = sizes.flatten(0, 1).max(0)  # (O,) over samples and positions
    v = delta[place // t, :, place % t, torch.arange(o, device=delta.device)].T  # (R, O)
    norms = v.square().sum(0)
    weights = (v / torch.where(norms == 0, 1, norms)).split(some)
    shares = ((p * w[:, None]).sum(1) for p, w in zip(parts, weights, strict=True))
    g = reduce(torch.Tensor.add_, shares)
    left = [
        torch.addcmul(p, w[:, None], g[:, None], value=-1).abs_().amax((0, 1, 2))
        for p, w in zip(parts, v.split(some), strict=True)
    ]
    bound = 32 * torch.finfo(delta.dtype).eps * largest
    if bool((torch.stack(left) <= bound).all()):
        return SeparatedCotangents(v, g)
    return None


def add_separated(
    out: Tensor,
    one: tuple[SeparatedCotangents, Tensor],
    two: tuple[SeparatedCotangents, Tensor],
    budget: int,
) -> None:
    """out += K for factors and moments of both sides, and `out` (N·R, N'·R').

    Where `two` is `one` the lower half is formed.
    """
    a, m = one
    b, m2 = two
    o, n, _ = m.shape
    n2 = m2.shape[1]
    r = len(a.v)
    r2 = len(b.v)
    pairs = (a.v[:, None] * b.v).flatten(0, 1)  # (R·R', O)
    size = budget // (4 * m.element_size())
    if m.device.type == "cpu":
        size = min(size, _CACHED_PRODUCTS)
    panel = max(1, size // ((o + r * r2) * n2))
    target = out.view(n, r, n2, r2)
    for start in range(0, n, panel):
        stop = min(start + panel, n)
        if two is one:
            end = stop
        else:
            end = n2
        products = torch.bmm(m[:, start:stop], m2[:, :end].mT)  # (O, n, n')
        share = cross_gram(products.flatten(1).T, pairs)
        target[start:stop, :, :end] += share.view(-1, end, r, r2).transpose(1, 2)


def cheapest(d1: Tensor, d2: Tensor, i: int) -> tuple[str, bool]:
    """The cheapest way that is open to all cotangents, and whether to look if they separate.

    For cotangents (N, R, G, T, O) of both sides and inputs of width I, by multiply-adds.
    """
    n, r, g, t, o = d1.shape
    n2, r2, _, t2, _ = d2.shape
    pairs = n * r * n2 * r2
    # multiply-adds in the time of passing over an entry
    if t * t2 > 1:
        sweep = 40
    else:
        sweep = 4
    # the same for one pass out and back
    if d1.is_cuda:
        passing = 400
    else:
        passing = 8
    looking = 16 * (n * r * t + n2 * r2 * t2)  # the same for the proof of separation
    ways = {
        "hadamard": g * t * t2 * (n * n2 * i + pairs * (o + sweep)),
        "materialized": g * o * i * (pairs + t * (n * r + n2 * r2)),
        "contracted": g * t * (n * n2 * (t2 * i + r2 * o * (2 * t2 + passing)) + 2 * pairs * o),
    }
    way = min(ways, key=lambda way: ways[way])
    separated = g * o * (i * (n * t + n2 * t2) + n * n2 * i + 4 * pairs + looking)
    return way, r * r2 > 1 and 2 * separated < ways[way]  # the look may be in vain
