"""Samplers of the unit cube: counts, weights, exactness, seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from pullback._core.errors import PullbackError
from pullback.pde.domains.sampling import (
    SAMPLERS,
    Axis,
    Gauss,
    Grid,
    LatinHypercube,
    Points,
    Sampler,
    Sobol,
    Uniform,
    find_sampler,
)

ALL = [Grid(), Gauss(), Uniform(), LatinHypercube(), Sobol()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("which", ALL, ids=repr)
@pytest.mark.parametrize(("n", "dim"), [(1, 1), (7, 1), (64, 2), (70, 2), (100, 3), (1, 4)])
def test_counts_range_and_weights(which: Sampler, n: int, dim: int) -> None:
    x, w = which.unit(n, dim, generator())
    want = n
    if isinstance(which, Grid | Gauss):
        want = max(m**dim for m in range(1, n + 1) if m**dim <= n)
    assert x.shape == (want, dim)
    assert w.shape == (want,)
    assert x.dtype == w.dtype == torch.float64
    assert x.min() >= 0
    assert x.max() <= 1
    assert float(w.sum()) == pytest.approx(1, abs=1e-14)
    assert len(torch.unique(x, dim=0)) == want


@pytest.mark.parametrize("which", [Uniform(), LatinHypercube(), Sobol()], ids=repr)
def test_seed_decides_and_the_global_state_is_left_alone(which: Sampler) -> None:
    before = torch.get_rng_state()
    a, b, c = (which.unit(32, 3, generator(s))[0] for s in (5, 5, 6))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_gauss_is_exact_for_polynomials_of_degree_2m_minus_1() -> None:
    x, w = Gauss().unit(5**2, 2, generator())
    for i in range(10):
        for j in range(10):
            integral = float(w @ (x[:, 0] ** i * x[:, 1] ** j))
            assert integral == pytest.approx(1 / ((i + 1) * (j + 1)), rel=1e-13)
    assert abs(float(w @ x[:, 0] ** 10) - 1 / 11) > 1e-9, "degree 10 is beyond five nodes"


@pytest.mark.parametrize("power", [2, 3, 7])
def test_gauss_on_a_radius_is_exact_in_the_radius(power: int) -> None:
    u, w = Gauss().draw(6, (Axis(power=power),), generator())
    r = u[:, 0] ** (1 / power)
    for k in range(12):
        assert float(w @ r**k) == pytest.approx(power / (power + k), rel=1e-12)


def test_gauss_with_many_nodes_is_split_into_panels() -> None:
    x, w = Gauss().unit(1001, 1, generator())
    assert x.shape == (1001, 1)
    assert bool((x[1:] > x[:-1]).all())
    assert float(w @ (20 * x[:, 0]).sin()) == pytest.approx((1 - math.cos(20)) / 20, abs=1e-14)


def test_grid_is_the_midpoint_rule() -> None:
    x, w = Grid().unit(4, 1, generator())
    assert x[:, 0].tolist() == [0.125, 0.375, 0.625, 0.875]
    assert w.tolist() == [0.25] * 4


def test_grid_is_of_second_order() -> None:
    errors = []
    for m in (10, 20):
        x, w = Grid().unit(m, 1, generator())
        errors.append(abs(float(w @ x[:, 0].exp()) - (math.e - 1)))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.01)


def test_a_latin_hypercube_has_one_point_in_each_slice() -> None:
    x, _ = LatinHypercube().unit(50, 4, generator())
    cells = (50 * x).floor().sort(0).values
    assert cells.T.tolist() == [list(range(50))] * 4


def test_sobol_is_better_spread_than_uniform() -> None:
    def error(which: Sampler) -> float:
        squares = []
        for seed in range(10):
            x, w = which.unit(1024, 4, generator(seed))
            squares.append((float(w @ x.cos().prod(1)) - math.sin(1) ** 4) ** 2)
        return math.sqrt(sum(squares) / 10)

    assert error(Sobol()) < error(Uniform()) / 20
    x, _ = Sobol().unit(1024, 2, generator())
    assert x.min() > 0, "points inside the cube"
    assert x.max() < 1


def test_names() -> None:
    types = [type(find_sampler(name)) for name in ("sobol", "grid", "gauss", "uniform", "lhs")]
    assert types == [Sobol, Grid, Gauss, Uniform, LatinHypercube]
    grid = Grid()
    assert find_sampler(grid) is grid
    assert set(SAMPLERS) == {"sobol", "grid", "gauss", "uniform", "lhs"}


@pytest.mark.parametrize("bad", ["halton", None, 3, Grid])
def test_unknown_samplers_are_refused(bad: object) -> None:
    with pytest.raises(PullbackError, match=r"Unknown sampler.*'sobol'"):
        find_sampler(bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("which", [Grid(), Gauss()], ids=repr)
def test_no_full_grid_is_refused_with_the_smallest_n(which: Sampler) -> None:
    with pytest.raises(PullbackError, match="n ≥ 1024"):
        which.unit(10, 10, generator())
    x, _ = which.unit(1024, 10, generator())
    assert len(x) == 1024


def test_sobol_beyond_its_dimensions_is_refused() -> None:
    with pytest.raises(PullbackError, match=r"21202 dimensions.*'lhs'"):
        Sobol().unit(4, SobolEngine.MAXDIM + 1, generator())


def test_points_move_and_join() -> None:
    def some(n: int, normals: Tensor | None) -> Points:
        return Points(torch.rand(n, 2).double(), torch.rand(n).double(), normals)

    p = some(3, torch.rand(3, 2).double())
    low = p.to(torch.float32)
    assert len(low) == 3
    assert low.normals is not None
    assert {low.x.dtype, low.weights.dtype, low.normals.dtype} == {torch.float32}
    assert p.to(device="cpu").x.dtype == torch.float64
    assert some(2, None).to(torch.float32, "cpu").normals is None
    twice = Points.cat([p, p])
    assert twice.normals is not None
    assert len(twice) == len(twice.normals) == 6
    assert Points.cat([p, some(2, None)]).normals is None
