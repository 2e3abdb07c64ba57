"""Symmetric products, and float32 products on tensor cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pullback._core import products
from pullback._core.products import column_gram, cross_gram, full_precision, gram

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(products._SIZES, one_panel_cpu=0, panel_rows_cpu=48)
    monkeypatch.setattr(products, "_SIZES", sizes)


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("shape", [(3, 5), (257, 300), (64, 2000)])
def test_gram_is_x_xt(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(gram(x), x @ x.T, rtol=1e-12, atol=1e-12)
    assert torch.allclose(gram(x.T), x.T @ x, rtol=1e-12, atol=1e-12)
    assert torch.allclose(gram(x), gram(x).T, rtol=1e-12, atol=1e-12)
    y = torch.randn(7, shape[1], dtype=torch.float64)
    assert torch.allclose(cross_gram(x, y), x @ y.T, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("n", [3, 95, 97, 300])
def test_moment_is_xt_x(n: int) -> None:
    x = torch.randn(700, n, dtype=torch.float64)
    assert torch.allclose(column_gram(x), x.T @ x, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_of_halves_are_summed_in_float32(dtype: torch.dtype, groups: int) -> None:
    x = (1 + torch.randn(groups, 5, 4000)).to(dtype)
    y = (1 + torch.randn(groups, 7, 4000)).to(dtype)
    for a, b in ((x, y), (x, x)):
        product = products.multiply_batches(a, b)
        want = a.double() @ b.double().mT
        assert product.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert float((product - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize(("sliced", "groups"), [(False, 1), (True, 3)])
def test_long_sums_in_float32(sliced: bool, groups: int, request: pytest.FixtureRequest) -> None:
    """Rows may be parts of longer ones; no kernel loses digits by adding up one by one."""
    rows = torch.randn(groups, 120, 60_000)
    if sliced:
        x = rows[:, :100, 3:50_003]
    else:
        x = rows[:, :100].contiguous()
    for y in (x, x[:, :10], rows[:, 100:, : x.shape[2]]):
        want = x.double() @ y.double().mT
        out = torch.zeros(want.shape[1:])
        products.add_cross_gram(out, x[0], y[0])
        for actual, right in ((products.multiply_batches(x, y), want), (out, want[0])):
            assert float((actual - right).norm() / right.norm()) < 1e-6
    want = x[0].double() @ x[0].double().T
    assert float((gram(x[0]) - want).norm() / want.norm()) < 1e-6  # by one product
    request.getfixturevalue("small_panels")
    assert float((gram(x[0]) - want).norm() / want.norm()) < 1e-6


def test_halves_add_up_and_the_high_one_fits_tf32() -> None:
    x = torch.randn(50, 60)
    for m in (x, x.T, x[::2, ::3]):
        high, low = products._split_exactly(m)
        assert torch.equal(high + low, m)
        assert not bool((high.contiguous().view(torch.int32) & 8191).any())
        assert bool((low.abs() <= 2**-11 * m.abs() * (1 + 1e-6)).all())


@pytest.mark.parametrize("depth", [700, 5000, 20_000])
def test_short_sums_add_up(depth: int) -> None:
    x = torch.randn(9, depth, dtype=torch.float64)
    y = torch.randn(depth, 11, dtype=torch.float64)
    out = torch.ones(9, 11, dtype=torch.float64)
    products._add_short_sums(out, x, y)
    assert torch.allclose(out, 1 + x @ y, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("depth", [700, 9000])
def test_split_products_add_up(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with the two products that a GPU alone has done in float32."""
    mm = torch.mm
    bounds = [(0, 100), (100, 130)]
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None: mm(a.float(), b.float()))
    monkeypatch.setattr(products, "_is_large_product", lambda x, y: True)
    monkeypatch.setattr(
        products, "panel_bounds", lambda n, template: bounds if n == 130 else [(0, n)]
    )
    x = torch.randn(130, depth)
    y = torch.randn(50, depth)
    with full_precision(torch.device("cuda"), watched=False):
        assert products._is_split(x, x.T)
        for one, two in ((x, x), (x, y)):
            want = one.double() @ two.double().T
            out = torch.ones(want.shape)
            products.add_cross_gram(out, one, two)
            if one is two:
                out = products.mirror_lower_triangle(out.tril())
            for actual in (out - 1, cross_gram(one, two)):
                assert float((actual - want).norm() / want.norm()) < 2e-6
    assert not products._is_split(x, x.T)


def test_nothing_is_changed_on_the_cpu() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with full_precision(torch.device("cpu")):
        assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_large_products_keep_float32_accuracy_and_the_flags(precision: str) -> None:
    matmul = torch.backends.cuda.matmul
    conv = torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision = precision
        x = torch.randn(4096, 4096, device="cuda")
        y = torch.randn(4096, 4096, device="cuda", requires_grad=True)
        exact = x.double() @ y.detach().double()
        with full_precision(x.device):
            actual = x @ y
            (pulled,) = torch.autograd.grad(actual, y, exact.float())
            square = gram(x)
        assert matmul.fp32_precision == precision
        assert conv.fp32_precision == before[1]
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
    for answer, want in (
        (actual, exact),
        (pulled, x.double().T @ exact),
        (square, x.double() @ x.double().T),
    ):
        assert float((answer.double() - want).norm() / want.norm()) < 1e-5
