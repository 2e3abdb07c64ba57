"""Formulas for the Gram K of rows Σ_t δ_t ⊗ a_t, for N samples with R covectors each.

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
from enum import Enum
from functools import reduce

import torch
from torch import Tensor

from ..._core.products import add_cross_gram, cross_gram

Weights = Callable[[slice, slice], Tensor]


@dataclass(frozen=True)
class _CacheSizes:
    """Entries of intermediate results on a CPU that are formed at once, and read from its cache.

    They change no result. Measured on one thread with tangent kernels of a conv net, a transformer
    block and an MLP: sixteen times as many entries gain nothing beyond noise (5 %).
    """

    #: of p, when covectors are contracted first; a sixteenth takes 1.1 to 1.2 times as long
    contracted: int = 2**20
    #: of materialized rows; with a sixteenth the conv net takes 1.2 times as long
    rows: int = 2**22
    #: of products M_o·M'_o; a sixteenth takes as long, so that memory decides: 8 MiB in float32
    products: int = 2**21
    #: of cotangents that are compared with their factors; as above, 2 MiB in float32
    cotangents: int = 2**19


_CACHE = _CacheSizes()


class Route(Enum):
    """A formula for the Gram of an affine layer's rows."""

    #: the rows themselves: the layer has only a bias
    ROWS = "rows"
    HADAMARD = "hadamard"
    CONTRACTED = "contracted"
    MATERIALIZED = "materialized"
    SEPARATED = "separated"


@dataclass(frozen=True)
class _Tiling:
    """Sizes of the tiles in which a Gram is formed."""

    #: rows and columns of a tile that stays in a CPU's cache: 1 MiB in float32
    cached_width: int = 512
    #: on a GPU, panels into which the lower half of a symmetric product is divided at most: six
    #: leave 58 % of the work
    panels: int = 6
    #: on a GPU, rows of a panel below which a further division costs more than it saves
    panel_rows: int = 4096


_TILING = _Tiling()


