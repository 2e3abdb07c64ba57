"""Passes over matrices [V b], against float64: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = torch.cuda.is_available()
DEVICE = "cuda" if HERE else "cpu"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not HERE and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter",
    ),
]

TOP, LEAST = 2.0**14, 2.0**-120
SIZES: dict[str, Any] = {"top": TOP, "least": LEAST}
#: matrices, rows and columns: whole tiles, less than one, ragged ends
SHAPES = [(2, 16, 256), (1, 1, 8), (3, 13, 264), (2, 40, 776)]
if HERE:
    SHAPES += [(12, 768, 768), (1, 513, 3072), (2, 2304, 776), (300, 33, 520), (1, 520, 16384)]


@pytest.fixture
def work() -> Any:
    from pullback._core.kernels import rounding as kernels

    return kernels


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def parts(shape: tuple[int, int, int], joint: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """V, b, numbers for rows and for columns."""
    torch.manual_seed(0)
    g, o, i = shape
    columns = made(g, i + 8 * joint).abs() + 0.01
    columns[:, i + joint :] = 0
    return made(*shape), 3 * made(g, o) if joint else None, made(g, o).abs() + 0.01, columns


def whole(v: Tensor, b: Tensor | None, times: int = 1) -> Tensor:
    if b is None:
        return v.double()
    return torch.cat([v, b[..., None].expand(-1, -1, times)], 2).double()


def rounds_to(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double(), want, rtol=2**-11 * 1.01, atol=2**-24)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_by_rows(work: Any, monkeypatch, shape: tuple[int, int, int], joint, few) -> None:
    if few:  # programs, which have several tiles then
        monkeypatch.setattr(work, "_PROGRAMS", 1)
    v, b, rows, _ = parts(shape, joint)
    m = work.peaks(v, b, rows, shape[2], across=False, **SIZES)
    want = (whole(v, b) * rows[..., None].double()).abs().amax((1, 2)) / TOP
    torch.testing.assert_close(m.amax(1).double(), want, rtol=1e-6, atol=0)
    got = work.shortened(v, b, rows, shape[2], m, across=False)
    rounds_to(got, whole(v, b, 8) * (rows.double() / want[:, None])[..., None])
    assert got.abs().amax() <= TOP
    assert torch.equal(got, work.shortened(v, b, rows, shape[2], m, across=False))


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_by_columns(work: Any, monkeypatch, shape: tuple[int, int, int], joint, few) -> None:
    if few:
        monkeypatch.setattr(work, "_PROGRAMS", 1)
    columns, wide = parts(shape, joint)[-1], shape[2]
    u = made(*shape[:2], wide + 8 * joint)
    n = work.peaks(u, None, columns, wide, across=True, **SIZES)
    want = (u.double() * columns[:, None].double()).abs().amax((1, 2)) / TOP
    torch.testing.assert_close(n.amax(1).double(), want, rtol=1e-6, atol=0)
    got = work.shortened(u, None, columns, wide, n, across=True)
    assert got.shape == u.shape
    assert got.isfinite().all()  # also what meets zeros
    exact = u.double() * (columns.double() / want[:, None])[:, None]
    rounds_to(got[..., : wide + joint], exact[..., : wide + joint])


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_apart_again(work: Any, monkeypatch, shape: tuple[int, int, int], joint, few) -> None:
    if few:
        monkeypatch.setattr(work, "_PROGRAMS", 1)
    v, b, rows, columns = parts(shape, joint)
    w, unit, wide = made(*shape[:2], shape[2] + 8 * joint), made(len(v)), shape[2]
    m = work.peaks(v, b, rows, wide, across=False, **SIZES)
    n = work.peaks(w, None, columns, wide, across=True, **SIZES)
    want = w.double() * (m.amax(1) * n.amax(1) * unit).double()[:, None, None]
    v.fill_(torch.nan)
    work.scaled(w, m, n, unit, v, b)
    torch.testing.assert_close(v.double(), want[..., :wide], rtol=1e-6, atol=0)
    if b is not None:
        torch.testing.assert_close(b.double(), want[..., wide], rtol=1e-6, atol=0)


def test_zeros(work: Any) -> None:
    v, b, rows, columns = parts((2, 13, 264), True)
    for x, last, by, across in ((v, b, rows, False), (made(2, 13, 272), None, columns, True)):
        x.zero_()
        if last is not None:
            last.zero_()
        m = work.peaks(x, last, by, 264, across=across, **SIZES)
        assert (m == LEAST).all()
        assert not work.shortened(x, last, by, 264, m, across=across).any()


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [(0, 0), (12, 263), (7, 255), (8, 256), (12, -1), (0, -1)])
@pytest.mark.parametrize("across", [False, True])
def test_what_is_not_finite_is_found(work: Any, value: float, at, across: bool) -> None:
    v, b, rows, columns = parts((3, 13, 264), True)
    u = made(3, 13, 272)
    x, last, by = (u, None, columns) if across else (v, b, rows)
    room = x if at[1] >= 0 or across else last
    assert room is not None
    room[(1, at[0], 264 if at[1] < 0 else at[1]) if room.ndim == 3 else (1, at[0])] = value
    m = work.peaks(x, last, by, 264, across=across, **SIZES)
    assert m[[0, 2]].isfinite().all()
    assert m[1].isnan().any() == (value != value)
    assert not m[1].isfinite().all()
    found = work.shortened(x, last, by, 264, m, across=across)
    assert found[[0, 2]].isfinite().all()
    assert found[1].isnan().any()
    weight, bias, one = torch.empty_like(v), made(3, 13), torch.ones(3, device=DEVICE)
    w = torch.ones_like(u)
    work.scaled(w, torch.ones_like(m), m, one, weight, bias)
    assert weight[[0, 2]].isfinite().all()
    assert not weight[1].isfinite().any()
    assert not bias[1].isfinite().any()


def test_memory_that_starts_anywhere(work: Any) -> None:
    """A gradient that is part of a bucket, say."""
    v, b, rows, _ = parts((2, 24, 264), True)
    odd = torch.empty(v.numel() + 1, device=DEVICE)[1:].view(v.shape).copy_(v)
    results = []
    for x in (v, odd):
        m = work.peaks(x, b, rows, 264, across=False, **SIZES)
        results.append((m, work.shortened(x, b, rows, 264, m, across=False)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_more_entries_than_32_bits_count(work: Any) -> None:
    if not HERE or torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs a large GPU")
    g, o, i = 2, 2**17 + 8, 2**13
    x = torch.zeros(g, o, i + 8, device=DEVICE)
    x[1, -1, i - 1], x[1, -1, i] = 3, -5
    columns = torch.ones(g, i + 8, device=DEVICE)
    m = work.peaks(x, None, columns, i, across=True, **SIZES)
    assert float(m[1].amax()) == 5 / TOP
    short = work.shortened(x, None, columns, i, m, across=True)
    assert short[1, -1, i - 2 : i + 1].tolist() == [0, round(3 * TOP / 5 / 8) * 8, -TOP]
    weight, bias = torch.empty(g, o, i, device=DEVICE), torch.empty(g, o, device=DEVICE)
    one = torch.ones_like(m)
    work.scaled(x, one, one, one[:, 0].contiguous(), weight, bias)
    assert weight[1, -1, -2:].tolist() == [0, 3]
    assert float(bias[1, -1]) == -5
    del short, x
    rows = torch.ones(g, o, device=DEVICE)
    m = work.peaks(weight, bias, rows, i, across=False, **SIZES)
    assert float(m[1].amax()) == 5 / TOP
    assert float(work.shortened(weight, bias, rows, i, m, across=False)[1, -1, -1]) == -TOP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [8, 520, 2048, 5000])
def test_softmax_and_runs(classes: int, dtype: torch.dtype) -> None:
    from pullback._core.kernels.softmax import softmax

    z = (3 * made(5, classes)).to(dtype)
    z[1, : classes // 2] = -torch.inf
    p, runs = softmax(z, 256)
    want = torch.softmax(z.double(), 1)
    assert p.dtype == dtype
    torch.testing.assert_close(p.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)
    long = torch.nn.functional.pad(p.double(), (0, -classes % 256)).unflatten(1, (-1, 256))
    torch.testing.assert_close(runs.double(), long.sum(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_softmax_of_what_is_not_finite(value: float) -> None:
    from pullback._core.kernels.softmax import softmax

    z = made(3, 600)
    z[1, 70] = value
    p, runs = softmax(z, 256)
    assert bool(p[1].isnan().all())
    assert bool(runs[1].isnan().all())
    assert bool(torch.isfinite(p[::2]).all())


@pytest.mark.parametrize(("count", "channels"), [(1, 1), (2, 5), (1, 33)])
def test_patches_assembled(count: int, channels: int) -> None:
    from pullback._core.kernels.patches import assembled
    from pullback.maps.layers.correlated import _assembled

    lower = made(count, channels, channels, 3, 5)
    # R[0, −d] = R[0, d]ᵀ, as of a correlation
    lower[..., 0, 0] = lower[..., 0, 4].transpose(1, 2)
    lower[..., 0, 1] = lower[..., 0, 3].transpose(1, 2)
    lower[..., 0, 2] = (lower[..., 0, 2] + lower[..., 0, 2].transpose(1, 2)) / 2
    edges = [made(2, count, 3, channels, 3, channels) for _ in range(2)]
    torch.testing.assert_close(assembled(lower, *edges), _assembled(lower, edges))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 40, 49), (2, 3, 5000)])
def test_channels_turned(shape: tuple[int, ...]) -> None:
    from pullback._core.kernels.patches import turned

    x = made(*shape)
    out = torch.full((shape[1], shape[0], shape[2]), torch.nan, device=DEVICE)
    turned(x, out)
    assert torch.equal(out, x.transpose(0, 1))
