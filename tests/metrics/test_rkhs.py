"""Reproducing kernels: closed forms, smoothness, positivity, scales."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from scipy.special import gamma, kv
from torch import Tensor

import pullback as pb
from pullback.metrics.rkhs import (
    Matern,
    ReproducingKernel,
    distances,
    median_distance,
)
from pullback.testing import assert_close


def points(n: int = 6, *shape: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, *(shape or (2,)), generator=g, dtype=torch.float64)


@pytest.mark.parametrize("order", [0.5, 1.5, 2.5, 3.5, 7.5])
def test_matern_is_the_bessel_function(order: float) -> None:
    r = torch.linspace(0.05, 8, 30, dtype=torch.float64)
    actual = Matern(order)(r[:, None], torch.zeros(1, 1).double())[:, 0]
    bessel = 2 ** (1 - order) / gamma(order) * r.numpy() ** order * kv(order, r.numpy())
    assert_close(actual, torch.tensor(bessel), 1e-11, f"ν = {order}")


@pytest.mark.parametrize(("order", "slope"), [(0.5, 2.0), (1.5, 4.0), (2.5, 6.0)])
def test_on_a_line_the_spectrum_decays_as_the_sobolev_norm_says(order: float, slope: float) -> None:
    """∫ K cos(ξr) dr falls as |ξ|^(−2s), s = ν + 1/2 = `smoothness(1)`."""
    r = torch.linspace(-40, 40, 800001, dtype=torch.float64)
    k = Matern(order)(r[:, None], torch.zeros(1, 1).double())[:, 0]
    at = [
        float(torch.trapezoid(k * torch.cos(xi * r), r)) * (1 + xi**2) ** (slope / 2)
        for xi in (0.0, 1.0, 3.0)
    ]
    assert max(at) - min(at) < 1e-5 * at[0], "(1 + ξ²)^s times the spectrum is a constant"
    assert 2 * Matern(order).smoothness(1) == slope


def test_the_papers_kernel_is_order_three_halves() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    want = torch.tensor([0.7357588823, 0.1991482735, 0.4060058497], dtype=torch.float64)
    k = Matern()(x, x)
    assert_close(torch.stack([k[0, 1], k[0, 2], k[1, 2]]), want, 1e-9, "K at X = (0, 1, 3)")
    assert [Matern().smoothness(n) for n in (1, 2, 3, 5)] == [2.0, 2.5, 3.0, 4.0]


@pytest.mark.parametrize("kernel", [Matern(0.5), Matern(), Matern(2.5, 3.0)], ids=str)
def test_kernels_are_positive_with_unit_diagonal(kernel: ReproducingKernel) -> None:
    x = points(8, 2, 3)  # images are vectors
    k = kernel(x, x)
    assert torch.equal(k, k.T)
    assert torch.equal(k.diagonal(), torch.ones(8, dtype=torch.float64))
    assert float(torch.linalg.eigvalsh(k).min()) > 0
    assert kernel(x, x[:3]).shape == (8, 3)
    assert kernel(x.float(), x.float()).dtype == torch.float32


def test_scales_are_lengths() -> None:
    x = points()
    small = Matern(2.5)(x / 20, x / 20)
    assert_close(Matern(2.5, 20.0)(x, x), small, 1e-14, "inputs over 20")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_distances_of_many_wide_points(dtype: torch.dtype) -> None:
    """By inner products, and by differences where these would cancel."""
    x = points(80, 300).to(dtype) + 1e3
    x[1] = x[0]
    x[2] = x[0] + 1e-3
    x[3] = x[0]
    x[3, 0] += 1e-2
    want = torch.stack([(a - x.double()).norm(dim=1) for a in x.double()])
    computed_distances = distances(x, x)
    assert computed_distances.dtype == dtype
    eps = 1e-12 if dtype == torch.float64 else 1e-6
    assert float(((computed_distances - want).abs() / want.clamp(min=1e-30))[want > 0].max()) < eps
    assert float(computed_distances[want == 0].abs().max()) == 0
    assert_close(distances(x, x[:40].clone()), want[:, :40].to(dtype), eps, "two sets")
    near = points(80, 300).to(dtype) * 1e-4  # two clusters, all pairs within them near
    near[40:] += 10
    want = torch.stack([(a - near.double()).norm(dim=1) for a in near.double()])
    assert float((distances(near, near) - want).abs().max()) < 1e-6 * float(want.max())


def test_half_integers_and_lengths_alone() -> None:
    for order in (0, -0.5, 1, 2.0, 1.7, float("nan"), float("inf"), 30.5, "3/2"):
        with pytest.raises(pb.PullbackError, match="half-integers"):
            Matern(order)  # pyright: ignore[reportArgumentType]
    for scale in (0.0, -1.0, float("nan"), float("inf"), "median", None, True):
        with pytest.raises(pb.PullbackError, match="median_distance"):
            Matern(1.5, scale)  # pyright: ignore[reportArgumentType]


def test_median_distance() -> None:
    x = points(7, 2, 2)
    pairs = torch.stack([(x[i] - x[j]).norm() for i, j in combinations(range(7), 2)])
    assert median_distance(x) == pytest.approx(float(pairs.median()))
    assert median_distance(x.half()) == pytest.approx(float(pairs.median()), rel=1e-2)
    assert median_distance(torch.arange(5000.0)) == pytest.approx(5000 * (1 - 0.5**0.5), rel=1e-2)
    k = Matern(scale=median_distance(x))(x, x)
    assert 0.5 < float(k.fill_diagonal_(0.7).median()) < 0.9, "neither the identity nor all-ones"


@pytest.mark.parametrize(
    "x",
    [
        points(1),
        torch.arange(4),
        torch.tensor(1.0),
        torch.ones(4, 2),
        torch.full((3, 1), torch.nan),
    ],
    ids=["one point", "integers", "a number", "equal", "infinite"],
)
def test_inputs_without_a_distance(x: Tensor) -> None:
    with pytest.raises(pb.PullbackError):
        median_distance(x)