def add_hadamard(out: Tensor, d1: Tensor, d2: Tensor, weights: Weights, budget: int) -> None:
    """Add Σ_tt' w_tt' (δ_t·δ'_t') to `out` (N·R, N'·R') for cotangents (N, R, T, O).

    `weights` gives a_t·a'_t' as (n, T, n', T') for slices of samples. Panels of samples keep the
    largest temporary within the budget, and where d2 is d1 only the lower half is formed.
    """
    n, r, t, _ = d1.shape
    n2, r2, t2, _ = d2.shape
    if t * t2 == 1:
        left = d1.flatten(1, 2)
        right = left
        if d2 is not d1:
            right = d2.flatten(1, 2)
        _add_single_position(out, left, right, weights, budget)
        return
    panel = max(1, budget // (4 * r * t * n2 * r2 * t2 * d1.element_size()))
    for start in range(0, n, panel):
        stop = min(start + panel, n)
        columns = n2
        if d2 is d1:
            columns = stop
        tile = _form_tile(d1, d2, weights, slice(start, stop), slice(0, columns))
        out[start * r : stop * r, : columns * r2] += tile


def _add_single_position(
    out: Tensor, d1: Tensor, d2: Tensor, weights: Weights, budget: int
) -> None:
    """Add w (δ·δ') to `out` for (N, R, O), tile by tile, so that a tile stays in cache."""
    n, r, _ = d1.shape
    n2, r2, _ = d2.shape
    left = d1.flatten(0, 1)
    right = left
    if d2 is not d1:
        right = d2.flatten(0, 1)
    w = weights(slice(0, n), slice(0, n2)).view(n, n2)
    for samples, other_samples in _split_into_tiles(d1, d2, budget):
        rows = slice(samples.start * r, samples.stop * r)
        columns = slice(other_samples.start * r2, other_samples.stop * r2)
        tile = cross_gram(left[rows], right[columns])
        # weights are repeated along the rows, so that the product runs over long lines of memory
        row_weights = w[samples, other_samples].repeat_interleave(r2, 1)[:, None]
        target = out[rows, columns].unflatten(0, (-1, r))
        target.addcmul_(tile.unflatten(0, (-1, r)), row_weights)


def _split_into_tiles(d1: Tensor, d2: Tensor, budget: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of samples of both sides; where d2 is d1, on and below the diagonal."""
    n, r, _ = d1.shape
    n2, r2, _ = d2.shape
    if d1.device.type == "cpu":
        width = _TILING.cached_width
        tile_rows = 2 * width // r
        tile_columns = min(width, max(width // 8, n2 * r2 // 8)) // r2
    else:
        tile_rows = n
        tile_columns = budget // (4 * n * r * r2 * d1.element_size())
        if d2 is d1:  # tiles above the diagonal are left out
            panels = max(1, min(_TILING.panels, n * r // _TILING.panel_rows))
            tile_columns = min(tile_columns, -(-n // panels))
    tile_rows = max(1, tile_rows)
    tile_columns = max(1, tile_columns)
    for column in range(0, n2, tile_columns):
        first_row = 0
        if d2 is d1:
            first_row = column
        for row in range(first_row, n, tile_rows):
            rows = slice(row, min(row + tile_rows, n))
            yield rows, slice(column, min(column + tile_columns, n2))


def _form_tile(
    d1: Tensor, d2: Tensor, weights: Weights, samples: slice, other_samples: slice
) -> Tensor:
    """Return Σ_tt' w_tt' (δ_t·δ'_t') for slices of samples, (n·R, n'·R')."""
    left = d1[samples].flatten(0, 2)
    right = left
    if d2 is not d1 or samples != other_samples:
        right = d2[other_samples].flatten(0, 2)
    n, r, t, _ = d1[samples].shape
    n2, r2, t2, _ = d2[other_samples].shape
    products = cross_gram(left, right).view(n, r, t, n2, r2, t2)
    products *= weights(samples, other_samples).view(n, 1, t, n2, 1, t2)
    return products.sum((2, 5)).view(n * r, n2 * r2)


def multiply_inputs(
    x: Tensor, y: Tensor, heights: Tensor | None, samples: slice, other_samples: slice
) -> Tensor:
    """Return ā_t·ā'_t' for slices of samples, (n, T, n', T'), from inputs (N, T, I)."""
    left = x[samples].flatten(0, 1)
    right = left
    if x.data_ptr() != y.data_ptr() or samples != other_samples:
        right = y[other_samples].flatten(0, 1)
    products = cross_gram(left, right).view(*x[samples].shape[:2], *y[other_samples].shape[:2])
    if heights is None:
        return products
    return products.add_(heights)


def add_contracted(out: Tensor, d1: Tensor, d2: Tensor, weights: Weights, budget: int) -> None:
    """Add Σ_tt' w_tt' (δ_t·δ'_t') to `out` (N·R, N'·R') for cotangents (N, R, T, O).

    `weights` gives a_t·a'_t' as (n, T, n', T') for slices of samples. Where d2 is d1 only the lower
    half is formed.
    """
    n, r, t, o = d1.shape
    n2, r2, t2, _ = d2.shape
    left = d1.reshape(n, r, t * o)
    right = d2.permute(0, 2, 3, 1).reshape(n2, t2, o * r2)
    target = out.view(n, r, n2, r2)
    entries = budget // (4 * d1.element_size())
    if d1.device.type == "cpu":
        entries = min(entries, _CACHE.contracted)
    pairs = entries // (t * o * r2)
    tile_rows = min(n, max(1, pairs))
    tile_columns = max(1, pairs // tile_rows)
    for column in range(0, n2, tile_columns):
        columns = slice(column, min(column + tile_columns, n2))
        first_row = 0
        if d2 is d1:
            first_row = column
        for row in range(first_row, n, tile_rows):
            rows = slice(row, min(row + tile_rows, n))
            count = columns.stop - column
            w = weights(rows, columns).permute(2, 0, 1, 3).reshape(count, -1, t2)
            p = torch.bmm(w, right[columns]).view(count, rows.stop - row, t * o, r2)
            target[rows, :, columns] += (left[rows] @ p).permute(1, 2, 0, 3)


def add_materialized(
    out: Tensor, d1: Tensor, d2: Tensor, x: Tensor, y: Tensor, budget: int
) -> None:
    """Add Σ_gtt' (a_t·a'_t') (δ_t·δ'_t') to `out`, (N·R, N'·R').

    Cotangents are (N, R, G, T, O) and inputs (N, G, T, I). Panels of groups or of output features
    keep the rows within the budget. If d2 is d1, then y is x, and half of the products is formed.
    """
    n, r, g, _, o = d1.shape
    n2, r2 = d2.shape[:2]
    i = x.shape[-1]
    size = budget // (4 * x.element_size())
    height = n * r + n2 * r2
    if x.device.type == "cpu":
        size = min(size, _CACHE.rows)
    elif d2 is d1:
        height = n * r
    panel = max(1, size // (height * i))
    group_step = max(1, panel // o)
    for first_group in range(0, g, group_step):
        groups = slice(first_group, first_group + group_step)
        for first_feature in range(0, o, panel):
            features = slice(first_feature, first_feature + panel)
            rows = form_rows(d1[:, :, groups, :, features], x[:, groups])
            other_rows = rows
            if d2 is not d1:
                other_rows = form_rows(d2[:, :, groups, :, features], y[:, groups])
            add_cross_gram(out, rows, other_rows)


def form_row_panels(delta: Tensor, inputs: Tensor, entries: int) -> Iterator[Tensor]:
    """Yield the rows (N·R, k) of some output features at a time, in panels of about `entries`.

    Cotangents are (N, R, G, T, O) and inputs (N, G, T, I).
    """
    n, r, g, _, o = delta.shape
    step = max(1, entries // (n * r * inputs.shape[-1]))
    for group in range(g):
        groups = slice(group, group + 1)
        for first_feature in range(0, o, step):
            features = slice(first_feature, first_feature + step)
            yield form_rows(delta[:, :, groups, :, features], inputs[:, groups])


def form_rows(delta: Tensor, inputs: Tensor) -> Tensor:
    """Return Σ_t δ_t ⊗ a_t, (N·R, G·O·I), for cotangents (N, R, G, T, O), inputs (N, G, T, I)."""
    n, r, g, t, o = delta.shape
    left = delta.permute(0, 2, 1, 4, 3).reshape(n * g, r * o, t)
    rows = torch.bmm(left, inputs.reshape(n * g, t, -1)).view(n, g, r, -1)
    return rows.transpose(1, 2).reshape(n * r, -1)


@dataclass(frozen=True)
class SeparatedCotangents:
    """Factors v (R, O) and g (N, T, O) of cotangents δ_rto = v_ro g_to."""

    v: Tensor
    g: Tensor

    @classmethod
    def of(cls, delta: Tensor, *, is_likely: bool = False) -> SeparatedCotangents | None:
        """Return the factors of cotangents (N, R, T, O), or None if they do not separate.

        Unless separation is likely, a few cotangents are tested first: that is cheaper, and most
        cotangents without factors fail there.
        """
        few = delta[:2, :, :2]
        if not is_likely and few.shape != delta.shape and _separate(few) is None:
            return None
        return _separate(delta)

    def contract(self, inputs: Tensor, heights: Tensor | None) -> Tensor:
        """Return M (O, N, I), with the bias (O, N, I + 1), for inputs (N, T, I)."""
        m = torch.bmm(self.g.mT, inputs)
        if heights is not None:
            m = torch.cat([m, torch.einsum("nto,t->no", self.g, heights)[..., None]], 2)
        return m.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class ContractedInputs:
    """Rows v_ro M_oi of separated cotangents: v (R, O) and M (O, N, I)."""

    v: Tensor
    m: Tensor


def _separate(delta: Tensor) -> SeparatedCotangents | None:
    """Return the factors of δ (N, R, T, O), or None if their product differs from δ.

    v are the cotangents where each output feature has its largest one, and g solves the least
    squares problem. Their product must agree with δ up to rounding.
    """
    n, r, t, o = delta.shape
    step = r
    if delta.device.type == "cpu":
        step = max(1, _CACHE.cotangents // (n * t * o))
    pieces = delta.split(step, 1)
    sizes = reduce(torch.maximum, (piece.abs().amax(1) for piece in pieces))
    largest, position = sizes.flatten(0, 1).max(0)  # (O,) over samples and positions
    v = delta[position // t, :, position % t, torch.arange(o, device=delta.device)].T  # (R, O)
    norms = v.square().sum(0)
    weights = (v / torch.where(norms == 0, 1, norms)).split(step)
    shares = ((piece * w[:, None]).sum(1) for piece, w in zip(pieces, weights, strict=True))
    g = reduce(torch.Tensor.add_, shares)
    errors = []
    for piece, w in zip(pieces, v.split(step), strict=True):
        difference = torch.addcmul(piece, w[:, None], g[:, None], value=-1)
        errors.append(difference.abs_().amax((0, 1, 2)))
    bound = 32 * torch.finfo(delta.dtype).eps * largest
    if bool((torch.stack(errors) <= bound).all()):
        return SeparatedCotangents(v, g)
    return None


def add_separated(
    out: Tensor, rows: ContractedInputs, other_rows: ContractedInputs, budget: int
) -> None:
    """Add K_rr' = Σ_o v_ro v'_r'o (M_o · M'_o) to `out`, (N·R, N'·R').

    If both are the same object, only the lower half is formed.
    """
    m = rows.m
    m2 = other_rows.m
    o, n, _ = m.shape
    n2 = m2.shape[1]
    r = len(rows.v)
    r2 = len(other_rows.v)
    pairs = (rows.v[:, None] * other_rows.v).flatten(0, 1)  # (R·R', O)
    entries = budget // (4 * m.element_size())
    if m.device.type == "cpu":
        entries = min(entries, _CACHE.products)
    panel = max(1, entries // ((o + r * r2) * n2))
    target = out.view(n, r, n2, r2)
    for start in range(0, n, panel):
        stop = min(start + panel, n)
        columns = n2
        if other_rows is rows:
            columns = stop
        products = torch.bmm(m[:, start:stop], m2[:, :columns].mT)  # (O, n, n')
        share = cross_gram(products.flatten(1).T, pairs)
        target[start:stop, :, :columns] += share.view(-1, columns, r, r2).transpose(1, 2)


@dataclass(frozen=True)
class _Costs:
    """Costs besides multiply-adds, in multiply-adds of equal time.

    Measured on one thread with AVX-512, in float32 and float64. They choose a formula, and a wrong
    choice costs time alone.
    """

    #: a pass over an entry of the product in the cache: 8 to 10
    entry: int = 8
    #: the same for several positions, whose products are written, multiplied and added up: two
    #: passes beyond the cache, 17 to 30 each
    entry_of_several_positions: int = 40
    #: writing an intermediate entry and reading it again in the cache: 16 to 17
    round_trip: int = 16
    #: the same on a GPU. An H200 moves 8 bytes at 4.8 TB/s in the time of 55 multiply-adds, of 140
    #: on tensor cores with split factors; small tiles take longer, since launches count.
    round_trip_on_gpu: int = 400
    #: comparing a cotangent with the product of its factors: two passes
    comparison: int = 16


_COSTS = _Costs()


@dataclass(frozen=True)
class RouteCosts:
    """The cheapest formula that serves all cotangents, and how separation compares with it."""

    cheapest: Route
    #: separation would take less than half of that time, and the test of it may fail
    is_separation_worth_testing: bool


def estimate_costs(d1: Tensor, d2: Tensor, i: int) -> RouteCosts:
    """Compare the formulas by multiply-adds.

    Cotangents of both sides are (N, R, G, T, O), and inputs have width I.
    """
    n, r, g, t, o = d1.shape
    n2, r2, _, t2, _ = d2.shape
    pairs = n * r * n2 * r2
    entry = _COSTS.entry
    if t * t2 > 1:
        entry = _COSTS.entry_of_several_positions
    round_trip = _COSTS.round_trip
    if d1.is_cuda:
        round_trip = _COSTS.round_trip_on_gpu
    contraction = t2 * i + r2 * o * (2 * t2 + round_trip)
    costs = {
        Route.HADAMARD: g * t * t2 * (n * n2 * i + pairs * (o + entry)),
        Route.MATERIALIZED: g * o * i * (pairs + t * (n * r + n2 * r2)),
        Route.CONTRACTED: g * t * (n * n2 * contraction + 2 * pairs * o),
    }
    cheapest = min(costs, key=lambda route: costs[route])
    test = _COSTS.comparison * (n * r * t + n2 * r2 * t2)
    separated = g * o * (i * (n * t + n2 * t2) + n * n2 * i + 4 * pairs + test)
    is_worth_testing = r * r2 > 1 and 2 * separated < costs[cheapest]
    return RouteCosts(cheapest, is_worth_testing)
